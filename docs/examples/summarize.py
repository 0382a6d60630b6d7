"""Summarize a batch of documents of different lengths, with left padding.

    python docs/examples/summarize.py --model meta-llama/Llama-3.1-8B-Instruct --files reports/*.txt --budget 0.2

Rows of a batch are independent: padding is not kept, a budget of 0.2 is 0.2 of the length of each row, and every row
gives the same result as on its own. `snapkv` is suited to a long prompt with a short answer: it keeps the tokens that
the last tokens of the prompt, the request to summarize, attend to.

Without `--model`, the embedded model answers. It cannot write summaries: its documents are lists of records, and it is
asked for the value of one of them.

Prints (embedded model, CPU): 4 summaries, 4 of them right; 7,130,720 bytes held, the full cache 13,705,216
"""

import argparse
from pathlib import Path
from random import Random
from typing import Any

import kvpolicy
from kvpolicy_eval.data import prompts


def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer, which pads on the left."""
    if name == "tiny":
        return kvpolicy.tiny()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.eval(), tokenizer


def with_request(tokenizer: Any, text: str) -> str:
    """A document and the request, in the format of the model."""
    request = f"{text}\n\nSummarize the text above in three sentences."
    if not tokenizer.chat_template:
        return request
    chat = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def main() -> None:
    """Summarize all documents in one batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--files", nargs="*", type=Path, help="UTF-8 text files")
    parser.add_argument("--budget", type=float, default=0.3, help="fraction of each document")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    cases = [prompts.recall(Random(count), records=count) for count in (20, 45, 70, 100)]
    texts = [text for text, _ in cases]
    max_new_tokens = 4
    if args.files:
        texts = [with_request(tokenizer, file.read_text(encoding="utf-8")) for file in args.files]
        max_new_tokens = 200
    batch = tokenizer(texts, padding=True, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")
    policy = kvpolicy.Policy(selector=kvpolicy.SnapKV(), budget=args.budget)
    with kvpolicy.attach(model, policy) as handle:
        output = model.generate(**batch.to(model.device), max_new_tokens=max_new_tokens, do_sample=False)
        answers = tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        report = handle.report()
    lengths = batch.attention_mask.sum(-1).tolist()
    for length, budget, answer in zip(lengths, report.layers[0].budget, answers, strict=True):
        print(f"[{length:,} tokens, {budget:,} kept] {answer}")
    score = ""
    if not args.files:
        right = sum(answer == expected for answer, (_, expected) in zip(answers, cases, strict=True))
        score = f", {right} of them right"
    print(f"{len(answers)} summaries{score}; {report.nbytes:,} bytes held, the full cache {report.full_nbytes:,}")


if __name__ == "__main__":
    main()

"""Summarise a batch of documents of different lengths, with left padding.

    python docs/examples/summarise.py --model meta-llama/Llama-3.1-8B-Instruct --files reports/*.txt --budget 0.2

A batch is its rows: padding is kept by no layer, a share of 0.2 is 0.2 of each row's own length, and every row gives
what it gives alone. A long prompt and a short answer is what `snapkv` is made for: it keeps what the prompt's last
tokens, the request to summarise, look at.

Without `--model` the embedded model answers. It cannot write: its documents are lists of records, and the summary
that it is asked for is the value of one of them.

Prints (embedded model, CPU): 4 summaries, 4 of them right; 7,130,688 bytes held, the full cache 13,705,216
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


def asked(tokenizer: Any, text: str) -> str:
    """A document and the request, as the model expects it."""
    request = f"{text}\n\nSummarise the text above in three sentences."
    if not tokenizer.chat_template:
        return request
    chat = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def main() -> None:
    """Summarise all documents at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--files", nargs="*", type=Path, help="UTF-8 text files")
    parser.add_argument("--budget", type=float, default=0.3, help="share of each document")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    drawn = [prompts.recall(Random(count), records=count) for count in (20, 45, 70, 100)]
    texts, new = [text for text, _ in drawn], 4
    if args.files:
        texts, new = [asked(tokenizer, file.read_text(encoding="utf-8")) for file in args.files], 200
    batch = tokenizer(texts, padding=True, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")
    policy = kvpolicy.Policy(selector=kvpolicy.SnapKV(kernel=7), budget=args.budget)
    with kvpolicy.attach(model, policy) as handle:
        output = model.generate(**batch.to(model.device), max_new_tokens=new, do_sample=False)
        answers = tokenizer.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        report = handle.report()
    lengths, kept, right = batch.attention_mask.sum(-1).tolist(), report.layers[0].budget, ""
    for length, budget, answer in zip(lengths, kept, answers, strict=True):
        print(f"[{length:,} tokens, {budget:,} kept] {answer}")
    if not args.files:
        right = f", {sum(told == key for told, (_, key) in zip(answers, drawn, strict=True))} of them right"
    print(f"{len(answers)} summaries{right}; {report.nbytes:,} bytes held, the full cache {report.full_nbytes:,}")


if __name__ == "__main__":
    main()

"""Compress a long document once, and ask many questions about it.

    python docs/examples/long_document.py --model meta-llama/Llama-3.1-8B-Instruct --document book.txt \
        --ask "Who tells the story?" "Where does it end?" --policy squeeze+snapkv+kivi:bits=4@0.25

The document is processed in chunks and compressed before any question is known, which is harder than compressing with
the question at hand. Each question then uses a copy of the compressed cache, so questions do not see each other, and
the document is processed only once. `squeeze` measures the layers in the first chunk.

Without `--model`, the embedded model answers questions about 100 records.

Prints (embedded model, CPU): 10 questions, 10 answered right; the document's 701 tokens take 924,744 bytes, 0.16 of
the full cache
"""

import argparse
import copy
from pathlib import Path
from random import Random
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.data import prompts


def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if name == "tiny":
        return kvpolicy.tiny()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)


@torch.no_grad()
def read(model: Any, document: torch.Tensor, chunk: int) -> kvpolicy.PolicyCache:
    """The cache of a document [1, P]. It is given the length, so that a fraction refers to the whole document."""
    cache = kvpolicy.PolicyCache(model, prompt=document.shape[1])
    for part in document.split(chunk, dim=1):
        model(part, cache=cache, logits_to_keep=1)
    return cache


def main() -> None:
    """Process the document once, then answer all questions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--document", type=Path, help="a UTF-8 text file")
    parser.add_argument("--ask", nargs="*", default=[])
    parser.add_argument("--policy", default="squeeze+snapkv+kivi:bits=4@0.5")
    parser.add_argument("--chunk", type=int, default=8192)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    text, _ = prompts.split(prompts.recall(Random(0), records=100)[0])
    records = dict(line.split("=") for line in text.split())
    questions = {f"?{key}=": records[key] for key in sorted(records)[:10]}
    max_new_tokens = 4
    if args.document:
        text = args.document.read_text(encoding="utf-8")
        max_new_tokens = 100
        questions = dict.fromkeys((f"\n\nQuestion: {question}\nAnswer:" for question in args.ask), "")
    document = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    with kvpolicy.attach(model, args.policy):
        cache = read(model, document, args.chunk)
        right = 0
        for question, answer in questions.items():
            ids = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
            both = torch.cat([document, ids], 1)  # `generate` runs only the tokens that are not in the cache
            output = model.generate(both, cache=copy.deepcopy(cache), max_new_tokens=max_new_tokens, do_sample=False)
            text = tokenizer.decode(output[0, both.shape[1] :], skip_special_tokens=True)
            right += text == answer
            print(f"{question.strip()} {text}")
        score = "" if args.document else f", {right} answered right"
        fraction = cache.nbytes / cache.full_nbytes
        print(
            f"{len(questions)} questions{score}; the document's {document.shape[1]:,} tokens take "
            f"{cache.nbytes:,} bytes, {fraction:.2f} of the full cache"
        )


if __name__ == "__main__":
    main()

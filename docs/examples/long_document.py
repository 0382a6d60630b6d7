"""Compress a long document once, and ask many questions about it.

    python docs/examples/long_document.py --model meta-llama/Llama-3.1-8B-Instruct --document book.txt \
        --ask "Who tells the story?" "Where does it end?" --policy squeeze+snapkv+kivi:bits=4@0.25

The document is read into one cache, in chunks, and brought under the budget before any question is known, which is the
harder case. Each question then gets a copy of the compressed cache: it attends to what was kept and leaves the original
as it was, so that no question sees another, and the document is never read again. `squeeze` measures the layers in the
first chunk.

Without `--model` the embedded model answers, about 100 records.

Prints (embedded model, CPU): 10 questions, 10 answered right; the document's 701 tokens take 1,720,640 bytes, 0.30 of
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
    """A cache of the document, [1, P]; told its length, so that a share is one of the whole and not of a chunk."""
    cache = kvpolicy.PolicyCache(model, prompt=document.shape[1])
    for part in document.split(chunk, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def main() -> None:
    """Read once, ask often."""
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
    asked, new = {f"?{key}=": records[key] for key in sorted(records)[:10]}, 4
    if args.document:
        text, new = args.document.read_text(encoding="utf-8"), 100
        asked = dict.fromkeys((f"\n\nQuestion: {question}\nAnswer:" for question in args.ask), "")
    document = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    with kvpolicy.attach(model, args.policy):
        cache, right = read(model, document, args.chunk), 0
        for question, answer in asked.items():
            own = copy.deepcopy(cache)
            ids = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
            both = torch.cat([document, ids], 1)  # generate feeds only what the cache has not seen
            output = model.generate(both, past_key_values=own, max_new_tokens=new, do_sample=False)
            told = tokenizer.decode(output[0, both.shape[1] :], skip_special_tokens=True)
            right += told == answer
            print(f"{question.strip()} {told}")
        known = "" if args.document else f", {right} answered right"
        print(
            f"{len(asked)} questions{known}; the document's {document.shape[1]:,} tokens take {cache.nbytes:,} bytes, "
            f"{cache.nbytes / cache.full_nbytes:.2f} of the full cache"
        )


if __name__ == "__main__":
    main()

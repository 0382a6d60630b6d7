"""Compose policies in Python: any allocator, any selector, any codec.

    python docs/examples/compose.py --model meta-llama/Llama-3.1-8B --budget 0.1

A policy is three objects and a budget. Loops over objects make a table of every combination: here two allocators, three
selectors and two codecs, each on the same prompts, with the share of the full cache's bytes that each holds at the end.
`str(policy)` names a line; the words can be given back to `--policy`, to lm-eval and to `Policy.parse`.

The prompts are records and a question, as text: a large model has to copy the value too. Four prompts rank nothing;
`kvpolicy-eval sweep` measures with confidence intervals.

Prints (embedded model, CPU): best of 12: squeeze+window+kivi:bits=4@0.3, 4 of 4 right with 0.25 of the bytes
"""

import argparse
from itertools import product
from random import Random
from typing import Any

import kvpolicy
from kvpolicy import KIVI, KVCrush, Plain, Policy, SlidingWindow, SnapKV, SqueezeAttention, Uniform
from kvpolicy_eval.data import prompts


def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if name == "tiny":
        return kvpolicy.tiny()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)


def policies(budget: float) -> list[Policy]:
    """Every combination of the parts."""
    allocators = [Uniform(), SqueezeAttention()]
    selectors = [SlidingWindow(), SnapKV(kernel=7), KVCrush(base=SnapKV(kernel=7))]
    codecs = [Plain(), KIVI(bits=4)]
    return [
        Policy(allocator=allocator, selector=selector, codec=codec, budget=budget)
        for allocator, selector, codec in product(allocators, selectors, codecs)
    ]


def measure(model: Any, tokenizer: Any, policy: Policy, cases: list[tuple[str, str]]) -> tuple[int, float]:
    """How many prompts were answered right, and the share of the full cache's bytes held."""
    right, share = 0, 0.0
    with kvpolicy.attach(model, policy) as handle:
        for prompt, answer in cases:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            told = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            right += told.strip().startswith(answer)
            report = handle.report()
            share += report.nbytes / report.full_nbytes / len(cases)
    return right, share


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    cases = [prompts.recall(Random(seed), records=40) for seed in range(args.prompts)]
    rows = [(policy, *measure(model, tokenizer, policy, cases)) for policy in policies(args.budget)]
    for policy, right, share in rows:
        print(f"{policy!s:60} {right:2} of {len(cases)} right, {share:.2f} of the bytes")
    best, right, share = max(rows, key=lambda row: (row[1], -row[2]))
    print(f"best of {len(rows)}: {best}, {right} of {len(cases)} right with {share:.2f} of the bytes")


if __name__ == "__main__":
    main()

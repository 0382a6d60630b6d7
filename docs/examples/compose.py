"""Combine policies in Python: any allocator, any selector, any codec.

    python docs/examples/compose.py --model meta-llama/Llama-3.1-8B --budget 0.1

A policy consists of parts and a budget. Nested loops give a table of all combinations: here two allocators, three
selectors and two codecs, each on the same prompts, with the fraction of the full cache's bytes that each holds at the
end. `str(policy)` is the spec of a policy, which `--policy`, lm-eval and `Policy.parse` accept.

The prompts are records and a question, as text: a large model has to copy the value too. Four prompts are too few for a
ranking; `kvpolicy-eval sweep` measures with confidence intervals.

Prints (embedded model, CPU): best of 12: snapkv+kivi:bits=4@0.3, 4 of 4 right with 0.19 of the bytes
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
    """All combinations of the parts."""
    allocators = [Uniform(), SqueezeAttention()]
    selectors = [SlidingWindow(), SnapKV(), KVCrush(base=SnapKV())]
    codecs = [Plain(), KIVI(bits=4)]
    return [
        Policy(allocator=allocator, selector=selector, codec=codec, budget=budget)
        for allocator, selector, codec in product(allocators, selectors, codecs)
    ]


def measure(model: Any, tokenizer: Any, policy: Policy, cases: list[tuple[str, str]]) -> tuple[int, float]:
    """The number of correct answers, and the mean fraction of the full cache's bytes that the cache holds."""
    right = 0
    fraction = 0.0
    with kvpolicy.attach(model, policy) as handle:
        for prompt, answer in cases:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
            text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            right += text.strip().startswith(answer)
            report = handle.report()
            fraction += report.nbytes / report.full_nbytes / len(cases)
    return right, fraction


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
    for policy, right, fraction in rows:
        print(f"{policy!s:60} {right:2} of {len(cases)} right, {fraction:.2f} of the bytes")
    best, right, fraction = max(rows, key=lambda row: (row[1], -row[2]))
    print(f"best of {len(rows)}: {best}, {right} of {len(cases)} right with {fraction:.2f} of the bytes")


if __name__ == "__main__":
    main()

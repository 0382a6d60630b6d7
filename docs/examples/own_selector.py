"""Write a selector and use it as an object, without a package or an entry point.

    python docs/examples/own_selector.py --model meta-llama/Llama-3.1-8B --budget 0.3

`RareKeys` keeps the tokens whose keys point away from the mean key, and the newest tokens. A selector is a strategy: a
frozen dataclass of hyperparameters, which are checked. It inherits from `kvpolicy.protocols.Selector`, or from
`Scored`, which has a score for each slot: it hands over what it needs to see (`statistics`), scores tokens (`observe`),
and gives each one a priority (`priority`). The engine handles batches, budgets, codecs and layers.

The object can be combined with every allocator and codec, and used in `KVCrush(base=...)`. A name in specs requires an
entry point, see docs/extend/selector.md.

Prints (embedded model, CPU): RareKeys(window=16, decode='evict'): 5 of 8 right, SlidingWindow(decode='evict'): 1 of 8
right
"""

import argparse
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvpolicy
from kvpolicy.helpers import least, strategy
from kvpolicy.protocols import DecodeMode, Scored, Scores, State, View
from kvpolicy.statistics import Results, Statistic, Vectors
from kvpolicy_eval.data import prompts


@strategy
class RareKeys(Scored):
    """Keep the tokens whose keys point away from the mean key, and the newest `window`."""

    window: int = least(1, 16)
    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """Keys and values of the prompt; no attention statistics."""
        return (Vectors(),)

    def observe(self, state: Scores, seen: Results, view: View) -> State:
        """Score every candidate of a prompt, [B, H, N]."""
        keys = F.normalize(seen[Vectors].keys.float(), dim=-1)
        mean = (keys * view.valid[..., None]).sum(2, keepdim=True)  # without padding
        return Scores(-F.cosine_similarity(keys, mean, dim=-1))

    def priority(self, state: Scores, view: View) -> Tensor:
        """The window, at most half the budget, is always kept, other tokens by score: [B, H, N]."""
        window = (view.budget // 2).clamp(1, self.window)
        return state.score.masked_fill(view.newest(window), torch.inf)


def load(name: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    if name == "tiny":
        return kvpolicy.tiny()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)


def main() -> None:
    """Compare `RareKeys` with a sliding window of the same budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--budget", type=float, default=0.4)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    cases = [prompts.recall(Random(seed), records=70) for seed in range(8)]
    right: dict[str, int] = {}
    for selector in (RareKeys(), kvpolicy.SlidingWindow()):
        policy = kvpolicy.Policy(selector=selector, budget=args.budget)
        with kvpolicy.attach(model, policy):
            for prompt, answer in cases:
                inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
                output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
                text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
                right[repr(selector)] = right.get(repr(selector), 0) + text.strip().startswith(answer)
    print(", ".join(f"{name}: {count} of {len(cases)} right" for name, count in right.items()))


if __name__ == "__main__":
    main()

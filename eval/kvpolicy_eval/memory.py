"""`python -m kvpolicy_eval.memory`: what large models take on each rank of tensor parallelism, and what fits beside.

Everything is planned from configs that ship, without weights. Bytes are decimal: 1 GB is 10^9.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

import kvpolicy
from kvpolicy.hf.embedded import config_of
from kvpolicy.planning.result import CachePlan
from kvpolicy.spec.budget import bytes_of
from kvpolicy_eval.markdown import fill, table

MODELS = ["llama-2-70b", "llama-3-70b", "mixtral-8x7b"]
RANKS = [2, 4, 8]
POLICIES = ["full", "squeeze+kvcrush/h2o@0.2", "squeeze+kvcrush/h2o+kivi:bits=4@0.2"]
HEAD = ["model", "ranks", "weights", "policy", "cache of a row", "largest batch"]


def rows(
    models: list[str], policies: list[str], memory: int, backend: str, prompt: int, new: int
) -> Iterator[list[str]]:
    """A line of each model, number of ranks and policy; the stock cache where the policy is `full`."""
    for model in models:
        for tp in RANKS:
            for policy in policies:
                plan = kvpolicy.plan(
                    config_of(model), policy, prompt=prompt, new=new, dtype=torch.bfloat16, tp=tp, backend=backend
                )
                yield [model, str(tp), *_cells(plan, policy, memory)]


def _cells(plan: CachePlan, policy: str, memory: int) -> list[str]:
    full = policy == "full"
    most = plan.full_largest_batch(memory) if full else plan.largest_batch(memory)
    weights = f"{plan.weights.nbytes / 1e9:.1f} GB" if plan.weights else ""
    cache = plan.full_nbytes if full else plan.nbytes
    return [weights, f"`{policy}`", f"{cache / 1e6:,.0f} MB", f"{most:,}"]


def main() -> None:
    """Print the table, and fill a page with it where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.memory", description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="shipped names, folders, config.json or hub names")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="full is the stock cache")
    parser.add_argument("--memory", default="80GB", help="of each rank")
    parser.add_argument("--backend", default="deepspeed", help="who divides the weights: deepspeed or hf")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each row's prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens to be generated")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'memory'")
    args = parser.parse_args()
    memory = bytes_of(args.memory)
    text = table(HEAD, rows(args.models, args.policies, memory, args.backend, args.prompt, args.new))
    text += (
        f"\n\nBytes on each rank in bf16, divided by `{args.backend}`; rows of {args.prompt:,} prompt and {args.new:,} "
        f"new tokens in {args.memory} of a rank. Not counted: activations, and a prompt's own cache before it is "
        "compressed."
    )
    print(text)
    if args.fill:
        fill(args.fill, "memory", text)


if __name__ == "__main__":
    main()

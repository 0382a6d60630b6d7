"""`python -m kvpolicy_eval.tables.memory`: memory of large models per tensor-parallel rank, and the batch that fits.

Everything is planned from the configs that ship with the package, without weights. Bytes are decimal: 1 GB is 10^9.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

import kvpolicy
from kvpolicy.planning.result import CachePlan
from kvpolicy.spec.budget import bytes_of
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table

MODELS = ["llama-2-70b", "llama-3-70b", "mixtral-8x7b"]
RANKS = [2, 4, 8]
POLICIES = ["full", "squeeze+kvcrush/h2o@0.2", "squeeze+kvcrush/h2o+kivi:bits=4@0.2"]
COLUMNS = ["model", "ranks", "weights", "policy", "cache of a row", "largest batch", "in chunks"]


def rows(
    models: list[str], policies: list[str], memory: int, backend: str, prompt: int, new: int, chunk: int
) -> Iterator[list[str]]:
    """One row per model, number of ranks and policy.

    Args:
        models: Names of shipped configs, folders, config files or names on the Hub.
        policies: Specs; `full` is the stock cache.
        memory: Bytes of each rank.
        backend: Library that shards the weights.
        prompt: Tokens of each row's prompt.
        new: Tokens to be generated.
        chunk: Tokens that are prefilled at a time in the last column.
    """
    for model in models:
        for tp in RANKS:
            for policy in policies:
                sizes: dict[str, Any] = {"prompt": prompt, "new": new, "tp": tp, "dtype": torch.bfloat16}
                plan, chunked = (
                    kvpolicy.plan(model, policy, **sizes, backend=backend, chunk=at_once) for at_once in (None, chunk)
                )
                yield [model, str(tp), *_cells(plan, policy, memory), f"{_rows(chunked, policy, memory):,}"]


def _cells(plan: CachePlan, policy: str, memory: int) -> list[str]:
    weights = f"{plan.weights.nbytes / 1e9:.1f} GB" if plan.weights else ""
    cache = plan.full_nbytes if policy == "full" else plan.nbytes
    return [weights, f"`{policy}`", f"{cache / 1e6:,.0f} MB", f"{_rows(plan, policy, memory):,}"]


def _rows(plan: CachePlan, policy: str, memory: int) -> int:
    return plan.full_largest_batch(memory) if policy == "full" else plan.largest_batch(memory)


def main() -> None:
    """Print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.tables.memory", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, help="shipped names, folders, config.json files or Hub names"
    )
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="specs; full is the stock cache")
    parser.add_argument("--memory", default="80GB", help="memory of each rank")
    parser.add_argument("--backend", default="deepspeed", help="library that shards the weights: deepspeed or hf")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of each row's prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens to be generated")
    parser.add_argument(
        "--chunk", type=int, default=256, help="tokens that are prefilled at a time, in the last column"
    )
    add_fill_argument(parser, "memory")
    args = parser.parse_args()
    memory = bytes_of(args.memory)
    found = rows(args.models, args.policies, memory, args.backend, args.prompt, args.new, args.chunk)
    text = table(COLUMNS, found)
    text += (
        f"\n\nBytes on each rank in bf16, sharded by `{args.backend}`; rows of {args.prompt:,} prompt and {args.new:,} "
        f"new tokens, {args.memory} per rank. The largest batch is prefilled at once, the last column {args.chunk:,} "
        "tokens of each row at a time; weights, cache and the largest activations count."
    )
    publish(text, "memory", args.fill)


if __name__ == "__main__":
    main()

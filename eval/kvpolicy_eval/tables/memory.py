"""Memory of large models per tensor-parallel rank, and the batch that fits.

Everything is planned from the configs that ship with the package, without weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

import kvpolicy
from kvpolicy.planning.result import CachePlan
from kvpolicy.text.budget import bytes_of
from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.common.table import Grid, Option, Section, Table

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
    weights = format_bytes(plan.weights.nbytes) if plan.weights else ""
    cache = plan.full_nbytes if policy == "full" else plan.nbytes
    return [weights, f"`{policy}`", format_bytes(cache), f"{_rows(plan, policy, memory):,}"]


def _rows(plan: CachePlan, policy: str, memory: int) -> int:
    return plan.full_largest_batch(memory) if policy == "full" else plan.largest_batch(memory)


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    lines = rows(args.models, args.policies, bytes_of(args.memory), args.backend, args.prompt, args.new, args.chunk)
    note = (
        f"Bytes on each rank in bf16, sharded by `{args.backend}`; rows of {args.prompt:,} prompt and {args.new:,} "
        f"new tokens, {args.memory} per rank. The largest batch is prefilled at once, that of the last column with "
        f"{args.chunk:,} tokens of each row at a time; weights, cache and the largest activations count."
    )
    yield Section("memory", [Grid(COLUMNS, lines)], note)


TABLE = Table(
    measure=measure,
    places={"memory": ["docs/guide/tensor-parallel.md"]},
    options=[
        Option("--models", nargs="+", default=MODELS, help="shipped names, folders, config.json files or Hub names"),
        Option("--policies", nargs="+", default=POLICIES, help="specs; full is the stock cache"),
        Option("--memory", default="80GiB", help="memory of each rank"),
        Option("--backend", default="deepspeed", help="library that shards the weights: deepspeed or hf"),
        Option("--prompt", type=int, default=4096, help="tokens of each row's prompt"),
        Option("--new", type=int, default=1024, help="tokens to be generated"),
        Option("--chunk", type=int, default=256, help="tokens that are prefilled at a time, in the last column"),
    ],
    needs="configs of the models",
)

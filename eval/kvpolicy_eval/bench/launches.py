"""Operations of an eager decode step, per layer: each launches a kernel, and this bounds a step on a GPU.

Counted by a dispatch mode, of a Llama with random weights, so that no number depends on the machine. The operations of
the whole step, of the model and of the policy, are divided by the number of layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import metrics
from transformers import StaticCache

import kvpolicy
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.operations import LAYERS, PROMPT, WIDTH, step_operations
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect

POLICIES = (
    "full",
    "window@0.2",
    "streaming@0.2",
    "snapkv@0.2",
    "h2o@0.2",
    "tova@0.2",
    "expected@0.2",
    "keydiff@0.2",
    "squeeze+kvcrush/snapkv@0.2",
    "h2o+merge@0.2",
    "tokenwise:bits=4",
    "kivi:bits=4",
    "snapkv+kivi:bits=4@0.5",
    "snapkv+tokenwise:bits=4@0.5",
    "uniform/adakv+snapkv@0.2",
    "uniform/adakv+h2o@0.2",
    "uniform/adakv+snapkv+tokenwise:bits=4@0.5",
    "full+quest:read=64:dense=0",
    "snapkv+quest:read=64:dense=0@0.5",
    "uniform/adakv+kvzip+tokenwise:bits=4@0.5",
)
COLUMNS = ["policy", "operations per layer", "waits per step", "KiB per layer"]


def compiled_kernels(policy: str | None) -> int:
    """Kernels that inductor makes for a step, but for matrix products, which it leaves to libraries.

    Args:
        policy: A spec; None for the stock `StaticCache`.
    """
    torch.compiler.reset()
    model = llama(LAYERS, WIDTH, heads=4)
    if policy is None:
        return _kernels(model, StaticCache(config=model.config, max_cache_len=PROMPT + 8))
    with kvpolicy.attach(model, policy):
        return _kernels(model, kvpolicy.PolicyCache(model, new=8))


def _kernels(model: Any, cache: Any) -> int:
    with torch.no_grad():
        model(tokens(PROMPT), cache=cache)
        metrics.reset()
        torch.compile(model, fullgraph=True)(tokens(1), cache=cache)
    return metrics.generated_kernel_count


def row(policy: str | None, compiled: bool) -> list[str]:
    """One row of the table."""
    counted = step_operations(policy)
    name = "stock `DynamicCache`" if policy is None else f"`{policy}`"
    cells = [name, f"{counted.operations / LAYERS:.1f}", str(counted.waits), f"{counted.nbytes / LAYERS / 1024:.0f}"]
    return [*cells, f"{compiled_kernels(policy) / LAYERS:.1f}"] if compiled else cells


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    policies = args.only or [None, *POLICIES]
    rows = collect(row(policy, args.compiled) for policy in policies)
    columns = [*COLUMNS, "compiled kernels per layer"] if args.compiled else COLUMNS
    note = (
        f"torch {torch.__version__}; {LAYERS} layers of hidden size {WIDTH}, a step after {PROMPT} tokens that encodes "
        "no block."
    )
    yield Section("launches", [Grid(columns, rows)], note)


TABLE = Table(
    measure=measure,
    places={"launches": ["docs/benchmarks.md"]},
    options=[
        Option("--compiled", action="store_true", help="compile each step too, and count its kernels; some minutes"),
        Option("--only", nargs="+", metavar="POLICY", help="these policies only"),
    ],
)

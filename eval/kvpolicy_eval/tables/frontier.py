"""At equal bytes, more tokens or more precision?

Every codec gets the same fraction of the full cache's bytes on the embedded model, and one selector keeps the tokens
that fit. Columns: tokens kept, error of keys and values, accuracy, perplexity.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import torch

import kvpolicy
from kvpolicy_eval.common.accuracy import TaskEvaluator, mean
from kvpolicy_eval.common.codecs import selector_for, short_windows
from kvpolicy_eval.common.heldout import FOLLOWING, PROMPT, ROWS, HeldOutText
from kvpolicy_eval.common.table import Grid, Option, Section, Table, byte_shares, collect, prompts

BYTE_SHARES = [0.2, 0.1]
CODECS = [
    "plain",
    "tokenwise",
    "tokenwise:bits=2",
    "kivi:bits=4",
    "kivi:bits=2",
    "gear",
    "kvquant:bits=3",
    "kvquant:bits=2",
    "turboquant:bits=4",
    "turboquant:bits=2",
    "csr:nnz=8",
    "csr:nnz=8:coef=fp8:index=packed",
    "csr:key_space=rotated:nnz=8",
    "csr:nnz=4",
    "mikv",
    "staircase",
]
COLUMNS = [
    "bytes",
    "codec",
    "tokens per layer",
    "coded slots",
    "error K",
    "error V",
    "recall",
    "all tasks",
    "perplexity",
]


def line(evaluator: TaskEvaluator, text: HeldOutText, codec: str, byte_share: float, selector: str) -> list[str]:
    """The row of one codec at one size.

    Args:
        evaluator: Measures accuracy.
        text: Measures errors and perplexity.
        codec: Spec of the codec.
        byte_share: Of the full cache's bytes.
        selector: Spec of the selector.

    Raises:
        ValueError: If the smallest layout of the policy exceeds the bytes.
    """
    policy = selector if codec == "plain" else f"{selector_for(codec, selector)}+{short_windows(codec)}"
    config = evaluator.model.config
    dtype = evaluator.model.dtype
    full_bytes = kvpolicy.plan(config, "full", prompt=PROMPT + FOLLOWING, dtype=dtype).full_nbytes
    plan = kvpolicy.plan(config, f"{policy}@{int(byte_share * full_bytes)}B", prompt=PROMPT, new=FOLLOWING, dtype=dtype)
    accuracy, _ = evaluator.accuracy(policy, byte_share)
    return [
        f"{byte_share:.0%}",
        f"`{codec}`",
        str(plan.layers[0].tokens),
        str(sum(plan.layers[0].layout.coded)),
        *("" if math.isnan(error) else f"{error:.3f}" for error in text.errors(policy)),
        f"{accuracy['recall']:.2f}",
        f"{mean(accuracy):.2f}",
        f"{text.perplexity(policy, byte_share):.2f}",
    ]


def lines(
    evaluator: TaskEvaluator, text: HeldOutText, codecs: list[str], shares: list[float], selector: str
) -> Iterator[list[str]]:
    """The rows; a codec has none at sizes that its smallest layout exceeds."""
    accuracy, _ = evaluator.accuracy("full")
    perplexity = text.perplexity("full")
    answers = [f"{accuracy['recall']:.2f}", f"{mean(accuracy):.2f}"]
    yield ["100%", "`full`", "all", "0", "", "", *answers, f"{perplexity:.2f}"]
    for byte_share in shares:
        for codec in codecs:
            try:
                yield line(evaluator, text, codec, byte_share, selector)
            except ValueError as error:
                print(f"{codec} at {byte_share:.0%}: {error}", file=sys.stderr)


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    evaluator = TaskEvaluator(args.n, 512, torch.bfloat16)
    held_out = HeldOutText(evaluator.model, evaluator.tokenizer)
    rows = collect(lines(evaluator, held_out, args.codecs, args.shares, args.selector))
    note = (
        f"Tokens chosen by `{args.selector}`; full-precision buffers of a few tokens, set explicitly. {args.n} prompts "
        f"of about 512 tokens a task; perplexity of {ROWS * FOLLOWING} held-out tokens; bf16."
    )
    yield Section("frontier", [Grid(COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={"frontier": ["docs/guide/codecs.md"]},
    options=[
        prompts(8),
        Option("--selector", default="snapkv", help="spec of the selector"),
        Option("--codecs", nargs="+", default=CODECS, help="specs of codecs"),
        byte_shares(BYTE_SHARES),
    ],
    needs="the embedded model",
)

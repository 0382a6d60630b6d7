"""How many drafts of a policy the full cache accepts, by budget.

The embedded model drafts with a cache under the policy, and verifies with the full cache: see `kvpolicy.speculate`. It
continues held-out text, whose continuation depends on what the policy kept. No speed is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy_eval.common.table import Grid, Option, Section, Table, only
from kvpolicy_lm_eval.data.text import held_out

POLICIES = ["window", "streaming", "h2o", "snapkv"]
"""Policies without a budget."""
BUDGETS = [0.05, 0.1, 0.2, 0.5]
PROMPT = 384
"""Tokens of a prompt."""
NEW = 32
"""Tokens that are generated behind it."""


def prompts(tokenizer: Any, count: int) -> Tensor:
    """The first pieces of held-out text, [count, P].

    Raises:
        ValueError: If there is not so much text.
    """
    ids: Tensor = tokenizer(held_out(), return_tensors="pt").input_ids[0]
    if len(ids) < count * PROMPT:
        raise ValueError(f"--n must be at most {len(ids) // PROMPT}, got {count}")
    return ids[: count * PROMPT].view(count, PROMPT)


def acceptance(model: Any, policy: str, rows: Tensor, gamma: int) -> tuple[float, float]:
    """The fraction of accepted drafts, and the mean number of new tokens for each forward of the full cache."""
    drafted = accepted = rounds = 0
    with kvpolicy.attach(model, policy):
        for row in rows:
            _, stats = kvpolicy.speculate(model, policy, row[None], max_new_tokens=NEW, gamma=gamma, return_stats=True)
            drafted += stats.drafted
            accepted += stats.accepted
            rounds += stats.rounds
    return accepted / max(drafted, 1), (accepted + rounds) / max(rounds, 1)


def line(model: Any, policy: str, rows: Tensor, budgets: Sequence[float], gamma: int) -> list[str]:
    """The row of a policy."""
    measured = [acceptance(model, f"{policy}@{budget}", rows, gamma) for budget in budgets]
    return [f"`{policy}`", *(f"{fraction:.2f} ({tokens:.1f})" for fraction, tokens in measured)]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    model, tokenizer = kvpolicy.tiny(torch.float32)
    rows = prompts(tokenizer, args.n)
    columns = ["policy", *(f"budget {budget}" for budget in args.budgets)]
    lines = [line(model, policy, rows, args.budgets, args.gamma) for policy in args.only]
    note = (
        f"Fraction of the {args.gamma} drafted tokens of a round that the full cache accepted; in parentheses, new "
        f"tokens per forward pass of the full cache. Greedy, {NEW} tokens after {PROMPT} tokens of held-out text, "
        f"{len(rows)} texts, {str(model.dtype).removeprefix('torch.')}."
    )
    yield Section("acceptance", [Grid(columns, lines)], note)


TABLE = Table(
    measure=measure,
    places={"acceptance": ["docs/guide/speculation.md"]},
    options=[
        Option("--n", type=int, default=2, help="texts"),
        Option("--gamma", type=int, default=4, help="tokens to draft before each verification"),
        only("POLICY", POLICIES),
        Option("--budgets", nargs="+", type=float, default=BUDGETS, help="fractions of the prompt"),
    ],
    needs="the embedded model",
)

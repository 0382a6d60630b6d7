"""`python -m kvpolicy_eval.tables.acceptance`: how many drafts of a policy the full cache accepts, by budget.

The embedded model drafts with a cache under the policy, and verifies with the full cache: see `kvpolicy.speculate`. It
continues held-out text, whose continuation depends on what the policy kept. No speed is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table
from kvpolicy_eval.data.text import held_out

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


def page(model: Any, rows: Tensor, policies: Sequence[str], budgets: Sequence[float], gamma: int) -> str:
    """The table, and how it was measured."""
    lines: list[list[str]] = []
    for policy in policies:
        cells: list[str] = []
        for budget in budgets:
            fraction, tokens = acceptance(model, f"{policy}@{budget}", rows, gamma)
            cells.append(f"{fraction:.2f} ({tokens:.1f})")
        lines.append([f"`{policy}`", *cells])
    note = (
        f"Fraction of {gamma} drafts a round that the full cache accepted, and in parentheses the new tokens for each "
        f"of its forwards; greedy, {NEW} tokens behind {PROMPT} tokens of held-out text, {len(rows)} texts, "
        f"{str(model.dtype).removeprefix('torch.')}."
    )
    return "\n\n".join([table(["policy", *(f"budget {budget}" for budget in budgets)], lines), note])


def main(argv: list[str] | None = None) -> None:
    """Print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.tables.acceptance", description=__doc__)
    parser.add_argument("--n", type=int, default=2, help="texts")
    parser.add_argument("--gamma", type=int, default=4, help="tokens to draft before each verification")
    parser.add_argument("--only", nargs="+", default=POLICIES, metavar="POLICY", help="specs without budgets")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="fractions of the prompt")
    add_fill_argument(parser, "acceptance")
    args = parser.parse_args(argv)
    model, tokenizer = kvpolicy.tiny(torch.float32)
    text = page(model, prompts(tokenizer, args.n), args.only, args.budgets, args.gamma)
    publish(text, "acceptance", args.fill)


if __name__ == "__main__":
    main()

"""`python -m kvpolicy_eval.frontier`: what the same bytes buy, tokens or precision.

Every codec gets the same share of the full cache's bytes on the embedded model, keeps the tokens that fit by one
selector, and answers the same questions. Printed: tokens kept, error of keys and values, right answers, perplexity.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import kvpolicy
from kvpolicy_eval.codecs import CODECS, short_windows
from kvpolicy_eval.distortion import FOLLOWING, PROMPT, ROWS, Pages
from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.table import Examiner

SHARES = [0.2, 0.1, 0.05]
HEAD = ["bytes", "policy", "tokens per layer", "coded", "error K", "error V", "recall", "all tasks", "perplexity"]


def line(examiner: Examiner, pages: Pages, policy: str, share: float) -> list[str]:
    """One codec at one size."""
    config, dtype = examiner.model.config, examiner.model.dtype
    full = kvpolicy.plan(config, "full", prompt=PROMPT + FOLLOWING, dtype=dtype).full_nbytes
    plan = kvpolicy.plan(config, f"{policy}@{int(share * full)}B", prompt=PROMPT, new=FOLLOWING, dtype=dtype)
    tokens = plan.layers[0].tokens
    marks, _ = examiner.marks(policy, share)
    keys, values = pages.errors(policy)
    right = sum(marks.values()) / len(marks)
    return [
        f"{share:.0%}", f"`{policy}`", str(tokens), f"{sum(plan.layers[0].layout.coded)}", f"{keys:.3f}",
        f"{values:.3f}", f"{marks['recall']:.2f}", f"{right:.2f}", f"{pages.perplexity(policy, share):.2f}",
    ]  # fmt: skip


def frontier(examiner: Examiner, pages: Pages, codecs: list[str], shares: list[float], selector: str) -> str:
    """The table; a codec whose smallest layout does not fit into a share is left out there."""
    whole, _ = examiner.marks("full")
    mean = sum(whole.values()) / len(whole)
    lines = [
        [
            "100%",
            "`full`",
            "all",
            "0",
            "",
            "",
            f"{whole['recall']:.2f}",
            f"{mean:.2f}",
            f"{pages.perplexity('full'):.2f}",
        ]
    ]
    for share in shares:
        for codec in map(short_windows, codecs):
            policy = f"{selector}+{codec}" if codec != "plain" else selector
            try:
                lines.append(line(examiner, pages, policy, share))
            except ValueError as error:
                print(f"{policy} at {share:.0%}: {error}", file=sys.stderr)
                continue
            print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    head = [
        "bytes",
        "policy",
        "tokens per layer",
        "coded slots",
        "error K",
        "error V",
        "recall",
        "all tasks",
        "perplexity",
    ]
    return table(head, lines)


def main() -> None:
    """Print the table, and fill a page with it where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.frontier", description=__doc__)
    parser.add_argument("--n", type=int, default=16, help="prompts per task")
    parser.add_argument("--selector", default="snapkv:kernel=7", help="who chooses the tokens")
    parser.add_argument("--codecs", nargs="*", default=CODECS, help="words of codecs")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="of the full cache's bytes")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'frontier'")
    args = parser.parse_args()
    examiner = Examiner(args.n, 512, torch.bfloat16)
    text = frontier(examiner, Pages(examiner.model, examiner.tokenizer), args.codecs, args.shares, args.selector)
    text += (
        f"\n\n{args.n} prompts of about 512 tokens per task; perplexity of {ROWS * FOLLOWING} held-out tokens; bf16."
    )
    print(text)
    if args.fill:
        fill(args.fill, "frontier", text)


if __name__ == "__main__":
    main()

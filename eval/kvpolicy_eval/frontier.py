"""`python -m kvpolicy_eval.frontier`: what the same bytes buy, tokens or precision.

Every codec gets the same share of the full cache's bytes on the embedded model, keeps the tokens that fit by one
selector, and answers the same questions. Printed: tokens kept, error of keys and values, right answers, perplexity.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

import kvpolicy
from kvpolicy_eval.codecs import short_windows
from kvpolicy_eval.distortion import FOLLOWING, PROMPT, ROWS, Pages
from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.table import Examiner

SHARES = [0.2, 0.1]
CODECS = [
    "plain", "tokenwise", "tokenwise:bits=2", "kivi:bits=4", "kivi:bits=2", "gear", "kvquant:bits=3", "kvquant:bits=2",
    "turboquant:bits=4", "turboquant:bits=2", "csr:nnz=8", "csr:nnz=8:coef=fp8:index=packed",
    "csr:key_space=rotated:nnz=8", "csr:nnz=4", "mikv", "staircase",
]  # fmt: skip
HEAD = ["bytes", "codec", "tokens per layer", "coded slots", "error K", "error V", "recall", "all tasks", "perplexity"]


def line(examiner: Examiner, pages: Pages, codec: str, share: float, selector: str) -> list[str]:
    """One codec at one size."""
    policy = selector if codec == "plain" else f"{selector}+{short_windows(codec)}"
    config, dtype = examiner.model.config, examiner.model.dtype
    full = kvpolicy.plan(config, "full", prompt=PROMPT + FOLLOWING, dtype=dtype).full_nbytes
    plan = kvpolicy.plan(config, f"{policy}@{int(share * full)}B", prompt=PROMPT, new=FOLLOWING, dtype=dtype)
    marks, _ = examiner.marks(policy, share)
    errors = ["" if math.isnan(error) else f"{error:.3f}" for error in pages.errors(policy)]
    right = sum(marks.values()) / len(marks)
    return [
        f"{share:.0%}", f"`{codec}`", str(plan.layers[0].tokens), str(sum(plan.layers[0].layout.coded)), *errors,
        f"{marks['recall']:.2f}", f"{right:.2f}", f"{pages.perplexity(policy, share):.2f}",
    ]  # fmt: skip


def frontier(examiner: Examiner, pages: Pages, codecs: list[str], shares: list[float], selector: str) -> str:
    """The table; a codec whose smallest layout does not fit into a share is left out there."""
    whole, _ = examiner.marks("full")
    mean, surprise = sum(whole.values()) / len(whole), pages.perplexity("full")
    lines = [["100%", "`full`", "all", "0", "", "", f"{whole['recall']:.2f}", f"{mean:.2f}", f"{surprise:.2f}"]]
    for share in shares:
        for codec in codecs:
            try:
                lines.append(line(examiner, pages, codec, share, selector))
            except ValueError as error:
                print(f"{codec} at {share:.0%}: {error}", file=sys.stderr)
                continue
            print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    return table(HEAD, lines)


def main() -> None:
    """Print the table, and fill a page with it where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.frontier", description=__doc__)
    parser.add_argument("--n", type=int, default=8, help="prompts per task")
    parser.add_argument("--selector", default="snapkv:kernel=7", help="who chooses the tokens")
    parser.add_argument("--codecs", nargs="*", default=CODECS, help="words of codecs")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="of the full cache's bytes")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'frontier'")
    args = parser.parse_args()
    examiner = Examiner(args.n, 512, torch.bfloat16)
    text = frontier(examiner, Pages(examiner.model, examiner.tokenizer), args.codecs, args.shares, args.selector)
    text += f"\n\nTokens chosen by `{args.selector}`; windows of codecs shortened. {args.n} prompts of about 512 tokens"
    text += f" a task; perplexity of {ROWS * FOLLOWING} held-out tokens; bf16."
    print(text)
    if args.fill:
        fill(args.fill, "frontier", text)


if __name__ == "__main__":
    main()

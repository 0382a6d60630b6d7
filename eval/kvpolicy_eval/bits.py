"""`python -m kvpolicy_eval.bits`: honest bits per number of every codec, at three lengths.

Everything is counted: codes, scales, zeros, positions, statistics, exact windows, atoms, padding of packed words. The
model's own calibrated tensors are not, and have a column of their own. The sizes are those of a plan, which a cache
then holds to the byte.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig

import kvpolicy
from kvpolicy import Policy
from kvpolicy_eval.codecs import CODECS, with_ranking
from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.standins import stand_in

LENGTHS = [1024, 4096, 32768]


def bits(config: Any, policy: Policy, tokens: int) -> tuple[float, float]:
    """Bits per number of the whole cache, and of coded tokens alone (codes and scales); 0 where none is coded."""
    plan = kvpolicy.plan(config, policy, prompt=tokens, dtype=torch.bfloat16)
    numbers = 2 * config.num_key_value_heads * config.head_dim
    kinds, layer = plan.by_kind(), plan.layers[0]
    coded = sum(layer.layout.coded) * numbers * len(plan.layers)
    whole = 8 * plan.nbytes / (tokens * numbers * len(plan.layers))
    return whole, 8 * (kinds["codes"] + kinds["scales"]) / coded if coded else 0.0


def rows(config: Any, codecs: list[str]) -> list[list[str]]:
    """A line of each codec; calibrated ones with tensors of random numbers, since only sizes count."""
    lines: list[list[str]] = []
    with TemporaryDirectory() as folder:
        for codec in codecs:
            policy = Policy.parse(with_ranking(codec))
            part = stand_in(policy.codec, Path(folder), config.num_key_value_heads, config.head_dim)
            policy = dataclasses.replace(policy, codec=part)
            each = [bits(config, policy, tokens) for tokens in LENGTHS]
            own = kvpolicy.plan(config, policy, prompt=LENGTHS[-1], dtype=torch.bfloat16).resident_nbytes
            alone = f"{each[-1][1]:.3f}" if each[-1][1] else ""
            lines.append([f"`{codec}`", *(f"{whole:.2f}" for whole, _ in each), alone, f"{own:,}" if own else ""])
    return lines


def shape(heads: int, head_dim: int) -> Any:
    """A config of one layer of a given shape."""
    return LlamaConfig(
        num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads * head_dim,
        head_dim=head_dim,
    )  # fmt: skip


def main() -> None:
    """Print the table, and fill a page with it where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bits", description=__doc__)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128, help="numbers of a key")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'bits'")
    args = parser.parse_args()
    head = ["codec", *(f"{tokens:,} tokens" for tokens in LENGTHS), "coded tokens alone", "the model's own bytes"]
    text = table(head, rows(shape(args.heads, args.head_dim), CODECS))
    text += f"\n\nBits per number of one layer with {args.heads} KV heads of {args.head_dim}, one row, bf16."
    print(text)
    if args.fill:
        fill(args.fill, "bits", text)


if __name__ == "__main__":
    main()

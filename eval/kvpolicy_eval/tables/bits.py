"""Bits per element of every codec, at three prompt lengths.

Everything in the cache counts: codes, scales, zero points, positions, statistics, full-precision buffers, atoms and
the padding of packed integers. Calibrated tensors belong to the model and have a separate column. Sizes are those
of a plan, which the cache matches to the byte.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy_eval.common.codecs import CODECS, groups_layers, with_ranking
from kvpolicy_eval.common.synthetic import one_layer_config, with_random_calibration
from kvpolicy_eval.common.table import Grid, Option, Section, Table

LENGTHS = [1024, 4096, 32768]


def bits_per_element(config: Any, policy: Policy, tokens: int) -> tuple[float, float]:
    """Size of a cache in bits per key and value element.

    Args:
        config: Of a model.
        policy: A policy that keeps every token.
        tokens: Length of the prompt.

    Returns:
        Bits of everything in the cache, and bits of encoded tokens alone (codes and scales; 0 if none is encoded).
    """
    plan = kvpolicy.plan(config, policy, prompt=tokens, dtype=torch.bfloat16)
    elements = 2 * config.num_key_value_heads * config.head_dim * len(plan.layers)  # of one token
    by_kind = plan.by_kind()
    encoded = sum(plan.layers[0].layout.coded) * elements
    total = 8 * plan.nbytes / (tokens * elements)
    return total, 8 * (by_kind["codes"] + by_kind["scales"]) / encoded if encoded else 0.0


def rows(config: Any, codecs: list[str]) -> list[list[str]]:
    """One row per codec; calibrated codecs get random tensors, because only sizes count.

    Args:
        config: Of a model.
        codecs: Specs of codecs.
    """
    lines: list[list[str]] = []
    with TemporaryDirectory() as folder:
        for codec in codecs:
            policy = Policy.parse(with_ranking(codec))
            part = with_random_calibration(policy.codec, Path(folder), config.num_key_value_heads, config.head_dim)
            policy = dataclasses.replace(policy, codec=part)
            own = copy.copy(config)
            own.num_hidden_layers = 2 if groups_layers(codec) else config.num_hidden_layers
            sizes = [bits_per_element(own, policy, tokens) for tokens in LENGTHS]
            resident = kvpolicy.plan(own, policy, prompt=LENGTHS[-1], dtype=torch.bfloat16).resident_nbytes
            encoded = sizes[-1][1]
            lines.append(
                [
                    f"`{codec}`",
                    *(f"{total:.2f}" for total, _ in sizes),
                    f"{encoded:.3f}" if encoded else "",
                    f"{resident:,}" if resident else "",
                ]
            )
    return lines


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    columns = ["codec", *(f"{tokens:,} tokens" for tokens in LENGTHS), "coded tokens alone", "the model's own bytes"]
    note = f"Bits per number of one layer with {args.heads} KV heads of {args.head_dim}, one row, bf16."
    yield Section("bits", [Grid(columns, rows(one_layer_config(args.heads, args.head_dim), CODECS))], note)


TABLE = Table(
    measure=measure,
    places={"bits": ["docs/guide/codecs.md"]},
    options=[
        Option("--heads", type=int, default=8, help="KV heads"),
        Option("--head-dim", type=int, default=128, help="size of a head"),
    ],
)

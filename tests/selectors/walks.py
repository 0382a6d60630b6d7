"""Random prompts and steps of a selector, held against its slow version."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.conformance.bench import Bench, draw, padding
from tests.conformance.replay import Verdict

SHARPNESS = (2.0, 0.0, 12.0)
"""Factors of the queries: weights as usual, all equal, and nearly all of them in one token."""


def walk(spec: str, seed: int, budgets: tuple[int, int], equal: str = "") -> Verdict:
    """Two padded rows that get a prompt, steps, a second prompt and steps again.

    Args:
        spec: The selector.
        seed: Of everything random.
        budgets: Tokens of each row.
        equal: Whether all `keys`, or all `values`, are equal.
    """
    bench = Bench(spec, [*budgets], new=40)
    sizes = [20 + seed, *[1] * 11, 7, *[1] * 9]
    masks = {0: padding(sizes[0], sizes[0], 13), 12: padding(7, 4, 7, right=True)}
    for number, size in enumerate(sizes):
        q, k, v = draw(size, 100 * seed + number, batch=2, sharp=SHARPNESS[seed % 3])
        k = torch.ones_like(k) if equal == "keys" else k
        v = torch.ones_like(v) if equal == "values" else v
        bench.forward(q, k, v, masks.get(number))
    return bench.check()


def walks(spec: str) -> float:
    """Walks of all kinds of a selector; the fraction of turns that the slow version was compared in."""
    verdicts = [walk(spec, seed, budgets) for seed, budgets in enumerate([(14, 9), (5, 22), (2, 3)])]
    verdicts += [walk(spec, 3, (10, 9), "keys"), walk(spec, 4, (10, 9), "values")]
    return sum(verdict.turns for verdict in verdicts) / (44 * len(verdicts))


def scores(spec: str, *sizes: int, whole: int = 0) -> Tensor:
    """The scores of two padded rows in the order of positions, after forwards of these sizes, or pieces of a whole."""
    bench = Bench(spec, [60, 60])
    q, k, v = draw(whole, 0, batch=2)
    mask = padding(whole, whole, 22)
    start = 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        start += size
        if whole:
            bench.forward(q[:, :, part], k[:, :, part], v[:, :, part], mask[:, part])
        else:
            bench.forward(*draw(size, number, batch=2), padding(size, size, 9) if number == 0 else None)
    state: Any = bench.layer.tensors.state
    return state.score.gather(-1, bench.layer.tensors.positions.argsort(-1))

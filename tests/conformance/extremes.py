"""Queries and keys that no trained model gives: all attention in one head, on one token, or equal everywhere."""

from __future__ import annotations

from torch import Tensor

EXTREMES = ["random", "one head", "flat head", "one token", "equal"]
SHARP = 8.0
"""A factor after which a head attends to few tokens."""


def concentrate(q: Tensor, k: Tensor, extreme: str, place: int) -> tuple[Tensor, Tensor]:
    """Queries and keys that put attention where `extreme` says.

    Args:
        q: [B, Hq, n, D].
        k: [B, H, n, D].
        extreme: One of `EXTREMES`: as they are; attention to few tokens in one head and to all alike in the others, or
            the other way round; all of it on one token, in every head; or on all tokens alike.
        place: Which head or token, modulo how many there are.
    """
    heads = k.shape[1]
    members = slice(place % heads * (q.shape[1] // heads), (place % heads + 1) * (q.shape[1] // heads))
    if extreme == "random":
        return q, k
    if extreme == "equal":
        return q * 0, k
    if extreme == "one token":
        largest = k.clone()
        largest[:, :, place % k.shape[2]] = SHARP
        return q.abs() + 1, largest
    focused = q * 0 if extreme == "one head" else q * SHARP
    focused[:, members] = q[:, members] * (SHARP if extreme == "one head" else 0)
    return focused, k

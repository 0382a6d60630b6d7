"""The newest queries of each head, which a selector holds to ask them again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import HeadShape, View, scoped


@scoped(queries="head", ranked="row")
class Asked(NamedTuple):
    """How much each slot is worth, and the newest queries.

    Attributes:
        score: What the last ranking says of each slot, [B, H, S] fp32.
        queries: The newest queries as attention takes them, that of position p at p modulo their number, [B, H, W, G,
            D] fp32.
        ranked: Tokens that the row had seen when its slots were ranked, [B] int64.
    """

    score: Tensor
    queries: Tensor
    ranked: Tensor


def none_ranked(batch: int, heads: int, slots: int, window: int, head: HeadShape, device: torch.device | str) -> Asked:
    """Scores of zero, and no queries, of which `window` of each query head are held."""
    shape = (batch, heads, window, head.group, head.head_dim)
    return Asked(
        score=torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
        queries=torch.zeros(shape, dtype=torch.float32, device=device),
        ranked=torch.zeros(batch, dtype=torch.int64, device=device),
    )


def with_prompt(queries: Tensor, newest: Tensor, view: View) -> Tensor:
    """The held queries after a prompt or chunk.

    Args:
        queries: Those that were held, that of position p at p modulo W, [B, H, W, G, D].
        newest: The newest queries of the prompt, the newest last, [B, Hq, n, D].
        view: The tokens.

    Returns:
        [B, H, W, G, D] fp32.
    """
    assert view.added is not None
    heads = queries.shape[1]
    window = queries.shape[2]
    width = newest.shape[2]
    for number in range(width):
        behind = width - 1 - number
        place = (view.length - 1 - behind) % window
        at = torch.arange(window, device=place.device) == place[:, None]
        at &= (behind < view.added)[:, None]
        new = newest[:, :, number].float().unflatten(1, (heads, 1, -1))
        queries = torch.where(at[:, None, :, None, None], new, queries)
    return queries


def add_generated(queries: Tensor, view: View) -> None:
    """Put the query of a generated token in the place of the oldest one, in place."""
    assert view.token is not None and view.token.query is not None
    window = queries.shape[2]
    at = torch.arange(window, device=view.length.device) == ((view.length - 1) % window)[:, None]
    new = view.token.query[:, :, None].float()
    queries.copy_(torch.where(at[:, None, :, None, None], new, queries))


def among_newest(window: int, width: Tensor, view: View) -> Tensor:
    """Which of the `window` held queries are among the newest `width` [B] of their row, [B, W] bool."""
    age = (view.length[:, None] - 1 - torch.arange(window, device=width.device)) % window
    return (age < width[:, None]) & (age < view.length[:, None])

"""Memory of a long prompt on a large model, planned from its config: with the stock cache, and under policies."""

from __future__ import annotations

from typing import NamedTuple

import torch

import kvpolicy

MODEL = "llama-3.1-8b"
PROMPT = 127_000
NEW = 1024
PART = 4096
"""Tokens of a tile, and of a chunk."""
CARD = 24
"""Memory of a card, in GiB."""


class Peak(NamedTuple):
    """Bytes in use at most while a prompt is read.

    Attributes:
        name: How the prompt is read.
        weights: Bytes of the weights.
        cache: Bytes of the cache when the prompt has been read.
        nbytes: All bytes at the peak; the rest are activations and what waits.
    """

    name: str
    weights: int
    cache: int
    nbytes: int


def peaks() -> list[Peak]:
    """The stock cache in one piece and in chunks, codes of every token in chunks, and few tokens in codes in tiles."""
    return [
        _stock("stock cache, in one piece", None),
        _stock(f"stock cache, in chunks of {PART:,}", PART),
        _under("tokenwise", chunk=PART, tile=None),
        _under("snapkv+tokenwise@0.2", chunk=None, tile=PART),
    ]


def _stock(name: str, chunk: int | None) -> Peak:
    plan = _plan("full", chunk, None)
    return Peak(name, _weights(plan), plan.full_nbytes, plan.full_prefill_nbytes)


def _under(policy: str, chunk: int | None, tile: int | None) -> Peak:
    plan = _plan(policy, chunk, tile)
    pieces = f"chunks of {chunk:,}" if chunk else f"tiles of {tile:,}"
    return Peak(f"`{policy}`, in {pieces}", _weights(plan), plan.nbytes, plan.prefill_nbytes)


def _plan(policy: str, chunk: int | None, tile: int | None) -> kvpolicy.CachePlan:
    how = {"prompt": PROMPT, "new": NEW, "dtype": torch.bfloat16, "backend": "hf"}
    return kvpolicy.plan(MODEL, policy, chunk=chunk, tile=tile, **how)  # pyright: ignore[reportArgumentType]


def _weights(plan: kvpolicy.CachePlan) -> int:
    return plan.weights.nbytes if plan.weights else 0

"""The module of a model that keeps the offsets of positions behind pictures (M-RoPE)."""

from __future__ import annotations

from torch import nn

from kvpolicy.hf.tiles import around

ATTRIBUTE = "rope_deltas"
"""Where transformers keeps the offset of each row, [B, 1] int64; None before the first prompt."""


def owner_of(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The innermost module around a decoder that keeps offsets of its positions; None if none does."""
    return next((module for module in reversed(around(model, decoder)) if ATTRIBUTE in vars(module)), None)

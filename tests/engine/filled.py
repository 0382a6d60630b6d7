"""Texts of small models, caches that hold one, and steps behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvpolicy
from tests.conformance.models import VOCABULARY


def text(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))


def prefilled(model: Any, rows: int = 2, columns: int = 20, new: int = 8) -> kvpolicy.PolicyCache:
    """A cache of a model under a policy, behind a prompt."""
    cache = kvpolicy.PolicyCache(model, prompt=columns, new=new)
    model(text(rows, columns), cache=cache)
    return cache


def step(model: Any, cache: Any, token: int = 7) -> Tensor:
    """Logits behind one more token in each row."""
    return model(torch.full((cache.batch_size, 1), token), cache=cache).logits[:, -1]

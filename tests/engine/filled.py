"""Texts of small models, caches that hold one, and steps behind it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy
from tests.conformance.models import VOCABULARY, build
from tests.conformance.play import TURNS, forward, make_batch


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


@contextmanager
def attached(
    policy: Policy | str,
    lengths: list[int],
    turns: list[int] = TURNS,
    seed: int = 0,
    *,
    family: str = "llama",
    layers: int | None = None,
    **how: Any,
) -> Generator[tuple[Any, Tensor, Tensor]]:
    """A small model under a policy, and the ids and the mask of a batch."""
    model = build(family, layers=layers)
    with kvpolicy.attach(model, policy, **how):
        yield model, *make_batch(lengths, turns, seed)


def prompted(model: Any, ids: Tensor, mask: Tensor, stop: int, policy: Policy | str | None = None, **told: Any) -> Any:
    """A cache that was told something, behind the columns before `stop` of a batch."""
    cache = kvpolicy.PolicyCache(model, policy, **told)
    forward(model, ids, mask, 0, stop, cache)
    return cache


def steps(model: Any, ids: Tensor, mask: Tensor, start: int, stop: int, cache: Any) -> Tensor:
    """Logits of some columns of a batch, which are fed one by one."""
    return torch.cat([forward(model, ids, mask, column, column + 1, cache) for column in range(start, stop)], 1)


def row_of(ids: Tensor, mask: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """One row of a batch, without the padding before it."""
    own = slice(int(mask[row].argmax()), None)
    return ids[row : row + 1, own], mask[row : row + 1, own]

"""Prompts whose candidates take several tiles are merged as in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import D2O, Blend, CountedMerge, Elastic, KeepKV, KVMerger, ZSMerge
from kvpolicy.mergers import common
from kvpolicy.protocols import Candidates, Merged

COUNT = 57
"""Seven targets; the evicted tokens are three tiles of the fewest tokens, 16, and two tokens more."""


def prompt(counted: bool) -> Candidates:
    """A padded row and a full one, of two heads that keep different tokens; numbers of padding may be anything."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, COUNT, 4, generator=generator) for _ in range(2))
    positions = torch.arange(COUNT, dtype=torch.int32).expand(2, 2, -1).clone()
    positions[1] -= 9
    invalid = positions < 0
    keys[invalid] = torch.nan
    values[invalid] = torch.inf
    positions[invalid] = -1
    targets = torch.stack([torch.randperm(COUNT - 9, generator=generator)[:7].sort().values + 9 for _ in range(4)])
    targets = targets.reshape(2, 2, 7)
    kept = torch.zeros(2, 2, COUNT, dtype=torch.bool).scatter(-1, targets, True)
    there = torch.ones_like(targets, dtype=torch.bool)
    counts = torch.randint(1, 9, (2, 2, COUNT), generator=generator).float().log() if counted else None
    rows = torch.rand(2, 2, 4, COUNT, generator=generator).masked_fill(invalid[:, :, None], 0)
    length = torch.tensor([COUNT, COUNT - 9])
    worth = torch.rand(2, 2, COUNT, generator=generator)
    return Candidates(keys, values, positions, kept, targets, there, counts, rows, length, worth)


def merged(merger: Any, given: Candidates) -> tuple[Merged, list[Tensor]]:
    state = merger.alloc(2, 2, "cpu")
    return merger.merge_prompt(state, given), [*state]


MERGERS = [
    CountedMerge(least=-1),
    CountedMerge(by="position", least=0.2),
    D2O(),
    Blend(),
    Elastic(),
    ZSMerge(slots=3),
    KVMerger(least=-0.2),
    KeepKV(window=4, least=-1),
]


@pytest.mark.parametrize("merger", MERGERS)
def test_small_tiles_give_what_one_gives(merger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt(counted=merger.traits.counted)
    want, state = merged(merger, given)
    monkeypatch.setattr(common, "TILE_ELEMENTS", 1)
    assert len([*common.tiles(given, "keys")]) == 4
    got, state_of_tiles = merged(merger, given)
    for one, other in zip([*got, *state_of_tiles], [*want, *state], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert bool(got.values.isfinite().all())
    if got.counts is not None:
        assert given.counts is not None
        total = given.counts.exp().masked_fill(given.positions < 0, 0).sum(-1)
        if getattr(merger, "least", -1) == -1:
            torch.testing.assert_close(got.counts.exp().sum(-1), total)


@pytest.mark.parametrize("merger", MERGERS)
def test_columns_in_any_order(merger: Any) -> None:
    """As slots are, which stand before the tokens of a later prompt; targets are in order of position all the same."""
    given = prompt(counted=merger.traits.counted)
    want, _ = merged(merger, given)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))

    def moved(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        return t[..., order] if t.shape[-1] == COUNT else t[:, :, order]

    names = ("keys", "values", "positions", "kept", "counts", "attention", "priority")
    other = given._replace(**{name: moved(getattr(given, name)) for name in names})
    got, _ = merged(merger, other._replace(targets=order.argsort()[given.targets]))
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)

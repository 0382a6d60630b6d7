"""Summaries of values are those of the tokens that are held, whatever was overwritten or emptied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.engine import layer_slots
from kvpolicy.engine.reading import ReadShape, by_entry, log_tokens
from tests.engine.parts import index_of
from tests.readers.bench import Layer, draw

STEPS = 12


@pytest.mark.parametrize("base", ["h2o", "h2o+tokenwise:block_size=3:residual_length=2"])
def test_the_mean_value_is_that_of_the_tokens_that_are_left(base: str) -> None:
    layer = Layer(f"{base}+sparq:read=4:channels=3@0.5", [40], new=STEPS)
    layer.prompt(*draw(80, 31))
    for step in range(STEPS):
        layer.step(*draw(1, 200 + step))
        layer.between()
    reads: Any = layer.store.tensors.reads
    past = layer.store.past()
    assert past is not None
    start = layer.store.layout.exact if sum(layer.store.layout.coded) else 0
    wanted = past.values.masked_fill(~past.occupied[..., None], 0)[:, :, start:].sum(2)
    assert reads.index.sums.shape[2] == 2
    assert torch.allclose(reads.index.sums.sum(2), wanted, atol=1e-4)


@pytest.mark.parametrize("most", [1, 40, 1000])
def test_summaries_are_the_same_in_tiles(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last tile has a single block, which is shorter than the others."""
    layer = Layer("full+sparq:read=4", [70])
    layer.prompt(*draw(70, 3))
    reads: Any = layer.store.tensors.reads
    before = reads.index.sums.clone()
    reads.index.sums.zero_()
    shape = index_of(layer.store).shape
    assert shape is not None and before.shape[2] == 3
    monkeypatch.setattr(layer_slots, "REBUILD_SLOTS", most)
    index_of(layer.store).fill()
    assert torch.equal(reads.index.sums, before)


def test_an_entry_holds_the_tokens_that_its_slots_stand_for() -> None:
    positions = torch.tensor([[[4, -1, 2, 3, -1]]], dtype=torch.int32)
    counts = torch.tensor([[[3.0, 9.0, 1.0, 1.0, 9.0]]]).log()
    shape = ReadShape(2, 1, ((0, 3), (3, 2)))
    assert by_entry(shape, positions).tolist() == [[[[4, -1], [2, -1], [3, -1]]]]
    assert torch.allclose(log_tokens(shape, counts, positions).exp(), torch.tensor([[[3.0, 1.0, 1.0]]]))
    assert log_tokens(ReadShape(1, 1, ((0, 2),)), None, positions).tolist() == [[[0.0, -torch.inf]]]

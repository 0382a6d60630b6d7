"""ZipCache: channels and tokens, and the layout of two precisions."""

from __future__ import annotations

import pytest
import torch

from kvpolicy.codecs.zipcache import ZipCache, ZipCacheStage
from tests.codecs import stages
from tests.codecs.stages import at, draw, empty, fill, flags

C = 12
D = 16
STAGE = ZipCacheStage(bits=4)


@pytest.mark.parametrize("high", [0.0, 0.07, 0.5, 1.0])
def test_every_token_has_a_slot(high: float) -> None:
    for tokens in range(100, 400):
        assert sum(ZipCache(high=high).layout(tokens).coded) == tokens
    assert ZipCache(high=0.07).layout(100).coded == (7, 93)  # 0.07 * 100 is a little more than 7


def test_a_channel_of_zeros_is_divided_by_one() -> None:
    keys, values = draw(C, D)
    keys[..., 3] = 0
    store = empty(STAGE, C, D)
    STAGE.write(store, keys, torch.zeros_like(values), at(range(C)), flags([True] * C), flags([False] * C))
    assert (store.codes.key_channel_scale[..., 3] == 1).all() and (store.codes.value_channel_scale == 1).all()
    assert not STAGE.values(store, slice(0, C)).any()


def test_a_token_is_coded_by_the_channels_that_are_there() -> None:
    store, _, _ = fill(STAGE, C, D)
    before = stages.copy(store)
    keys, values = draw(1, D, seed=2)
    STAGE.write(store, keys, values, at([3]), flags([True]), flags([slot != 3 for slot in range(C)]))
    others = [slot for slot in range(C) if slot != 3]
    for now, then in zip(store.codes, before.codes, strict=True):
        every = others if now.shape[2] == C else slice(None)
        assert torch.equal(now[:, :, every], then[:, :, every])
    assert not torch.equal(store.codes.key_zero, before.codes.key_zero)

"""MiKV: the balancer, and the layout of two precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvpolicy.codecs.mikv import MiKV, MiKVStage
from tests.codecs.stages import at, draw, empty, flags

C = 12
D = 16
STAGE = MiKVStage(bits=4, group_size=128)


@pytest.mark.parametrize("high", [0.0, 0.07, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("high_bits", [8, 16])
def test_every_token_has_a_slot(high: float, high_bits: Any) -> None:
    codec = MiKV(high=high, high_bits=high_bits, residual_length=32, block_size=32)
    for tokens in range(0, 400):
        layout = codec.layout(tokens)
        if not layout.coded:
            assert layout.exact == tokens
            continue
        precise = math.ceil(round(high * tokens, 6)) if high_bits == 16 else 0
        assert layout.exact == 64 + precise <= tokens and len(layout.coded) == len(codec.stages)
        assert sum(layout.coded) == tokens - 32 - precise and min(layout.coded) >= 0 and layout.coded[0] >= 32
        assert layout.slots == tokens + 32


def test_a_share_is_not_one_token_more() -> None:
    """0.07 * 100 is a little more than 7."""
    assert MiKV(high=0.07, residual_length=32, block_size=32).layout(100).exact == 32 + 32 + 7


def test_without_a_key_or_a_query_a_channel_is_as_it_is() -> None:
    keys, values = draw(C, D)
    keys[..., 3] = 0
    store = empty(STAGE, C, D)  # the first channel was never asked for
    STAGE.write(store, keys, values, at(range(C)), flags([True] * C), flags([False] * C))
    assert (store.codes.channel_scale[..., [0, 3]] == 1).all()
    assert (store.codes.channel_scale[..., [1, 2, 4]] != 1).all()

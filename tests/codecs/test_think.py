"""ThinK: which channels are kept, what is read of them, and its bases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import BFP, CSR, KIVI, Plain, Policy, RotateKV, ThinK, TokenWise, TurboQuant
from kvpolicy.protocols import ModelInfo, StageStore
from kvpolicy.statistics.channel_sums import QuerySquares
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from tests.reference.codecs.think import channels

D = 16
BASES = [TokenWise(bits=4), KIVI(bits=4, group_size=4), TurboQuant(), BFP()]


def squares(codec: ThinK, keys: Tensor, query_square: Tensor, mask: Tensor | None = None) -> StageStore:
    """A store after the keys of every slot were written."""
    rows, heads, count, dim = keys.shape
    store = StageStore(codec.alloc(rows, heads, count, dim, "cpu"), statistics={QuerySquares: query_square})
    slots = torch.arange(count).expand(rows, heads, count)
    mask = torch.ones(rows, heads, count, dtype=torch.bool) if mask is None else mask
    codec.write(store, keys, keys, slots, mask, torch.zeros(rows, heads, count, dtype=torch.bool))
    return store


@pytest.mark.parametrize("base", BASES, ids=str)
def test_the_buffer_and_the_groups_are_those_of_the_base(base: Any) -> None:
    codec = ThinK(base=base)
    for tokens in (1, 40, 63, 64, 500, 5000):
        assert codec.layout(tokens) == base.layout(tokens)
        assert codec.traits_for(tokens) == base.traits_for(tokens)._replace(per_head=None)
    assert codec.statistics == (QuerySquares(32),)


def test_the_channels_of_the_largest_products_are_kept() -> None:
    """By hand: the products are 4, 9, 0.5 and 8; queries and keys alone would choose others."""
    query_square = torch.tensor([4.0, 1.0, 0.5, 0.5])[None, None]
    keys = torch.tensor([[1.0, 3.0, 1.0, 4.0], [-1.0, -3.0, 1.0, -4.0]])[None, None]
    store = squares(ThinK(ratio=0.5), keys, query_square)
    assert store.codes.channels.tolist() == [[[[1, 3]]]]
    assert ThinK(ratio=0.5).keys(store, slice(0, 2)).tolist() == [[[[0, 3, 0, 4], [0, -3, 0, -4]]]]


@pytest.mark.parametrize("count", [1, 2, 30])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.4, 0.95])
def test_channels_are_those_of_the_slow_version(count: int, ratio: float) -> None:
    generator = torch.Generator().manual_seed(count)
    for kind in range(5):
        keys = torch.randn(2, 3, count, D, generator=generator).bfloat16().float()
        query_square = torch.rand(2, 3, D, generator=generator)
        if kind == 1:
            keys = keys.sign()  # all scores are those of the queries
        if kind in (1, 2):
            query_square = (query_square * 3).round()  # ties, and channels that no query looks at
        if kind == 3:
            query_square = torch.zeros_like(query_square)
        if kind == 4:
            keys = torch.ones_like(keys)
            query_square = torch.ones_like(query_square)
        mask = torch.rand(2, 3, count, generator=generator) < 0.7
        mask[..., 0] = True
        junk = keys.masked_fill(~mask[..., None], torch.nan)
        codec = ThinK(ratio=ratio)
        found = squares(codec, junk, query_square, mask).codes.channels
        for row in range(2):
            for head in range(3):
                own = [*keys[row, head][mask[row, head]]]
                want, _ = channels(query_square[row, head].tolist(), own, codec.kept(D))
                assert found[row, head, 0].tolist() == want


def test_how_many_channels_are_kept() -> None:
    assert [ThinK().kept(dim) for dim in (1, 2, 7, 64, 128)] == [1, 2, 5, 39, 77]
    assert [ThinK(base=TokenWise()).kept(dim) for dim in (1, 2, 7, 12, 64, 128)] == [1, 2, 7, 8, 40, 80]
    assert ThinK(ratio=1 - 2**-53).kept(256) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ratio": 1.0}, r"ThinK\.ratio must be less than 1, got 1\.0; try 0\.4"),
        ({"ratio": -0.1}, r"ThinK\.ratio must be between 0 and 1, got -0\.1"),
        ({"ratio": float("nan")}, r"ThinK\.ratio must be between 0 and 1, got nan"),
        ({"window": 0}, r"ThinK\.window must be at least 1, got 0"),
        ({"base": CSR()}, r"ThinK\.base must encode keys and values separately, got csr"),
        ({"base": RotateKV()}, r"ThinK\.base must encode keys and values separately"),
        ({"base": ThinK()}, r"ThinK\.base must encode keys and values separately"),
        ({"base": KIVI(), "block_size": 4}, r"ThinK\.block_size must be auto with a base, which has its own, got 4"),
        ({"base": KIVI(), "residual_length": 4}, r"ThinK\.residual_length must be auto with a base"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        ThinK(**given)


def test_what_no_model_can_have() -> None:
    with pytest.raises(KVPolicyTypeError, match=r"ThinK\.base must be a codec, got 4"):
        ThinK(base=4)  # pyright: ignore[reportArgumentType]
    for base in (Plain(), *BASES):
        ThinK(base=base).check(ModelInfo(1, 1, 128))
    with pytest.raises(KVPolicyError, match=r"The codec must encode every token by itself to be combined with adakv"):
        Policy.parse("uniform/adakv+snapkv+think@0.2")

"""What a codec that wraps another one uses of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import BFP, CSR, KIVI, Plain, TokenWise, TurboQuant
from kvpolicy.codecs.base import Half, check_base, inner_of, keys_only, values_only
from kvpolicy.engine.state import fields, tensors
from kvpolicy.protocols import StageStore
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError

B = 2
H = 2
N = 64
KEY = 24
VALUE = 40
BASES = [
    *(Half(), KIVI(bits=4), KIVI(bits=2), TokenWise(bits=3), TokenWise(bits="fp8"), TokenWise(normalize=False)),
    *(TurboQuant(), BFP(), BFP(exact_values=True)),
]


def vectors(dim: int, seed: int) -> Tensor:
    return torch.randn(B, H, N, dim, generator=torch.Generator().manual_seed(seed))


def written(stage: Any, dim: int, keys: Tensor | None, values: Tensor | None) -> StageStore:
    """A store of vectors of `dim` channels, of which a side that is None has no slots."""
    codes = stage.alloc(B, H, N, dim, "cpu")
    codes = codes if values is not None else keys_only(codes)
    store = StageStore(codes if keys is not None else values_only(codes))
    slots = torch.arange(N).expand(B, H, N)
    masks = torch.ones(B, H, N, dtype=torch.bool), torch.zeros(B, H, N, dtype=torch.bool)
    if keys is not None:
        stage.write_keys(store, keys, slots, *masks)
    if values is not None:
        stage.write_values(store, values, slots, *masks)
    return store


@pytest.mark.parametrize("stage", BASES, ids=lambda stage: type(stage).__name__)
def test_each_side_is_stored_and_read_without_the_other(stage: Any) -> None:
    """A side alone has the codes, the scores and the sums of both together, whatever the width of the other side."""
    generator = torch.Generator().manual_seed(9)
    at = slice(0, N)
    keys = vectors(KEY, 1)
    values = vectors(VALUE, 2)
    both = written(stage, KEY, keys, vectors(KEY, 3)), written(stage, VALUE, vectors(VALUE, 4), values)
    alone = written(stage, KEY, keys, None), written(stage, VALUE, None, values)
    queries = torch.randn(B, H, 2, KEY, generator=generator)
    weights = torch.rand(B, H, 2, N, generator=generator)
    assert torch.equal(stage.keys(both[0], at), stage.keys(alone[0], at))
    assert torch.equal(stage.score(both[0], queries, None), stage.score(alone[0], queries, None))
    assert torch.equal(stage.values(both[1], at), stage.values(alone[1], at))
    assert torch.equal(stage.mix(both[1], weights), stage.mix(alone[1], weights))
    # Nothing is held for the other side, and both sides together take what one codec of equal widths does.
    assert not any(t.numel() for name, t in fields(alone[0].codes) if "value" in name)
    assert not any(t.numel() for name, t in fields(alone[1].codes) if "value" not in name)
    halves = (f(stage.alloc(B, H, N, KEY, "cpu")) for f in (keys_only, values_only))
    assert sum(t.untyped_storage().nbytes() for t in tensors((*halves,))) == sum(
        t.nbytes for t in tensors(stage.alloc(B, H, N, KEY, "cpu"))
    )


def test_half_is_fp16() -> None:
    keys = vectors(KEY, 5) * 1e5
    store = written(Half(), KEY, keys, keys)
    for read in (Half().keys, Half().values):
        assert torch.equal(read(store, slice(0, N)), keys.clamp(-65504, 65504).half().float())


def test_what_can_be_wrapped() -> None:
    assert inner_of(KIVI()) == KIVI() and isinstance(inner_of(Plain()), Half)
    for base in (Plain(), *BASES[1:]):
        check_base("KIVI.base", base)
    with pytest.raises(KVPolicyTypeError, match=r"KIVI\.base must be a codec, got 4; try TokenWise\(\)\."):
        check_base("KIVI.base", 4)
    with pytest.raises(KVPolicyError, match=r"KIVI\.base must encode keys and values separately, got csr"):
        check_base("KIVI.base", CSR())

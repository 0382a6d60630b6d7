"""Attention over encoded slots in chunks, down to a chunk of one group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpolicy.codecs import common
from kvpolicy.codecs.bfp import BFP
from kvpolicy.codecs.gear import GEAR
from kvpolicy.codecs.kivi import KIVI
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.codecs.turboquant import TurboQuant
from kvpolicy.protocols import Stage, StageStore
from tests.codecs import stages
from tests.conformance.twins import CASES, SLOTS, B, H, Twin, tokens
from tests.sampling import each_once, product


@pytest.mark.parametrize("group_size", [1, 24, 1500])
@pytest.mark.parametrize("groups", [0, 1, 2, 17, 100])
def test_chunks_are_whole_groups_and_cover_every_slot_once(groups: int, group_size: int) -> None:
    slots = groups * group_size
    found = common.chunks(slots, group_size)
    assert [slot for at in found for slot in range(at.start, at.stop)] == [*range(slots)]
    assert all(at.start % group_size == 0 and at.stop % group_size == 0 for at in found)
    assert len(found) <= common.MAX_CHUNKS


@pytest.fixture
def smallest_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one group."""
    monkeypatch.setattr(common, "CHUNK_SLOTS", 1)
    monkeypatch.setattr(common, "MAX_CHUNKS", 10**6)


@pytest.mark.usefixtures("smallest_chunks")
@product("name", [*CASES], sample=[(name,) for name in [*CASES][::2]])
def test_attention_slot_by_slot_is_that_of_what_is_read(name: str) -> None:
    twin = Twin(CASES[name], 32)
    twin.write(tokens(32, "outliers", list(range(SLOTS)), [(0, 1, 3)], seed=1))
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(B, H, 3, 32, generator=generator)
    weights = torch.rand(B, H, 3, SLOTS, generator=generator)
    keys, values = stages.read(twin.stage, twin.store, SLOTS)
    torch.testing.assert_close(twin.stage.score(twin.store, queries, None), queries @ keys.mT, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(twin.stage.mix(twin.store, weights), weights @ values, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("smallest_chunks")
@pytest.mark.parametrize("stage", [KIVI(group_size=4), GEAR(group_size=4)])
def test_attention_group_by_group_is_that_of_what_is_read(stage: Stage) -> None:
    stages.check_ways_to_read(stage, 12, 16, group_size=4)


def test_a_group_may_be_larger_than_a_chunk() -> None:
    stages.check_ways_to_read(KIVI(group_size=1100, bits=8), 2200, 4, group_size=1100)


@pytest.mark.usefixtures("smallest_chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tokenwise-8", "rotate-4"])
def test_small_shares_of_many_chunks_are_not_lost(name: str, dtype: torch.dtype) -> None:
    """Seven chunks that have less than half the rounding of the first one: together 1.3 % of its weight, in bf16."""
    twin = Twin(CASES[name], 32)
    twin.write(tokens(32, "constant", list(range(SLOTS)), []))
    rounding = torch.finfo(dtype).eps
    weights = torch.tensor([0.9, *[0.22 * rounding] * (SLOTS - 1)]).expand(B, H, 1, -1).to(dtype)
    want = weights.double() @ twin.stage.values(twin.store, slice(0, SLOTS)).double()
    torch.testing.assert_close(twin.stage.mix(twin.store, weights).double(), want, rtol=rounding, atol=0)


CODECS = [TokenWise(bits=4), TokenWise(bits="fp8"), BFP(), BFP(exact_values=True), TurboQuant()]


@product("codec,at_once", CODECS, [7, 1, 64], sample=each_once(CODECS, [7, 1, 64]), ids=str)
def test_tokens_encoded_in_ranges_have_the_codes_of_all_at_once(
    monkeypatch: pytest.MonkeyPatch, codec: Any, at_once: int
) -> None:
    """Also where some are not written, where slots are in no order, and where a head holds codes already."""
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[torch.Tensor, ...]] = []
    for size in (4096, at_once):
        monkeypatch.setattr(common, "ENCODED_AT_ONCE", size)
        generator.manual_seed(1)
        store = StageStore(codec.alloc(2, 2, 40, 32, "cpu"), ())
        for _ in range(2):
            keys, values = torch.randn(2, 2, 2, 30, 32, generator=generator) * 3 + 1
            slots = torch.rand(2, 2, 40, generator=generator).argsort(-1)[..., :30]
            mask = torch.rand(2, 2, 30, generator=generator) < 0.8
            occupied = torch.rand(2, 2, 40, generator=generator) < 0.02
            codec.write(store, keys, values, slots, mask, occupied)
        found.append(tuple(store.codes))
    for one, other in zip(*found, strict=True):
        assert one.equal(other)

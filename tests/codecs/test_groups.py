"""Codecs whose tokens are coded in groups, KIVI and KVarN, against their slow versions."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import GEAR, KIVI, KVarN
from kvpolicy.codecs import gear, token_groups
from kvpolicy.codecs.blocks import Blocks, blocks_of
from kvpolicy.protocols import StageStore
from tests.conformance.twins import CLOSE, DATA, SLOTS, B, H, Written, apart, plain_store, tokens
from tests.reference.codecs import kivi, kvarn
from tests.reference.coding import Given
from tests.sampling import each_once, product


class Twin:
    """The fast stage, and what is read back of each occupied slot by the slow version."""

    def __init__(self, stage: KIVI | KVarN, dim: int) -> None:
        self.stage = stage
        self.store = plain_store(stage, dim)
        slow = kivi if isinstance(stage, KIVI) else kvarn
        self.heads: dict[tuple[int, int], Any] = {(b, h): slow.Head(asdict(stage)) for b in range(B) for h in range(H)}
        self.want: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def write(self, new: Written) -> None:
        occupied = torch.zeros(B, H, SLOTS, dtype=torch.bool)
        for place in self.want:
            occupied[place] = True
        self.stage.write(self.store, *new, occupied)
        for (b, h), head in self.heads.items():
            own = [j for j in range(new.keys.shape[2]) if new.write_mask[b, h, j]]
            at = [int(new.slots[b, h, j]) for j in own]
            pairs = [(new.keys[b, h, j].float(), new.values[b, h, j].float()) for j in own]
            read = head.write(at, pairs, occupied[b, h].tolist(), Given()) if own else []
            for slot, pair in zip(at, read, strict=True):
                self.want[b, h, slot] = pair

    def drop(self, *slots: int) -> None:
        self.want = {place: read for place, read in self.want.items() if place[2] not in slots}

    def margin(self, place: tuple[int, int, int]) -> float:
        """How near to a tie a number of a head was."""
        return getattr(self.heads[place[:2]], "margin", 1.0)

    def check(self) -> None:
        for which, read in enumerate((self.stage.keys, self.stage.values)):
            got = read(self.store, slice(0, SLOTS))
            assert got.isfinite().all()
            backwards = torch.arange(SLOTS - 1, -1, -1).expand(B, H, -1)
            torch.testing.assert_close(read(self.store, backwards).flip(2), got, rtol=1e-6, atol=0)
            for place, pair in self.want.items():
                error = apart(got[place], pair[which])
                near = self.margin(place)
                # Of a number near a tie, fp32 may make the next code, which the slow version says.
                assert error < CLOSE or (near < 1e-6 and error < 0.4), (which, place, error, near)


STAGES: dict[str, KIVI | KVarN] = {
    **{f"kivi-{bits}": KIVI(bits=bits, group_size=4) for bits in (2, 4, 8)},
    "kivi-4-8": KIVI(key_bits=4, value_bits=8, group_size=2),
    **{
        f"kvarn-{key}-{value}": KVarN(group_size=4, key_bits=key, value_bits=value, iterations=3)
        for key, value in itertools.product((2, 3, 4), (2, 3, 4))
    },
}
KINDS = [*DATA]
SAMPLE = [*each_once(KINDS, [*STAGES]), ("bfloat16", "kivi-2"), ("tiny", "kivi-4")]


def in_range(row: tuple[str, str]) -> bool:
    """The slow version of KIVI has no numbers beyond those of fp16."""
    return row[0] != "huge" or "kvarn" in row[1]


@product("kind,name", KINDS, [*STAGES], sample=SAMPLE, allowed=in_range)
def test_all_data(kind: str, name: str) -> None:
    twin = Twin(STAGES[name], 32)
    twin.write(tokens(32, kind, [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 3), (1, 1, 4)]))
    twin.check()
    assert min(map(twin.margin, twin.want)) > 0 or kind in ("constant", "zero", "channels")


@pytest.mark.parametrize("dim", [5, 24, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (40, 64, 80))])
@pytest.mark.parametrize("name", ["kivi-8", "kvarn-4-2"])
def test_all_dimensions(dim: int, name: str) -> None:
    twin = Twin(STAGES[name], dim)
    twin.write(tokens(dim, "outliers", [0, 1, 2, 3, 4, 5, 6], [(0, 0, 2), (1, 1, 4)]))
    twin.check()


@product("kind,name", ["outliers", "constant", "zero", "huge"], ["kivi-2", "kvarn-4-2"], allowed=in_range)
def test_one_token(kind: str, name: str) -> None:
    twin = Twin(STAGES[name], 32)
    twin.write(tokens(32, kind, [5], []))
    twin.check()


@pytest.mark.parametrize(("name", "kind"), [("kivi-2", "outliers"), ("kvarn-4-2", "huge")])
def test_later_tokens_have_the_scales_of_their_group(name: str, kind: str) -> None:
    """Also those that come in one write with the first ones of an empty group."""
    twin = Twin(STAGES[name], 64)
    twin.write(tokens(64, "outliers", [0, 1, 2, 3], [(1, 0, 0)], seed=1))
    twin.drop(1, 2)
    twin.write(tokens(64, "outliers", [1, 6, 7], [(0, 1, 1), (1, 0, 2)], seed=2))
    twin.write(tokens(64, kind, [2, 5], [(0, 1, 0), (0, 1, 1)], seed=3))
    twin.check()


@pytest.mark.parametrize("name", ["kivi-4", "kvarn-4-2"])
def test_an_empty_group_starts_anew(name: str) -> None:
    twin = Twin(STAGES[name], 32)
    twin.write(tokens(32, "outliers", [0, 1, 2, 3, 4], [], seed=1))
    twin.drop(0, 1, 2, 3)
    twin.write(tokens(32, "normal", [1, 2, 3, 5], [(1, 1, 2)], seed=2))
    twin.check()


def found(slots: list[int], occupied: list[int], masked: tuple[int, ...] = ()) -> Blocks:
    """The blocks of a write to `slots` of one head, in which the slots `occupied` hold tokens."""
    holds = torch.zeros(20, dtype=torch.bool)
    holds[occupied] = True
    mask = torch.tensor([number not in masked for number in range(len(slots))])
    return blocks_of(torch.tensor([[slots]]), mask[None, None], holds[None, None], 4)


def test_started_blocks_come_first_and_are_as_many_as_the_tokens_fill() -> None:
    blocks = found([12, 13, 14, 15, 16, 5], [4, 6, 8])
    assert blocks.started.tolist() == [[[3, 4]]] and blocks.is_new.tolist() == [[[True, True]]]
    assert blocks.order.tolist() == [[[3, 4, 1, 0, 2]]]
    assert blocks.tokens(blocks.order[..., :3]).tolist() == [[[[0, 1, 2, 3], [4, -1, -1, -1], [-1, 5, -1, -1]]]]
    assert blocks.rows(torch.tensor([[[17, 12, 4]]])).tolist() == [[[1, 0, 2]]]


def test_tokens_in_old_blocks_start_none() -> None:
    blocks = found([5, 9, 0], [4, 8, 1], masked=(2,))
    assert blocks.started.shape[-1] == 1 and blocks.is_new.tolist() == [[[False]]]
    assert blocks.order.tolist() == [[[1, 2, 0]]]


@pytest.mark.parametrize("module", [gear, token_groups], ids=["gear", "kivi"])
def test_a_flush_fits_one_group_of_many(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []
    real = module.scale_and_zero

    def spy(least: Tensor, *given: Any) -> Any:
        fitted.append(least.shape[2])
        return real(least, *given)

    monkeypatch.setattr(module, "scale_and_zero", spy)
    codec = GEAR(group_size=4) if module is gear else KIVI(group_size=4)
    store = StageStore(codec.alloc(1, 1, 20, 16, "cpu"))
    keys, values = torch.randn(2, 1, 1, 4, 16, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(8, 12)[None, None]
    codec.write(store, keys, values, slots, slots > 0, torch.arange(20)[None, None] < 8)
    assert fitted == [1]

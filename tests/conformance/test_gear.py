"""GEAR's stage against its reference, a group of tokens at a time."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

from kvpolicy.codecs.gear import GEAR
from tests.conformance.twins import CLOSE, DATA, SLOTS, B, H, Pair, Written, apart, plain_store, sides, tokens
from tests.reference.codecs import gear
from tests.sampling import each_once, product


class Token(NamedTuple):
    """A token in GEAR's reference: key and value as given, as read back, and as read back without a low rank."""

    given: Pair
    read: Pair
    plain: Pair


class GroupTwin:
    """GEAR's stage, and what is read back of each occupied slot by the reference of its group."""

    def __init__(self, stage: GEAR, config: dict[str, Any], dim: int) -> None:
        self.stage = stage
        self.config = config
        self.dim = dim
        self.store = plain_store(stage, dim)
        self.groups: dict[tuple[int, int, int], list[gear.Head]] = {}
        self.want: dict[tuple[int, int, int], Token] = {}

    def write(self, new: Written) -> None:
        occupied = torch.zeros(B, H, SLOTS, dtype=torch.bool)
        for place in self.want:
            occupied[place] = True
        self.stage.write(self.store, *new, occupied)
        size = self.stage.group_size
        for b, h, group in itertools.product(range(B), range(H), range(SLOTS // size)):
            some = {int(new.slots[b, h, j]): j for j in range(new.keys.shape[2]) if new.write_mask[b, h, j]}
            some = {slot: j for slot, j in sorted(some.items()) if slot // size == group}
            given = [(new.keys[b, h, j].float(), new.values[b, h, j].float()) for j in some.values()]
            if given:
                self._write_group((b, h, group), list(some), given)

    def _write_group(self, at: tuple[int, int, int], slots: list[int], given: list[Pair]) -> None:
        size = self.stage.group_size
        inner = [slot % size for slot in slots]
        reads = list[list[Pair]]()
        if not any((*place[:2], place[2] // size) == at for place in self.want):
            self.groups[at] = [gear.Head({**self.config, "rank": rank}, self.dim) for rank in (self.config["rank"], 0)]
            reads = [head.fit_block(*sides(given), inner) for head in self.groups[at]]
        else:
            reads = [
                [head.overwrite(i, *pair) for i, pair in zip(inner, given, strict=True)] for head in self.groups[at]
            ]
        for slot, *token in zip(slots, given, *reads, strict=True):
            self.want[(*at[:2], slot)] = Token(*token)

    def drop(self, *slots: int) -> None:
        self.want = {place: read for place, read in self.want.items() if place[2] not in slots}

    def check(self, error_tolerance: float = 0.1) -> None:
        """Compare every occupied slot; of a low rank, whose basis is arbitrary, how much of the error it removes.

        Args:
            error_tolerance: The largest difference of the errors, relative to the error without the low rank.
        """
        backwards = torch.arange(SLOTS - 1, -1, -1).expand(B, H, -1)
        for which, read in enumerate((self.stage.keys, self.stage.values)):
            got = read(self.store, slice(0, SLOTS))
            assert got.isfinite().all()
            torch.testing.assert_close(read(self.store, backwards).flip(2), got, rtol=1e-5, atol=1e-5)
            fast = 0.0
            slow = 0.0
            backbone = 0.0
            for place, token in self.want.items():
                assert self.config["rank"] or apart(got[place], token.read[which]) < CLOSE, (place, which)
                fast += float((got[place] - token.given[which]).double().square().sum())
                slow += float((token.read[which] - token.given[which]).double().square().sum())
                backbone += float((token.plain[which] - token.given[which]).double().square().sum())
            assert abs(fast - slow) <= error_tolerance * backbone


GEARS: dict[str, dict[str, Any]] = {
    "2 bits": {"bits": 2, "rank": 0},
    "4 bits": {"bits": 4, "rank": 0, "backbone": "kcvt"},
    "8 and 2 bits": {"bits": 2, "key_bits": 8, "rank": 0},
    "2 and 4 bits": {"key_bits": 2, "value_bits": 4, "rank": 1},
    "no outliers": {"bits": 2, "rank": 0, "sparse": 0.0},
    "many outliers": {"bits": 2, "rank": 0, "sparse": 0.3, "group_size": 8},
    "rank 1": {"bits": 2, "rank": 1},
    "rank 3": {"bits": 4, "rank": 3, "sparse": 0.0},
}


def gear_twin(name: str, dim: int) -> GroupTwin:
    config: dict[str, Any] = {"group_size": 4, "sparse": 0.02, "backbone": "kivi", **GEARS[name]}
    return GroupTwin(GEAR(**config), config, dim)


DIMS = [32, 64, 80, 96, 128]


@product("name,dim", [*GEARS], DIMS, sample=each_once([*GEARS], DIMS))
def test_gear_in_all_dimensions(name: str, dim: int) -> None:
    twin = gear_twin(name, dim)
    twin.write(tokens(dim, "outliers", list(range(SLOTS)), [(1, 0, 6)]))
    twin.check()


KINDS = [*DATA]
SOME_DATA = [(name, KINDS[(number + 4 * more) % len(KINDS)]) for number, name in enumerate(GEARS) for more in (0, 1)]


@product("name,kind", [*GEARS], KINDS, sample=SOME_DATA)
def test_gear_of_all_data(name: str, kind: str) -> None:
    twin = gear_twin(name, 64)
    twin.write(tokens(64, kind, list(range(SLOTS)), [(1, 0, 6), (0, 1, 2)]))
    twin.check()


@pytest.mark.parametrize("name", GEARS)
def test_gear_keeps_a_group_that_lives(name: str) -> None:
    twin = gear_twin(name, 64)
    twin.write(tokens(64, "outliers", list(range(SLOTS)), [], seed=1))
    twin.drop(1, 2, 7)
    twin.write(tokens(64, "normal", [1, 7, 2], [(0, 1, 1)], seed=2))
    twin.check()
    twin.drop(*range(4))
    twin.write(tokens(64, "normal", [0, 1, 2, 3], [], seed=3))
    twin.check()


@product("name,count", [*GEARS], [1, 2, 3], sample=each_once([*GEARS], [1, 2, 3]))
def test_gear_of_a_group_that_is_not_full(name: str, count: int) -> None:
    twin = gear_twin(name, 32)
    twin.write(tokens(32, "outliers", list(range(4, 4 + count)), [], seed=3))
    # A rank above the number of tokens leaves a direction that is rounding noise: how much of the error it removes
    # depends on the order of sums, which differs between processors.
    error_tolerance = 0.2 if GEARS[name].get("rank", 0) > count else 0.1
    twin.check(error_tolerance)
    twin.write(tokens(32, "normal", [7], [], seed=4))
    twin.check(error_tolerance)


@pytest.mark.parametrize(("rank", "sparse", "bits"), [(2, 0.0, 3.25), (2, 0.02, 3.25 + 0.75 * 24 / 32), (0, 0.0, 2.5)])
def test_bits_of_a_number(rank: int, sparse: float, bits: float) -> None:
    """b + 32 / g + 16 r (1 / d + 1 / g); an outlier takes 24 bits here, and there are 2 in 64 and 2 in 128 numbers."""
    codes = GEAR(group_size=64, rank=rank, sparse=sparse).alloc(1, 1, 640, 128, "meta")
    assert sum(part.nbytes for part in codes) * 8 / 640 / 256 == bits

"""Every codec's stages against the reference codecs: what is read back of every token must be the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.bfp import BFP
from kvpolicy.codecs.csr import CSR, CSRBook
from kvpolicy.codecs.gear import GEAR
from kvpolicy.codecs.kvquant import KVQuant, KVQuantBook
from kvpolicy.codecs.tokenwise import TokenWise
from kvpolicy.protocols import Stage, Store
from tests.reference import bfp, csr, gear, kvquant, tokenwise

B, H, SLOTS = 2, 2, 8
CLOSE = 1e-5
"""Of a vector's largest number: the noise of fp32, and far less than one code."""


Pair = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """A stage and its reference.

    Attributes:
        stage: The fast stage.
        head: Makes the reference of one head, of a head dimension.
        store: Makes the store, of a head dimension.
        close: What two ways to read a vector may differ by, as a share of its largest number.
    """

    stage: Stage
    head: Callable[[int, int, int], Any]
    store: Callable[[Stage, int], Store]
    close: float = CLOSE


def plain_store(stage: Stage, dim: int) -> Store:
    return Store(stage.alloc(B, H, SLOTS, dim, "cpu"), stage.open(0, "cpu"))


def tokenwise_case(**config: Any) -> Case:
    return Case(TokenWise(**config), lambda dim, b, h: tokenwise.Head(config, dim), plain_store)


def bfp_case(**config: Any) -> Case:
    return Case(BFP(**config), lambda dim, b, h: bfp.Head(config, dim), plain_store)


def kvquant_case(scales: tuple[float, float], **config: Any) -> Case:
    """Levels that are not even, and channels whose ranges do not fit too well."""
    count = 2 ** config["bits"]
    levels = [(2 * j / (count - 1) - 1) ** 3 * 0.6 + (2 * j / (count - 1) - 1) * 0.4 for j in range(count)]
    levels = torch.tensor(levels).tolist()  # as fp32 has them
    norm = (scales[0], scales[1])

    def offset(dim: int, h: int) -> list[float]:
        return [float((c + h) % 7) for c in range(dim)]

    def width(dim: int, h: int) -> list[float]:
        return [30.0 if c % 11 == 3 + h else 1.25 for c in range(dim)]

    def head(dim: int, b: int, h: int) -> Any:
        return kvquant.Head(config, dim, offset(dim, h), width(dim, h), levels, levels, norm, norm)

    def store(stage: Stage, dim: int) -> Store:
        read = torch.tensor(levels) * norm[0] + norm[1]
        channels = [torch.tensor([some(dim, h) for h in range(H)])[None, :, None] for some in (offset, width)]
        book = KVQuantBook(channels[0], channels[1], torch.tensor(levels), read, torch.tensor(levels), read)
        return Store(stage.alloc(B, H, SLOTS, dim, "cpu"), book)

    return Case(KVQuant(**config), head, store)


def csr_case(atoms: int, **config: Any) -> Case:
    """A dictionary of random atoms, and the prompt's newest tokens, one of which is missing."""
    online: int = config.get("online", 0)
    config = {"online": online, **config}

    def random(count: int, dim: int, seed: int) -> Tensor:
        return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))

    def dictionary(dim: int) -> list[Tensor]:
        return [torch.nn.functional.normalize(random(atoms, width, 7), dim=-1) for width in (dim, dim // config["sn"])]

    def prompt(dim: int) -> Pair:
        keys, values = (random(B * H * online, dim, seed).reshape(B, H, online, dim) for seed in (8, 9))
        keys[1, 0, :1], values[1, 0, :1] = 0, 0
        return keys, values

    def head(dim: int, b: int, h: int) -> Any:
        offline = [list(side) for side in dictionary(dim)]
        keys, values = ([*side[b].reshape(-1, dim)] for side in prompt(dim))
        given = {key: value for key, value in config.items() if key != "online"}
        return csr.Head(given, dim, offline[0], offline[1], keys, values)

    def store(stage: Stage, dim: int) -> Store:
        codes = stage.alloc(B, H, SLOTS, dim, "cpu")
        return Store(codes, CSRBook(*dictionary(dim)), atoms=prompt(dim) if online else None)

    return Case(CSR(**config), head, store, close=0.04 if config.get("guard") else 3e-3)


CASES: dict[str, Case] = {
    **{f"tokenwise-{bits}": tokenwise_case(bits=bits) for bits in (2, 3, 4, 8, "fp8")},
    "tokenwise-raw": tokenwise_case(bits=4, normalize=False, group_size=32),
    "tokenwise-fp8-raw": tokenwise_case(bits="fp8", normalize=False, group_size=16),
    **{f"bfp-{mantissa}": bfp_case(mantissa=mantissa) for mantissa in (3, 4, 5, 6, 8)},
    **{f"kvquant-{bits}": kvquant_case((1.1, 0.05), bits=bits) for bits in (2, 3, 4)},
    "kvquant-none": kvquant_case((1.0, 0.0), bits=3, outliers=0.0),
    "kvquant-many": kvquant_case((1.0, 0.0), bits=2, outliers=0.1),
    **{f"csr-{solver}": csr_case(40, s=4, sn=2, solver=solver) for solver in ("mp", "refit", "omp")},
    "csr-fp8": csr_case(40, s=4, sn=1, coef="fp8"),
    "csr-online": csr_case(40, s=8, sn=4, online=2),
    "csr-guard": csr_case(30, s=2, sn=2, guard=2, online=1),
    "bfp-exact": bfp_case(block_channels=64, exact_values=True),
}

DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "outliers": lambda x: (
        x * torch.where(torch.arange(x.shape[-1]) % 11 == 3, 30.0, 0.5) + torch.arange(x.shape[-1]) % 7
    ),
    "constant": lambda x: torch.full_like(x, -3.3),
    "channels": lambda x: torch.arange(x.shape[-1]).sub(9).mul(0.7).expand_as(x),
    "zero": torch.zeros_like,
    "huge": lambda x: x * 1e6,
    "tiny": lambda x: x * 1e-7,
    "bfloat16": lambda x: x.bfloat16(),
}


class Written(NamedTuple):
    """Tokens that a stage was asked to write."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    active: Tensor


def tokens(dim: int, kind: str, slots: list[int], idle: list[tuple[int, int, int]], seed: int = 0) -> Written:
    """Tokens for `slots` of every head, of which those of `idle` (row, head, which) are garbage and not active."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (DATA[kind](torch.randn(B, H, len(slots), dim, generator=generator)).clone() for _ in range(2))
    active = torch.ones(B, H, len(slots), dtype=torch.bool)
    places = torch.tensor(slots).expand(B, H, -1).clone()
    for row, head, which in idle:
        active[row, head, which] = False
        keys[row, head, which] = torch.inf
        values[row, head, which] = -1e9
        places[row, head, which] = slots[0]  # in use
    return Written(keys, values, places, active)


def sides(pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of pairs."""
    return [key for key, _ in pairs], [value for _, value in pairs]


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((got - want).abs().amax() / want.abs().amax().clamp(min=1e-30))


class Twin:
    """A fast stage, and what is read back of each live slot by its reference."""

    def __init__(self, case: Case, dim: int) -> None:
        self.stage, self.store, self.close = case.stage, case.store(case.stage, dim), case.close
        self.heads = {(b, h): case.head(dim, b, h) for b in range(B) for h in range(H)}
        self.want: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def live(self) -> Tensor:
        live = torch.zeros(B, H, SLOTS, dtype=torch.bool)
        for place in self.want:
            live[place] = True
        return live

    def write(self, new: Written) -> None:
        self.stage.write(self.store, *new, self.live())
        for b in range(B):
            row = self._active(new, b)
            self._fit(b, row)
            for h, some in enumerate(row):
                for slot, pair in some.items():
                    _, *read = self.heads[b, h].code(*pair)
                    self.want[b, h, slot] = (read[0], read[1])

    def _active(self, new: Written, b: int) -> list[dict[int, Pair]]:
        """The tokens of each head of a row, by their slots."""
        return [
            {
                int(new.slots[b, h, j]): (new.keys[b, h, j].float(), new.values[b, h, j].float())
                for j in range(new.keys.shape[2])
                if new.active[b, h, j]
            }
            for h in range(H)
        ]

    def _fit(self, b: int, row: list[dict[int, Pair]]) -> None:
        """Fix what a head fixes by the first tokens it codes, and CSR's guard by those of a row."""
        held = {place[1] for place in self.want if place[0] == b}
        every = sides([pair for some in row for pair in some.values()])
        for h, some in enumerate(row):
            head = self.heads[b, h]
            if isinstance(head, csr.Head) and every[0] and not held:
                head.guard(*every)
            if some and h not in held:
                (head.scale if isinstance(head, csr.Head) else head.fit)(*sides([*some.values()]))

    def drop(self, *slots: int) -> None:
        self.want = {place: read for place, read in self.want.items() if place[2] not in slots}

    def check(self) -> None:
        """Compare every live slot, read as a range and by index."""
        backwards = torch.arange(SLOTS - 1, -1, -1).expand(B, H, -1)
        for which, read in enumerate((self.stage.keys, self.stage.values)):
            got = read(self.store, slice(0, SLOTS))
            assert got.dtype == torch.float32 and got.isfinite().all()
            torch.testing.assert_close(read(self.store, backwards).flip(2), got, rtol=1e-6, atol=0)
            for place, pair in self.want.items():
                error = apart(got[place], pair[which])
                assert error < self.close, f"{('key', 'value')[which]} of {place} is off by {error:.3g}"


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("name", CASES)
def test_all_dimensions(name: str, dim: int) -> None:
    twin = Twin(CASES[name], dim)
    twin.write(tokens(dim, "outliers", [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 3), (1, 1, 4)]))
    twin.check()


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("name", CASES)
def test_all_data(name: str, kind: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, kind, [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 3), (1, 1, 4)]))
    twin.check()


@pytest.mark.parametrize("kind", ["outliers", "constant", "zero", "huge"])
@pytest.mark.parametrize("name", CASES)
def test_one_token(name: str, kind: str) -> None:
    twin = Twin(CASES[name], 32)
    twin.write(tokens(32, kind, [5], []))
    twin.check()


@pytest.mark.parametrize("name", CASES)
def test_later_writes_keep_what_was_fixed(name: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, "outliers", [0, 1, 2, 3], [(1, 0, 0)], seed=1))
    twin.drop(1, 2)
    twin.write(tokens(64, "normal", [1, 6, 7], [(0, 1, 1), (1, 0, 2)], seed=2))
    twin.write(tokens(64, "outliers", [2, 5], [(0, 1, 0), (0, 1, 1)], seed=3))
    twin.check()


@pytest.mark.parametrize("name", CASES)
def test_a_head_whose_tokens_are_all_gone_starts_anew(name: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, "outliers", [0, 1, 2], [(0, 0, j) for j in range(3)], seed=1))
    twin.drop(0, 1, 2)
    twin.write(tokens(64, "normal", [1, 2, 3, 4], [(1, 1, 2)], seed=2))
    twin.write(tokens(64, "channels", [0, 5], [(1, 0, 0)], seed=3))
    twin.check()


@pytest.mark.parametrize("name", CASES)
def test_heads_without_an_active_token_stay_as_they_are(name: str) -> None:
    twin = Twin(CASES[name], 32)
    twin.write(tokens(32, "normal", [0, 1, 2, 3], [], seed=1))
    before = [part.clone() for part in twin.store.codes]
    twin.write(tokens(32, "huge", [4, 5], [(b, 1, j) for b in range(B) for j in range(2)], seed=2))
    for old, new in zip(before, twin.store.codes, strict=True):
        assert torch.equal(old[:, 1] if old.shape[1] == H else old, new[:, 1] if old.shape[1] == H else new)
    twin.check()


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_what_is_read(name: str) -> None:
    twin = Twin(CASES[name], 64)
    twin.write(tokens(64, "outliers", list(range(SLOTS)), [(0, 1, 3), (1, 0, 0)], seed=1))
    every, generator = slice(0, SLOTS), torch.Generator().manual_seed(4)
    queries, share = torch.randn(B, H, 3, 64, generator=generator), torch.rand(B, H, 3, SLOTS, generator=generator)
    want = queries @ twin.stage.keys(twin.store, every).transpose(-1, -2)
    torch.testing.assert_close(twin.stage.score(twin.store, queries, None), want, rtol=1e-4, atol=1e-3)
    want = share @ twin.stage.values(twin.store, every)
    torch.testing.assert_close(twin.stage.mix(twin.store, share), want, rtol=1e-4, atol=1e-3)


# ---- GEAR: a group of tokens at a time


class Token(NamedTuple):
    """A token in GEAR's reference: key and value as given, as read back, and as read back without a low rank."""

    given: Pair
    read: Pair
    plain: Pair


class GroupTwin:
    """GEAR's stage, and what is read back of each live slot by the reference of its group."""

    def __init__(self, stage: GEAR, config: dict[str, Any], dim: int) -> None:
        self.stage, self.config, self.dim = stage, config, dim
        self.store = plain_store(stage, dim)
        self.groups: dict[tuple[int, int, int], list[gear.Head]] = {}
        self.want: dict[tuple[int, int, int], Token] = {}

    def write(self, new: Written) -> None:
        live = torch.zeros(B, H, SLOTS, dtype=torch.bool)
        for place in self.want:
            live[place] = True
        self.stage.write(self.store, *new, live)
        size = self.stage.group_size
        for b, h, group in itertools.product(range(B), range(H), range(SLOTS // size)):
            some = {int(new.slots[b, h, j]): j for j in range(new.keys.shape[2]) if new.active[b, h, j]}
            some = {slot: j for slot, j in sorted(some.items()) if slot // size == group}
            given = [(new.keys[b, h, j].float(), new.values[b, h, j].float()) for j in some.values()]
            if given:
                self._write_group((b, h, group), list(some), given)

    def _write_group(self, at: tuple[int, int, int], slots: list[int], given: list[Pair]) -> None:
        size = self.stage.group_size
        inner, reads = [slot % size for slot in slots], list[list[Pair]]()
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

    def check(self) -> None:
        """Compare every live slot; of a low rank, whose basis is anyone's, how much of the error it takes away."""
        backwards = torch.arange(SLOTS - 1, -1, -1).expand(B, H, -1)
        for which, read in enumerate((self.stage.keys, self.stage.values)):
            got = read(self.store, slice(0, SLOTS))
            assert got.isfinite().all()
            torch.testing.assert_close(read(self.store, backwards).flip(2), got, rtol=1e-5, atol=1e-5)
            fast, slow, backbone = 0.0, 0.0, 0.0
            for place, token in self.want.items():
                assert self.config["rank"] or apart(got[place], token.read[which]) < CLOSE, (place, which)
                fast += float((got[place] - token.given[which]).double().square().sum())
                slow += float((token.read[which] - token.given[which]).double().square().sum())
                backbone += float((token.plain[which] - token.given[which]).double().square().sum())
            assert abs(fast - slow) <= 0.1 * backbone


GEARS: dict[str, dict[str, Any]] = {
    "2 bits": {"bits": 2, "rank": 0},
    "4 bits": {"bits": 4, "rank": 0, "backbone": "kcvt"},
    "no outliers": {"bits": 2, "rank": 0, "sparse": 0.0},
    "many outliers": {"bits": 2, "rank": 0, "sparse": 0.3, "group_size": 8},
    "rank 1": {"bits": 2, "rank": 1},
    "rank 3": {"bits": 4, "rank": 3, "sparse": 0.0},
}


def gear_twin(name: str, dim: int) -> GroupTwin:
    config: dict[str, Any] = {"group_size": 4, "sparse": 0.02, "backbone": "kivi", **GEARS[name]}
    return GroupTwin(GEAR(**config), config, dim)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("name", GEARS)
def test_gear_in_all_dimensions(name: str, dim: int) -> None:
    twin = gear_twin(name, dim)
    twin.write(tokens(dim, "outliers", list(range(SLOTS)), [(1, 0, 6)]))
    twin.check()


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("name", GEARS)
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

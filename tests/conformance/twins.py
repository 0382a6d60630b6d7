"""Stages and their references, side by side: what is read back of every token must be the same."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy import BFP, LowRank, Plain, RotateKV, ThinK, TokenWise, TurboQuant
from kvpolicy.codecs._files import save
from kvpolicy.codecs.csr.csr import CSR, CSRDictionaries
from kvpolicy.codecs.kvquant import KVQuant, KVQuantCalibration
from kvpolicy.codecs.mikv import MiKVStage
from kvpolicy.codecs.oscar import OSCAR, OSCARRotations
from kvpolicy.codecs.rotation import mix
from kvpolicy.codecs.zipcache import ZipCacheStage
from kvpolicy.protocols import Codec, Stage, StageStore
from kvpolicy.registry import lookup, name_of, names
from kvpolicy.statistics.channel_sums import LargestQueries, QuerySquares
from tests.reference.codecs import Lone, bfp, csr, kvquant, make, mikv, oscar, rotate, tokenwise, turboquant, zipcache
from tests.reference.coding import Coder, Given

B = 2
H = 2
SLOTS = 8
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
    store: Callable[[Stage, int], StageStore]
    close: float = CLOSE


def plain_store(stage: Stage, dim: int) -> StageStore:
    return StageStore(stage.alloc(B, H, SLOTS, dim, "cpu"), stage.load_calibration(0, "cpu"))


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

    def store(stage: Stage, dim: int) -> StageStore:
        read = torch.tensor(levels) * norm[0] + norm[1]
        channels = [torch.tensor([some(dim, h) for h in range(H)])[None, :, None] for some in (offset, width)]
        calibration = KVQuantCalibration(
            channels[0], channels[1], torch.tensor(levels), read, torch.tensor(levels), read
        )
        return StageStore(stage.alloc(B, H, SLOTS, dim, "cpu"), calibration)

    return Case(KVQuant(**config), head, store)


def csr_case(atoms: int, **config: Any) -> Case:
    """A dictionary of random atoms, and the prompt's newest tokens, one of which is missing."""
    prompt_atoms: int = config.get("prompt_atoms", 0)
    config = {"prompt_atoms": prompt_atoms, **config}

    def random(count: int, dim: int, seed: int) -> Tensor:
        return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))

    def dictionary(dim: int) -> list[Tensor]:
        return [
            torch.nn.functional.normalize(random(atoms, width, 7), dim=-1)
            for width in (dim, dim // config["value_chunks"])
        ]

    def prompt(dim: int) -> Pair:
        keys, values = (random(B * H * prompt_atoms, dim, seed).reshape(B, H, prompt_atoms, dim) for seed in (8, 9))
        keys[1, 0, :1] = 0
        values[1, 0, :1] = 0
        return keys, values

    def head(dim: int, b: int, h: int) -> Any:
        offline = [list(side) for side in dictionary(dim)]
        keys, values = ([*side[b, h]] for side in prompt(dim))
        given = {key: value for key, value in config.items() if key != "prompt_atoms"}
        return csr.Head(given, dim, offline[0], offline[1], keys, values)

    def store(stage: Stage, dim: int) -> StageStore:
        codes = stage.alloc(B, H, SLOTS, dim, "cpu")
        return StageStore(codes, CSRDictionaries(*dictionary(dim)), atoms=prompt(dim) if prompt_atoms else None)

    return Case(CSR(**config), head, store, close=3e-3)


def rotate_case(**config: Any) -> Case:
    return Case(RotateKV(**config), lambda dim, b, h: rotate.Head(config, dim), plain_store)


def signs(dim: int, seed: int) -> list[float]:
    """The random signs of channels: each one's share of the mean of all, which is the first mixed channel."""
    return mix(torch.eye(dim), seed)[:, 0].sign().tolist()


def turboquant_case(seed: int, **config: Any) -> Case:
    return Case(
        TurboQuant(seed=seed, **config), lambda dim, b, h: turboquant.Head(config, dim, signs(dim, seed)), plain_store
    )


def mikv_case(**config: Any) -> Case:
    def query_absmax(dim: int) -> Tensor:
        largest = torch.rand(B, H, dim, generator=torch.Generator().manual_seed(5)) * 9
        largest[:, :, 4] = 0
        return largest

    def store(stage: Stage, dim: int) -> StageStore:
        return plain_store(stage, dim)._replace(statistics={LargestQueries: query_absmax(dim)})

    return Case(MiKVStage(**config), lambda dim, b, h: mikv.Head(config, dim, query_absmax(dim)[b, h].tolist()), store)


def zipcache_case(**config: Any) -> Case:
    slow = {"bits": config["bits"], "value_bits": config.get("value_bits") or "auto"}
    return Case(ZipCacheStage(**config), lambda dim, b, h: zipcache.Head(slow, dim), plain_store)


class CoderHead:
    """The reference of a head that writes tokens with their slots, as one that codes one at a time."""

    def __init__(self, coder: Coder, given: Given) -> None:
        self.coder = coder
        self.given = given

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.coder.write([*range(len(keys))], [*zip(keys, values, strict=True)], [False], self.given)

    def code(self, key: Tensor, value: Tensor) -> tuple[Any, Tensor, Tensor]:
        return None, *self.coder.write([0], [(key, value)], [True], self.given)[0]


def think_case(**config: Any) -> Case:
    codec = ThinK(**config)

    def query_square(dim: int) -> Tensor:
        square = torch.rand(B, H, dim, generator=torch.Generator().manual_seed(6)) * 9
        square[0, :, 4] = 0
        square[1, 1] = 0
        return square

    def store(stage: Stage, dim: int) -> StageStore:
        return plain_store(stage, dim)._replace(statistics={QuerySquares: query_square(dim)})

    def head(dim: int, b: int, h: int) -> CoderHead:
        base = {"name": name_of(type(codec.base)), **dataclasses.asdict(codec.base)}  # pyright: ignore
        sizes = {"residual_length": 0, "block_size": 1}
        slow = make("think", {"ratio": codec.ratio, "window": codec.window, **sizes, "base": base})
        assert slow is not None
        return CoderHead(slow.coder(0, 0, 0), Given(query_square=query_square(dim)[b, h]))

    return Case(codec, head, store)


def lowrank_case(base: Codec | None = None, **config: Any) -> Case:
    """Bases of each head, onto which the data of the tests, which lie far from the mean, are projected."""

    def books(dim: int, h: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * dim + h)
        found: dict[str, Tensor] = {}
        for part in ("keys.post", "values", "queries"):
            basis = torch.linalg.qr(torch.randn(1, dim, dim, generator=generator)).Q.half()
            energy = torch.logspace(1, -1, dim)[None]
            mean = torch.randn(1, dim, generator=generator)
            found |= {f"{part}.basis": basis, f"{part}.energy": energy, f"{part}.mean": mean}
        return found

    stage = LowRank(base=base or Plain(), **config)
    inner = {"name": name_of(type(stage.base)), **dataclasses.asdict(stage.base)}  # pyright: ignore

    def head(dim: int, b: int, h: int) -> Any:
        sizes = {"residual_length": 0, "block_size": 1}
        given = {"basis": stage.basis, "key_space": "rotated", **sizes, "base": inner}
        slow = make("lowrank", {**given, "rank": stage.rank, "value_rank": stage.value_rank}, lambda _: books(dim, h))
        assert slow is not None
        return CoderHead(slow.coder(0, 0, 0), Given())

    def store(_: Stage, dim: int) -> StageStore:
        each = [books(dim, h) for h in range(H)]
        tensors = {f"{name}.0": torch.cat([own[name] for own in each]) for name in each[0]}
        with tempfile.TemporaryDirectory() as folder:
            save(folder, "lowrank", {"model": None, "head_dim": dim}, tensors)
            return plain_store(dataclasses.replace(stage, calibration=folder), dim)

    return Case(stage, head, store)


def oscar_case(**config: Any) -> Case:
    """A rotation for each head and side."""

    def rotations(dim: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(dim)
        keys, values = torch.linalg.qr(torch.randn(2, H, dim, dim, generator=generator)).Q
        return keys, values

    def head(dim: int, b: int, h: int) -> Any:
        return oscar.Head(config, dim, *(side[h].tolist() for side in rotations(dim)))

    def store(stage: Stage, dim: int) -> StageStore:
        return StageStore(
            stage.alloc(B, H, SLOTS, dim, "cpu"), OSCARRotations(*(side[None] for side in rotations(dim)))
        )

    return Case(OSCAR(**config), head, store)


CASES: dict[str, Case] = {
    "lowrank-one": lowrank_case(rank=1),
    "lowrank-unequal": lowrank_case(rank=3, value_rank=8),
    "lowrank-scores": lowrank_case(rank=4, basis="scores"),
    "lowrank-tokenwise": lowrank_case(TokenWise(bits=8), rank=8),
    **{f"tokenwise-{bits}": tokenwise_case(bits=bits) for bits in (2, 3, 4, 8, "fp8")},
    "tokenwise-8-4": tokenwise_case(key_bits=8, value_bits=4),
    "tokenwise-fp8-2": tokenwise_case(key_bits="fp8", value_bits=2, group_size=16),
    "tokenwise-3-fp8": tokenwise_case(key_bits=3, value_bits="fp8"),
    "tokenwise-raw": tokenwise_case(bits=4, normalize=False, group_size=32),
    "tokenwise-fp8-raw": tokenwise_case(bits="fp8", normalize=False, group_size=16),
    **{f"bfp-{mantissa}": bfp_case(mantissa=mantissa) for mantissa in (3, 4, 5, 6, 8)},
    **{f"kvquant-{bits}": kvquant_case((1.1, 0.05), bits=bits) for bits in (2, 3, 4)},
    "kvquant-none": kvquant_case((1.0, 0.0), bits=3, outliers=0.0),
    "kvquant-many": kvquant_case((1.0, 0.0), bits=2, outliers=0.1),
    **{f"csr-{solver}": csr_case(40, nnz=4, value_chunks=2, solver=solver) for solver in ("mp", "refit", "omp")},
    "csr-fp8": csr_case(40, nnz=4, value_chunks=1, coef="fp8"),
    "csr-prompt-atoms": csr_case(40, nnz=8, value_chunks=4, prompt_atoms=2),
    "csr-outlier-atoms": csr_case(30, nnz=2, value_chunks=2, outlier_atoms=2, prompt_atoms=1),
    **{f"rotate-{bits}": rotate_case(bits=bits) for bits in (2, 3, 4)},
    "rotate-4-2": rotate_case(key_bits=4, value_bits=2),
    "rotate-3-4": rotate_case(key_bits=3, value_bits=4, group_size=16),
    "rotate-groups": rotate_case(bits=3, group_size=16),
    **{f"oscar-{bits}": oscar_case(bits=bits) for bits in (2, 3, 4)},
    "oscar-4-2": oscar_case(key_bits=4, value_bits=2, group_size=16, key_clip=1.0, value_clip=0.7),
    **{f"turboquant-{bits}": turboquant_case(seed=bits, bits=bits) for bits in (2, 3, 4)},
    "turboquant-4-2": turboquant_case(seed=1, key_bits=4, value_bits=2),
    "turboquant-2-4": turboquant_case(seed=1, key_bits=2, value_bits=4),
    **{f"mikv-{bits}": mikv_case(bits=bits, group_size=128) for bits in (2, 3, 8)},
    "mikv-groups": mikv_case(bits=4, group_size=24),
    **{f"zipcache-{bits}": zipcache_case(bits=bits) for bits in (2, 3, 4, 8)},
    "zipcache-4-2": zipcache_case(bits=4, value_bits=2),
    "think-tokenwise-8-2": think_case(base=TokenWise(key_bits=8, value_bits=2, group_size=16)),
    "lowrank-tokenwise-8-4": lowrank_case(TokenWise(key_bits=8, value_bits=4), rank=8, value_rank=16),
    "think-none": think_case(ratio=0.0),
    "think-half": think_case(ratio=0.5),
    "think-most": think_case(ratio=0.99),
    "think-tokenwise": think_case(base=TokenWise(bits=4, group_size=16)),
    "think-bfp": think_case(base=BFP(mantissa=4), ratio=0.7),
    "bfp-exact": bfp_case(block_channels=64, exact_values=True),
}


def default_case(name: str) -> Case | None:
    """A codec with its defaults and its slow version; None if its slots depend on each other."""
    codec = lookup(name)[1]()
    slow = make(name, dataclasses.asdict(codec))
    coder = slow.coder(0, 0, 0) if slow else None
    if not isinstance(coder, Lone):
        return None
    return Case(codec.stages[0], lambda dim, b, h: coder.make(dim, Given()), plain_store)


for _name in names("codec"):
    if not any(case.startswith(f"{_name}-") for case in CASES) and (_case := default_case(_name)):
        CASES[_name] = _case

DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "outliers": lambda x: (
        x * torch.where(torch.arange(x.shape[-1]) % 11 == 3, 30.0, 0.5) + torch.arange(x.shape[-1]) % 7
    ),
    "constant": lambda x: torch.full_like(x, -3.25),
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
    write_mask: Tensor


def tokens(dim: int, kind: str, slots: list[int], idle: list[tuple[int, int, int]], seed: int = 0) -> Written:
    """Tokens for `slots` of every head, of which those of `idle` (row, head, which) are garbage, not in the mask."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (DATA[kind](torch.randn(B, H, len(slots), dim, generator=generator)).clone() for _ in range(2))
    write_mask = torch.ones(B, H, len(slots), dtype=torch.bool)
    places = torch.tensor(slots).expand(B, H, -1).clone()
    for row, head, which in idle:
        write_mask[row, head, which] = False
        keys[row, head, which] = torch.inf
        values[row, head, which] = -1e9
        places[row, head, which] = slots[0]  # in use
    return Written(keys, values, places, write_mask)


def sides(pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of pairs."""
    return [key for key, _ in pairs], [value for _, value in pairs]


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((got - want).abs().amax() / want.abs().amax().clamp(min=1e-30))


class Twin:
    """A fast stage, and what is read back of each occupied slot by its reference."""

    def __init__(self, case: Case, dim: int) -> None:
        self.stage = case.stage
        self.store = case.store(case.stage, dim)
        self.close = case.close
        self.heads = {(b, h): case.head(dim, b, h) for b in range(B) for h in range(H)}
        self.want: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def occupied(self) -> Tensor:
        occupied = torch.zeros(B, H, SLOTS, dtype=torch.bool)
        for place in self.want:
            occupied[place] = True
        return occupied

    def write(self, new: Written) -> None:
        self.stage.write(self.store, *new, self.occupied())
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
                if new.write_mask[b, h, j]
            }
            for h in range(H)
        ]

    def _fit(self, b: int, row: list[dict[int, Pair]]) -> None:
        """Fix what a head fixes by the first tokens it codes."""
        held = {place[1] for place in self.want if place[0] == b}
        for h, some in enumerate(row):
            if some and h not in held:
                self.heads[b, h].fit(*sides([*some.values()]))

    def drop(self, *slots: int) -> None:
        self.want = {place: read for place, read in self.want.items() if place[2] not in slots}

    def check(self, close: float | None = None) -> None:
        """Compare every occupied slot, read as a range and by index; `close` instead of what the case allows."""
        close = self.close if close is None else close
        backwards = torch.arange(SLOTS - 1, -1, -1).expand(B, H, -1)
        for which, read in enumerate((self.stage.keys, self.stage.values)):
            got = read(self.store, slice(0, SLOTS))
            assert got.dtype == torch.float32 and got.isfinite().all()
            torch.testing.assert_close(read(self.store, backwards).flip(2), got, rtol=1e-6, atol=0)
            for place, pair in self.want.items():
                error = apart(got[place], pair[which])
                assert error < close, f"{('key', 'value')[which]} of {place} is off by {error:.3g}"

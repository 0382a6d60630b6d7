"""What every stage of a codec must keep to, with the options that change its tensors or its arithmetic.

CSR, whose codes may differ by the rounding of products, has rules of its own in tests/codecs/test_csr.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvpolicy import (
    BFP,
    CSR,
    GEAR,
    KIVI,
    OSCAR,
    KVarN,
    KVQuant,
    LowRank,
    MiKV,
    MiniCache,
    RotateKV,
    Staircase,
    ThinK,
    TokenWise,
    TurboQuant,
    ZipCache,
)
from kvpolicy.codecs.mikv import MiKVStage
from kvpolicy.codecs.zipcache import ZipCacheStage
from kvpolicy.protocols import Codec, ModelInfo, Stage
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, flags
from tests.sampling import each_once, product

SLOTS = 24
DIMS = [8, 64, 80, 96, 128, 256]


class Kind(NamedTuple):
    """A stage, and what is special about it.

    Attributes:
        stage: The stage, or what makes it from a folder for calibrations and a head dimension.
        fixed: The tensors that a head's first tokens fix, if a later one is coded by these and itself alone.
        group_size: Tokens that are coded together.
        compiles: Whether it is compiled on every commit; tests/engine/test_compile.py has a whole step with others.
    """

    stage: Stage | Callable[[Path, int], Stage]
    fixed: Sequence[str] | None = None
    group_size: int = 1
    compiles: bool = False


def kvquant(**fields: Any) -> Callable[[Path, int], KVQuant]:
    return lambda folder, dim: KVQuant(calibration=stages.kvquant_files(folder, dim), **fields)


def oscar(**fields: Any) -> Callable[[Path, int], OSCAR]:
    return lambda folder, dim: OSCAR(calibration=stages.oscar_files(folder, dim), **fields)


def lowrank(**fields: Any) -> Callable[[Path, int], LowRank]:
    return lambda folder, dim: LowRank(
        calibration=stages.lowrank_files(folder, dim), rank=min(5, dim), value_rank=3, **fields
    )


NORM = ("channel_scale", "channel_zero")
BASES = {"tokenwise": TokenWise(bits=4), "turboquant": TurboQuant(), "bfp": BFP()}
KINDS: dict[str, Kind] = {
    **{f"tokenwise-{bits}": Kind(TokenWise(bits=bits), NORM, compiles=bits == "fp8") for bits in (2, 3, 4, 8, "fp8")},
    "tokenwise-8-2": Kind(TokenWise(key_bits=8, value_bits=2), NORM, compiles=True),
    "tokenwise-3-fp8": Kind(TokenWise(key_bits=3, value_bits="fp8"), NORM),
    "tokenwise-raw": Kind(TokenWise(bits="fp8", normalize=False, group_size=8), NORM),
    **{f"bfp-{mantissa}": Kind(BFP(mantissa=mantissa), ("order",)) for mantissa in (3, 4, 6, 8)},
    "bfp-blocks": Kind(BFP(mantissa=5, block_channels=8), ("order",), compiles=True),
    "bfp-exact": Kind(BFP(exact_values=True, block_channels=8), ("order",)),
    **{f"rotate-{bits}": Kind(RotateKV(bits=bits, group_size=8), ("place",)) for bits in (2, 3, 4)},
    "rotate-4-2": Kind(RotateKV(key_bits=4, value_bits=2, group_size=8), ("place",), compiles=True),
    "rotate-groups": Kind(RotateKV(bits=3, group_size=32), ("place",)),
    "oscar-2": Kind(oscar(), ()),
    "oscar-4-2": Kind(oscar(key_bits=4, value_bits=2, group_size=8), ()),
    "kvarn-4-2": Kind(KVarN(group_size=8), group_size=8, compiles=True),
    "kvarn-3-4": Kind(KVarN(group_size=4, key_bits=3, value_bits=4, iterations=2), group_size=4),
    **{f"turboquant-{bits}": Kind(TurboQuant(bits=bits), (), compiles=bits == 3) for bits in (2, 3, 4)},
    "turboquant-4-2": Kind(TurboQuant(key_bits=4, value_bits=2), (), compiles=True),
    **{f"mikv-{bits}": Kind(MiKVStage(bits=bits, group_size=32), ("channel_scale",)) for bits in (2, 3, 8)},
    **{f"zipcache-{bits}": Kind(ZipCacheStage(bits=bits)) for bits in (2, 3, 8)},
    "zipcache-4-2": Kind(ZipCacheStage(bits=4, value_bits=2)),
    "kvquant-3": Kind(kvquant(), ()),
    "kvquant-2": Kind(kvquant(bits=2, outliers=0.0), ()),
    "kvquant-4": Kind(kvquant(bits=4, norm=False, outliers=0.2), ()),
    "gear-2": Kind(GEAR(group_size=8), group_size=8, compiles=True),
    "gear-8-2": Kind(GEAR(group_size=8, key_bits=8, value_bits=2), group_size=8, compiles=True),
    "gear-plain": Kind(GEAR(group_size=8, rank=0), ("key_scale", "key_zero", "key_places"), 8),
    "gear-dense": Kind(GEAR(group_size=8, sparse=0.0), group_size=8),
    "gear-kcvt": Kind(GEAR(group_size=8, backbone="kcvt", rank=3, sparse=0.3), group_size=8),
    **{f"kivi-{bits}": Kind(KIVI(bits=bits, group_size=4), group_size=4, compiles=bits == 4) for bits in (2, 4, 8)},
    "kivi-8-2": Kind(KIVI(key_bits=8, value_bits=2, group_size=4), group_size=4, compiles=True),
    "lowrank": Kind(lowrank(), ()),
    "lowrank-tokenwise": Kind(lowrank(base=TokenWise(bits=8))),
    "lowrank-kivi": Kind(lowrank(base=KIVI(bits=8, group_size=4)), group_size=4),
    "think-plain": Kind(ThinK(), ("channels",), compiles=True),
    "think-kivi": Kind(ThinK(base=KIVI(bits=4, group_size=4)), ("channels",), 4, compiles=True),
    "think-kivi-4-2": Kind(ThinK(base=KIVI(key_bits=4, value_bits=2, group_size=4)), ("channels",), 4),
    **{f"think-{name}": Kind(ThinK(base=base), ("channels",)) for name, base in BASES.items()},
}
ONE_OF_EACH = [
    *("tokenwise-4", "bfp-4", "rotate-3", "turboquant-4", "mikv-3", "zipcache-3", "kvquant-3", "kivi-4"),
    *("gear-plain", "kvarn-3-4", "oscar-2", "think-plain", "tokenwise-8-2", "kivi-8-2", "lowrank"),
]


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str, int], Stage]:
    """A stage by its name, for a head dimension."""

    def make(name: str, dim: int) -> Stage:
        stage = KINDS[name].stage
        return stage if isinstance(stage, Stage) else stage(tmp_path, dim)

    return make


Made = Callable[[str, int], Stage]


FILLS_NO_BYTE = [(name, 5) for name in ("tokenwise-3", "bfp-4", "rotate-4", "mikv-3", "zipcache-8")]


def fits(row: tuple[str, int]) -> bool:
    return row[1] != 5 or row in FILLS_NO_BYTE


@product("name,dim", [*KINDS], [*DIMS, 5], sample=[*each_once([*KINDS], DIMS), *FILLS_NO_BYTE], allowed=fits)
def test_rows_and_ways_to_read(name: str, dim: int, made: Made) -> None:
    stage = made(name, dim)
    size = KINDS[name].group_size
    stages.check_ways_to_read(stage, 2 * max(size, 4), dim, size)
    stages.check_rows(stage, 2 * max(size, 4), dim)


@pytest.mark.parametrize("name", KINDS)
def test_slots_are_taken_again(name: str, made: Made) -> None:
    stage = made(name, 16)
    fixed = KINDS[name].fixed
    stages.check_inactive(stage, SLOTS, 16)
    stages.check_finite(stage, SLOTS, 16)
    if fixed is not None:
        stages.check_overwrite(stage, SLOTS, 16, fixed)


EQUAL = {
    **{f"tokenwise-{bits}": "keys and values" for bits in (2, 3, 4, 8)},
    **{name: "keys and values" for name in KINDS if name.startswith(("kivi", "gear"))},
    **{name: "values" for name in KINDS if name.startswith(("turboquant", "kvquant"))},
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_numbers_are_exact(name: str, made: Made) -> None:
    stage = made(name, 16)
    store = empty(stage, SLOTS, 16)
    x = torch.full((B, H, SLOTS, 16), -3.25)
    stage.write(store, x, x, at(range(SLOTS)), flags([True] * SLOTS), flags([False] * SLOTS))
    keys, values = stages.read(stage, store, SLOTS)
    assert torch.equal(values, x) and (EQUAL[name] == "values" or torch.equal(keys, x))


@pytest.mark.parametrize("name", ["tokenwise-4", "bfp-4", "think-plain", "think-tokenwise", "think-kivi"])
def test_the_order_of_tokens_does_not_matter(name: str, made: Made) -> None:
    fixed = KINDS[name].fixed
    assert fixed is not None
    stages.check_order(made(name, 64), 1500, 64, fixed)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_to_write(name: str, made: Made) -> None:
    stage = made(name, 16)
    store = empty(stage, 0, 16)
    stage.write(store, *draw(0, 16), at([]), flags([]), flags([]))
    assert all(part.shape == (B, H, 0, 16) for part in stages.read(stage, store, 0))


TRACED = [(name, "eager") for name, kind in KINDS.items() if kind.compiles]
"""What dynamo does shows breaks and other results; what stands behind it does the same for each of them."""


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@product("name,backend", [*KINDS], ["eager", "aot_eager"], sample=[("tokenwise-3", "aot_eager"), *TRACED])
def test_it_compiles_whole(name: str, backend: str, made: Made) -> None:
    stages.check_compiled(made(name, 24), SLOTS, 24, backend, close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name", [name for name in [*ONE_OF_EACH, "tokenwise-fp8", "think-tokenwise"] if "gear" not in name]
)
def test_it_compiles_to_kernels(name: str, made: Made) -> None:
    stages.check_compiled(made(name, 24), SLOTS, 24, "inductor", close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("codec", [RotateKV, TurboQuant])
def test_it_compiles_for_another_model_and_other_bits(codec: Any) -> None:
    torch.compiler.reset()
    for bits, dim in ((3, 24), (4, 16)):  # constants of another shape in the same places
        stages.check_compiled(codec(bits=bits), SLOTS, dim, "aot_eager", torch.testing.assert_close)


SIZES = [{"residual_length": -1}, {"block_size": 0}]
SHARES = [{"high": -0.1}, {"high": 1.1}]
REFUSED: dict[Any, list[dict[str, Any]]] = {
    BFP: [{"mantissa": 7}, {"block_channels": 0}, *SIZES],
    CSR: [
        *({"nnz": 0}, {"nnz": 7}, {"value_chunks": 3}, {"prompt_atoms": -1}, {"outlier_atoms": -1}, {"solver": "ista"}),
        *({"coef": "fp4"}, {"index": "int8"}, {"key_space": "both"}, *SIZES),
        {"read_top_k": 5, "key_space": "rotated"},
    ],
    GEAR: [
        *({"bits": 3}, {"group_size": 1}, {"rank": -1}, {"rank": 9, "group_size": 8}, {"sparse": 1.0}),
        *({"sparse": -0.1}, {"residual_length": -1}, {"backbone": "other"}),
    ],
    KIVI: [{"bits": 3}, {"group_size": 0}, {"residual_length": -1}],
    KVQuant: [{"bits": 5}, {"outliers": 1.0}, {"outliers": -0.1}, {"sinks": -1}, {"calibration": ""}, *SIZES],
    MiKV: [{"high_bits": 4}, {"bits": 8}, {"group_size": 0}, *SHARES, *SIZES],
    MiniCache: [{"start": 1.5}, {"start": -1}, {"start": float("nan")}, {"t": 1.1}, {"keep": -0.1}, *SIZES],
    KVarN: [{"key_bits": 8}, {"value_bits": 1}, {"group_size": 0}, {"iterations": 0}, {"sinks": -1}],
    OSCAR: [{"bits": 8}, {"key_clip": 0.0}, {"value_clip": 1.1}, {"sinks": -1}, {"calibration": ""}, *SIZES],
    RotateKV: [{"bits": 5}, {"group_size": 0}, {"sinks": -1}, *SIZES],
    Staircase: [{"tokens_8bit": 0}, {"tokens_4bit": 0}, {"group_size": 0}, {"residual_length": -1}],
    TokenWise: [{"bits": 5}, {"bits": "4"}, {"group_size": 0}, *SIZES],
    TurboQuant: [{"bits": 5}, {"seed": -1}, *SIZES],
    ZipCache: [{"high_bits": 16}, {"bits": 8}, {"recode_every": 0}, *SHARES],
}


@pytest.mark.parametrize("codec", REFUSED)
def test_it_refuses(codec: Any) -> None:
    for fields in REFUSED[codec]:
        name = f"{codec.__name__}.{next(iter(fields))}"
        with pytest.raises(ValueError, match=rf"^{name} must be .*, got .*; try .*\.$"):
            codec(**fields)


@pytest.mark.parametrize(
    ("codec", "dim", "message"),
    [
        (BFP(), 2**15 + 1, "at most 32768 for BFP, got 32769; try KIVI"),
        (GEAR(rank=9), 8, r"GEAR\.rank must be at most the head dimension, 8, got 9"),
        (KIVI(bits=2), 10, r"multiple of 4 for KIVI\.bits=2, got 10; try bits=8"),
        (KIVI(key_bits=8), 6, r"multiple of 4 for KIVI\.bits=2, got 6"),
        (Staircase(), 10, "head dimension must be a multiple of 4 for Staircase, got 10"),
        (ThinK(), 512, r"The head dimension must be at most 256 for ThinK, got 512"),
        (ThinK(base=KIVI(bits=4)), 7, r"must be a multiple of 2 for KIVI\.bits=4, got 7"),
        (TurboQuant(), 5, "got 5; try MiKV"),
        (TurboQuant(bits=3), 100, r"multiple of 8 for TurboQuant\.bits=3, got 100; try bits=4"),
        (TurboQuant(value_bits=3), 4, r"multiple of 8 for TurboQuant\.value_bits=3, got 4; try value_bits=4"),
    ],
    ids=str,
)
def test_it_refuses_head_dimensions(codec: Codec, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec.check(ModelInfo(1, 1, dim))
    codec.check(ModelInfo(1, 1, 96))


def test_a_share_is_not_one_token_more() -> None:
    """0.07 * 100 is a little more than 7."""
    assert ZipCache(high=0.07).layout(100).coded == (7, 93)
    assert MiKV(high=0.07, residual_length=32, block_size=32).layout(100).exact == 32 + 32 + 7

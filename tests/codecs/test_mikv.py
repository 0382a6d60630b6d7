"""MiKV: the balancer, the layout of two precisions, and what every stage must keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.mikv import MiKV, MiKVStage
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Codec, Layout, ModelInfo, RotaryView, Stage, StageStore
from tests.codecs import stages
from tests.codecs.stages import B, H, at, draw, empty, error, fill, flags

C = 12
D = 16


@dataclass(frozen=True, slots=True)
class Peaked:
    """A stage of MiKV that is told of a prompt's queries, which tests of any stage do not know."""

    inner: MiKVStage

    def query_absmax(self, batch: int, dim: int) -> Tensor:
        """Those of every row, of which one channel was never asked for."""
        size = torch.linspace(0, 5, dim, dtype=torch.float32)
        return size.expand(batch, H, dim)

    def told(self, store: StageStore) -> StageStore:
        batch, _, _, dim = store.codes.channel_scale.shape
        return store._replace(query_absmax=self.query_absmax(batch, dim))

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        return self.inner.load_calibration(layer_idx, device)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Any:
        return self.inner.alloc(batch, heads, slots, head_dim, device)

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        self.inner.write(self.told(store), keys, values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return self.inner.keys(self.told(store), at)

    def values(self, store: StageStore, at: At) -> Tensor:
        return self.inner.values(self.told(store), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        return self.inner.score(self.told(store), queries, rope)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        return self.inner.mix(self.told(store), weights)


def made(bits: int = 4, group_size: int = 128) -> Peaked:
    return Peaked(MiKVStage(bits=bits, group_size=group_size))


def uniform(x: Tensor, bits: int) -> Tensor:
    """The last dimension, quantized and back."""
    zero = x.amin(-1, keepdim=True).half().float()
    scale = ((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)).half().float()
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def test_it_is_a_codec_of_stages() -> None:
    codec = MiKV(bits=3)
    assert isinstance(codec, Codec) and isinstance(MiKVStage(bits=2, group_size=8), Stage)
    assert (codec.traits.demote_by, codec.traits.query_absmax) == ("priority", True)
    assert (codec.traits.block, codec.traits.group_size, codec.traits.residual) == (32, 1, 32)
    assert codec.stages == (MiKVStage(bits=3, group_size=128),)
    assert MiKV(high_bits=8, group_size=64).stages == tuple(MiKVStage(bits=bits, group_size=64) for bits in (8, 2))
    codec.check(ModelInfo(1, 1, 7))


@pytest.mark.parametrize(
    ("tokens", "exact", "eight"),
    [
        (0, Layout(0), Layout(0)),
        (63, Layout(63), Layout(63)),
        (64, Layout(64), Layout(64, (32, 0))),
        (79, Layout(79), Layout(64, (32, 15))),
        (80, Layout(80, (32,)), Layout(64, (32, 16))),
        (1000, Layout(264, (768,)), Layout(64, (200, 768))),
    ],
)
def test_layout(tokens: int, exact: Layout, eight: Layout) -> None:
    sizes: dict[str, Any] = {"residual_length": 32, "block_size": 32}
    assert MiKV(**sizes).layout(tokens) == exact
    assert MiKV(high_bits=8, **sizes).layout(tokens) == eight


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
    assert (
        MiKV(high=0.07, residual_length=32, block_size=32).layout(100).exact == 32 + 32 + 7
    )  # 0.07 * 100 is a little more than 7


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_of_balanced_keys(bits: int) -> None:
    stage = made(bits)
    store, keys, values = fill(stage, C, D)
    b = (stage.query_absmax(B, D)[:, :, None] / keys.abs().amax(2, keepdim=True)).sqrt()
    b = torch.where(b == 0, 1, b).half().float()
    assert torch.equal(store.codes.channel_scale, b.half())
    torch.testing.assert_close(stage.keys(store, slice(0, C)), uniform(keys * b, bits) / b, atol=1e-5, rtol=1e-5)
    assert torch.equal(stage.values(store, slice(0, C)), uniform(values, bits))


def test_the_balancer_makes_key_and_query_alike() -> None:
    stage = made()
    store, keys, _ = fill(stage, C, D)
    b = store.codes.channel_scale.float()
    query_absmax = stage.query_absmax(B, D)[:, :, None]
    even = (keys * b).abs().amax(2, keepdim=True)
    torch.testing.assert_close(even[..., 1:], (query_absmax / b)[..., 1:], atol=0, rtol=2e-3)


def test_it_serves_queries_of_the_channels_that_are_asked_for() -> None:
    keys, values = draw(64, 64)
    keys[..., 0] *= 50  # never asked for
    queries = torch.randn(B, H, 8, 64, generator=torch.Generator().manual_seed(1))
    queries[..., 0] *= 1e-3
    errors: list[float] = []
    for query_absmax in (queries.abs().amax(2), torch.zeros(B, H, 64)):
        stage = MiKVStage(bits=4, group_size=64)
        store = empty(stage, 64, 64)._replace(query_absmax=query_absmax)
        stage.write(store, keys, values, at(range(64)), flags([True] * 64), flags([False] * 64))
        errors.append(error(stage.score(store, queries, None), queries @ keys.mT))
    assert errors[0] < errors[1] / 10


def test_without_a_key_or_a_query_a_channel_is_as_it_is() -> None:
    stage = made()
    keys, values = draw(C, D)
    keys[..., 3] = 0
    store = empty(stage, C, D)
    stage.write(store, keys, values, at(range(C)), flags([True] * C), flags([False] * C))
    assert (store.codes.channel_scale[..., [0, 3]] == 1).all()
    assert (store.codes.channel_scale[..., [1, 2, 4]] != 1).all()


def test_only_active_tokens_fit_the_balancer() -> None:
    stage = made()
    keys, values = draw(C, D)
    keys[:, :, 7:] = torch.nan
    some = empty(stage, C, D)
    alone = empty(stage, C, D)
    stage.write(some, keys, values, at(range(C)), flags([slot < 7 for slot in range(C)]), flags([False] * C))
    stage.write(alone, keys[:, :, :7], values[:, :, :7], at(range(7)), flags([True] * 7), flags([False] * C))
    assert stages.same(some, alone)


def test_a_head_without_tokens_is_balanced_anew() -> None:
    stage = made()
    store, _, _ = fill(stage, C, D)
    before = store.codes.channel_scale.clone()
    keys, values = draw(4, D, seed=5)
    occupied = torch.ones(B, H, C, dtype=torch.bool)
    occupied[1, 2] = False
    stage.write(store, keys, values, at(range(4)), flags([True] * 4), occupied)
    fresh = torch.zeros(B, H, dtype=torch.bool)
    fresh[1, 2] = True
    assert torch.equal((store.codes.channel_scale != before).any(-1).squeeze(-1), fresh)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [5, 8, 64, 80, 96, 128, 256])
def test_it_is_a_good_stage(bits: int, dim: int) -> None:
    stages.check_ways_to_read(made(bits, 32), 6, dim)
    stages.check_rows(made(bits, 32), 6, dim)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_slots_are_taken_again(bits: int) -> None:
    stages.check_inactive(made(bits), C, D)
    stages.check_overwrite(made(bits), C, D, ("channel_scale",))
    stages.check_finite(made(bits), C, D)


@pytest.mark.parametrize(("bits", "dim", "per_number"), [(2, 128, 2.25), (3, 128, 3.25), (8, 256, 8.25)])
def test_bytes_are_known_without_memory(bits: int, dim: int, per_number: float) -> None:
    codes = made(bits).alloc(2, 8, 4096, dim, "meta")
    assert all(part.device.type == "meta" for part in codes)
    balancer = 2 * 8 * dim * 2
    assert sum(part.nbytes for part in codes) - balancer == 2 * 8 * 4096 * dim * 2 * per_number / 8


@pytest.mark.parametrize(
    "parameters",
    [
        {"high": -0.1},
        {"high": 1.1},
        {"high_bits": 4},
        {"bits": 8},
        {"group_size": 0},
        {"residual_length": -1},
        {"block_size": 0},
    ],
)
def test_it_refuses(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^MiKV\.{next(iter(parameters))} must be .*, got .*; try .*\.$"):
        MiKV(**parameters)


def test_nothing_to_write() -> None:
    stage = made()
    store = empty(made(), 0, D)
    stage.write(store, *draw(0, D), at([]), flags([]), flags([]))
    assert stage.keys(store, slice(0, 0)).shape == (B, H, 0, D)


@pytest.mark.full  # tests/engine/test_compile.py compiles a whole step with this codec on every commit
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_it_compiles_whole() -> None:
    stages.check_compiled(made(3), C, D, "aot_eager", torch.testing.assert_close)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_compiles_to_kernels() -> None:
    stages.check_compiled(made(2), C, D, "inductor", torch.testing.assert_close)

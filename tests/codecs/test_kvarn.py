"""KVarN: against vectors of the authors' code, against its slow version, and its rules."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvpolicy import KVarN, Policy
from kvpolicy.codecs.rotation import mix, unmix
from kvpolicy.kernels.balance import balance, deviation
from kvpolicy.protocols import SizedCodec, StageStore
from tests.codecs import stages
from tests.conformance.twins import CLOSE, DATA, SLOTS, B, H, Written, apart, plain_store, tokens
from tests.reference.codecs import kvarn
from tests.reference.coding import Given
from tests.sampling import each_once, product

# ---- The authors' code. `kvarn.safetensors` has groups of 16 tokens of 32 channels, which their Hadamard transform
# would give, and what `variance_normalize_batched`, `kvarn_store_tile_k_batch_from_sinkhorn` (4 bits) and
# `kvarn_store_tile_v_batch_from_sinkhorn` (2 bits) made of them in 8 and in 16 rounds, recorded on a CPU.

RECORDED = load_file(Path(__file__).parent / "kvarn.safetensors")
SIDES = ["keys", "values"]


def groups(side: str) -> Tensor:
    """The groups that were recorded, in the slots of one head, [1, 1, 64, 32]."""
    return RECORDED[side].flatten(0, 1)[None, None]


def written(rounds: int) -> tuple[KVarN, StageStore]:
    codec = KVarN(group_size=16, iterations=rounds)
    keys, values = (unmix(groups(side)) for side in SIDES)
    count = keys.shape[2]
    store = StageStore(codec.alloc(1, 1, count, keys.shape[3], "cpu"))
    yes = torch.ones(1, 1, count, dtype=torch.bool)
    codec.write(store, keys, values, torch.arange(count)[None, None], yes, ~yes)
    return codec, store


@pytest.mark.parametrize("rounds", [8, 16])
def test_scales_are_the_authors(rounds: int) -> None:
    """But for the last group: so small that all scales are at a bound, where rounding decides between it and 1."""
    for side, name in (("keys", "s_row_K"), ("values", "s_col_V")):
        x = RECORDED[side][:3].double()
        found = balance(x, torch.ones(*x.shape[:2], 1, dtype=torch.bool), rounds, tokens_first=side == "keys")
        got = found[0].squeeze(-1) if side == "keys" else found[1].squeeze(1)
        torch.testing.assert_close(got, RECORDED[f"{rounds}.{name}"][:3].double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rounds", [8, 16])
def test_what_is_read_is_what_the_authors_read(rounds: int) -> None:
    """But for numbers half way between two codes, which their scales in fp32 and ours in fp16 put to either side."""
    codec, store = written(rounds)
    have = {name.partition(".")[2]: t.float() for name, t in RECORDED.items() if name.startswith(f"{rounds}.")}
    keys = (have["key_codes"] * have["s_col_K"][..., None] + have["zp_K"][..., None]) * have["s_row_K"][:, None]
    values = have["value_codes"] * have["s_row_V"][..., None] + have["zp_V"][..., None]
    values = values * have["s_col_V"][:, None]
    key_step = have["s_col_K"][:, None] * have["s_row_K"][..., None]
    value_step = have["s_row_V"][..., None] * have["s_col_V"][:, None]
    pairs = ((codec.keys, keys.mT, key_step), (codec.values, values, value_step))
    for read, want, step in pairs:
        got = mix(read(store, slice(0, 64)))[0, 0].unflatten(0, (4, 16))
        off = (got - want).abs() / step.clamp(min=1e-6)
        assert off.max() < 1.1, "never more than the next code"
        assert (off > 0.1).double().mean() < 0.002


# ---- The slow version


class Twin:
    """The fast stage, and what is read back of each occupied slot by the slow version."""

    def __init__(self, dim: int, **config: Any) -> None:
        self.stage = KVarN(group_size=4, **config)
        self.store = plain_store(self.stage, dim)
        slow = {name: getattr(self.stage, name) for name in ("key_bits", "value_bits", "group_size", "iterations")}
        self.heads = {(b, h): kvarn.Head(slow) for b in range(B) for h in range(H)}
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
            for slot, read in zip(
                at, head.write(at, pairs, occupied[b, h].tolist(), Given()) if own else [], strict=True
            ):
                self.want[b, h, slot] = read

    def drop(self, *slots: int) -> None:
        self.want = {place: read for place, read in self.want.items() if place[2] not in slots}

    def check(self) -> None:
        for which, read in enumerate((self.stage.keys, self.stage.values)):
            got = read(self.store, slice(0, SLOTS))
            assert got.isfinite().all()
            backwards = torch.arange(SLOTS - 1, -1, -1).expand(B, H, -1)
            torch.testing.assert_close(read(self.store, backwards).flip(2), got, rtol=1e-6, atol=0)
            for place, pair in self.want.items():
                error = apart(got[place], pair[which])
                near = self.heads[place[:2]].margin
                # Of a number near a tie, fp32 may make the next code, which the slow version says.
                assert error < CLOSE or (near < 1e-6 and error < 0.4), (which, place, error, near)


BITS = list(itertools.product([2, 3, 4], [2, 3, 4]))


@product("kind,bits", [*DATA], BITS, sample=each_once([*DATA], BITS))
def test_all_data(kind: str, bits: tuple[int, int]) -> None:
    twin = Twin(32, key_bits=bits[0], value_bits=bits[1], iterations=3)
    twin.write(tokens(32, kind, [0, 1, 2, 3, 4], [(1, 0, 0), (1, 0, 3), (1, 1, 4)]))
    twin.check()
    assert min(head.margin for head in twin.heads.values()) > 0 or kind in ("constant", "zero", "channels")


@pytest.mark.parametrize("dim", [5, 24, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (40, 64, 80))])
def test_all_dimensions(dim: int) -> None:
    twin = Twin(dim)
    twin.write(tokens(dim, "outliers", [0, 1, 2, 3, 4, 5, 6], [(0, 0, 2), (1, 1, 4)]))
    twin.check()


@pytest.mark.parametrize("kind", ["outliers", "constant", "zero", "huge"])
def test_one_token(kind: str) -> None:
    twin = Twin(32)
    twin.write(tokens(32, kind, [5], []))
    twin.check()


def test_later_tokens_have_the_scales_of_their_group() -> None:
    twin = Twin(64, iterations=4)
    twin.write(tokens(64, "outliers", [0, 1, 2, 3], [(1, 0, 0)], seed=1))
    twin.drop(1, 2)
    twin.write(tokens(64, "outliers", [1, 6, 7], [(0, 1, 1), (1, 0, 2)], seed=2))
    twin.write(tokens(64, "huge", [2, 5], [(0, 1, 0), (0, 1, 1)], seed=3))
    twin.check()


def test_an_empty_group_starts_anew() -> None:
    twin = Twin(32)
    twin.write(tokens(32, "outliers", [0, 1, 2, 3, 4], [], seed=1))
    twin.drop(0, 1, 2, 3)
    twin.write(tokens(32, "normal", [1, 2, 3, 5], [(1, 1, 2)], seed=2))
    twin.check()


# ---- What the normalization is for


def test_deviations_are_evened() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, 128, generator=generator, dtype=torch.float64) * 8
    # Less than a scale may shrink what is below the mean, exp(-0.3).
    x *= torch.rand(3, 64, 1, generator=generator, dtype=torch.float64).mul(0.4).exp()
    x *= torch.rand(3, 1, 128, generator=generator, dtype=torch.float64).mul(0.4).exp()
    every = torch.ones(3, 64, 1, dtype=torch.bool)
    for first in (False, True):
        rows, columns = balance(x, every, 16, first)
        scaled = x / rows / columns
        for before, after in ((deviation(x), deviation(scaled)), (deviation(x.mT), deviation(scaled.mT))):
            assert before.amax() / before.amin() > 1.6 and after.amax() / after.amin() < 1.2


def test_a_large_token_does_not_cost_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(B, H, 16, 64, generator=generator) * 3
    keys[:, :, 5] *= 30
    errors: dict[bool, float] = {}
    for normalized in (True, False):
        codec = KVarN(group_size=16, key_bits=2)
        store = stages.empty(codec, 16, 64, B)._replace(codes=codec.alloc(B, H, 16, 64, "cpu"))
        yes = torch.ones(B, H, 16, dtype=torch.bool)
        given = keys if normalized else keys * 1e-4  # too small to be normalized: scales are 0.74 at least
        codec.write(store, given, given, torch.arange(16).expand(B, H, -1), yes, ~yes)
        error = (codec.keys(store, slice(0, 16)) - given)[:, :, :5] / given[:, :, :5].norm()
        errors[normalized] = float(error.norm())
    assert errors[True] < errors[False] / 3


def test_scales_never_leave_their_bounds() -> None:
    x = torch.zeros(2, 4, 8, dtype=torch.float64)
    x[1] = torch.arange(32).reshape(4, 8) * 1e30
    rows, columns = balance(x, torch.ones(2, 4, 1, dtype=torch.bool), 20, tokens_first=True)
    for scale in (rows, columns):
        assert scale.isfinite().all() and scale.min() > 0.74 and scale.max() < 22027


# ---- Rules


def test_the_layout_is_that_of_the_paper() -> None:
    codec = KVarN()
    assert codec.layout(1000) == (256, (896,)) and codec.layout(255) == (255, ())
    assert (codec.traits.pins, codec.traits.pinned, codec.traits.residual) == ("first", 128, 0)
    assert KVarN(sinks=0).traits.pins == "none"
    assert not isinstance(codec, SizedCodec), "its buffer is a group, whatever the budget"


def test_bits_of_a_number() -> None:
    codes = [KVarN().alloc(1, 1, slots, 128, "meta") for slots in (1024, 2048)]
    few, more = (sum(part.nbytes for part in each) for each in codes)
    # As in the authors' layout: 3 numbers of fp16 for each channel and each token, and a number of fp32 for a group.
    assert (more - few) * 8 / 1024 / 256 == 3 + (3 * 128 + 3 * 128) * 16 / (128 * 256) + 32 / (128 * 256)


def test_specs() -> None:
    for spec in ("kvarn", "snapkv+kvarn@0.5", "h2o+kvarn:value_bits=4:group_size=64@0.5", "think/kvarn:sinks=0"):
        assert str(Policy.parse(spec)) == spec
    assert Policy.parse("kvarn:key_bits=4:value_bits=2:group_size=128") == Policy(codec=KVarN())

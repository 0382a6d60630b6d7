"""MiniCache: what both layers of a pair read back, against the slow version, and which layers are pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.codecs.minicache import MiniCache, MiniCacheLayer
from kvpolicy.codecs.shared_directions import angle_between, interpolate, unit_vectors
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import ModelInfo, StageStore
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from tests.reference.codecs.minicache import Side, between
from tests.sampling import each_once, product

B = 2
H = 2
D = 32
SLOTS = 12
CLOSE = 1e-6
"""Of the largest number of a vector; one step of fp16 is a hundred times as large."""


class Pair:
    """Both layers of a pair beside the slow version of every row, head and side."""

    def __init__(self, *, heads: int = H, dim: int = D, **options: Any) -> None:
        self.heads = heads
        self.dim = dim
        self.codec = MiniCache(**options)
        self.stages = [MiniCacheLayer(pair=self.codec, number=number) for number in (0, 1)]
        codes = [stage.alloc(B, heads, SLOTS, dim, "cpu") for stage in self.stages]
        shared = self.stages[1].shared(codes[0])
        self.stores = tuple(StageStore(each, shared=shared) for each in codes)
        self.occupied = torch.zeros(B, heads, SLOTS, dtype=torch.bool)
        every = [(b, h, side) for b in range(B) for h in range(heads) for side in (0, 1)]
        self.slow = {at: Side(self.codec.t, self.codec.keep) for at in every}

    def write(self, slots: list[int], vectors: Tensor, masked: list[tuple[int, int, int]] | None = None) -> None:
        """Write tokens [2, 2, B, H, n, D], of layers and sides, to the same slots of every head that are empty.

        Tokens that are masked are NaN.
        """
        mask = torch.ones(B, self.heads, len(slots), dtype=torch.bool)
        for at in masked or []:
            mask[at] = False
        vectors = vectors.masked_fill(~mask[..., None], torch.nan)
        index = torch.tensor(slots).expand(B, self.heads, -1)
        keys, values = ((vectors[0, side], vectors[1, side]) for side in (0, 1))
        self.stages[1].write_group(self.stores, keys, values, index, mask, self.occupied)
        for (b, h, side), slow in self.slow.items():
            chosen = mask[b, h].nonzero().flatten().tolist()
            first, second = ([vectors[layer, side, b, h, j] for j in chosen] for layer in (0, 1))
            live = set(self.occupied[b, h].nonzero().flatten().tolist())
            slow.write([slots[j] for j in chosen], first, second, live)
        self.occupied.scatter_(-1, index, self.occupied.gather(-1, index) | mask)

    def drop(self, *slots: int) -> None:
        """Empty slots of every head."""
        self.occupied[..., list(slots)] = False

    def read(self, layer: int, side: int) -> Tensor:
        stage = self.stages[layer]
        return (stage.keys, stage.values)[side](self.stores[layer], slice(0, SLOTS))

    def check(self) -> None:
        """Compare every occupied slot, read as a range and by index, and the tokens that are stored whole."""
        for layer in (0, 1):
            for side in (0, 1):
                found = self.read(layer, side)
                order = torch.arange(SLOTS - 1, -1, -1).expand(B, self.heads, -1)
                stage = self.stages[layer]
                by_index = (stage.keys, stage.values)[side](self.stores[layer], order)
                assert torch.equal(by_index.flip(2), found)
                for b in range(B):
                    for h in range(self.heads):
                        slow = self.slow[b, h, side]
                        for slot in self.occupied[b, h].nonzero().flatten().tolist():
                            want = slow.read(layer, slot)
                            limit = CLOSE * float(want.abs().max())
                            assert (found[b, h, slot] - want).abs().max() <= limit, (layer, side, b, h, slot)
        shared = self.stores[0].codes.shared
        for side, table in ((0, shared.whole_key_slots), (1, shared.whole_value_slots)):
            for b in range(B):
                for h in range(self.heads):
                    held = [slot for slot in table[b, h].tolist() if slot >= 0]
                    assert held == self.slow[b, h, side].whole


def draw(count: int, *, heads: int = H, dim: int = D, seed: int = 0) -> Tensor:
    """Vectors of both layers, which differ by more in some tokens than in others."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(2, B, heads, count, dim, generator=generator) * torch.logspace(-1, 1, dim)
    noise = torch.randn(2, B, heads, count, dim, generator=generator) * torch.logspace(-1, 1, dim)
    share = torch.rand(2, B, heads, count, 1, generator=generator) * 1.5
    return torch.stack([one, 2 * one + share * noise])


SHARES = ([0.0, 0.3, 0.6, 1.0], [0.05, 1.0, 0.3, 0.0])


@product("t,keep", *SHARES, sample=each_once(*SHARES))
def test_both_layers_read_what_the_slow_version_reads(t: float, keep: float) -> None:
    pair = Pair(t=t, keep=keep)
    pair.write([0, 1, 2, 3, 4, 5], draw(6), [(1, 0, 0), (1, 0, 4), (1, 1, 5)])
    pair.check()
    pair.drop(1, 4)
    pair.write([1, 7, 6], draw(3, seed=1), [(0, 1, 1)])
    pair.check()
    pair.drop(0, 2, 3, 6)
    pair.write([0, 2, 3], draw(3, seed=2), [(b, 1, j) for b in range(B) for j in range(3)])
    pair.check()


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 64), (3, 5), (2, 128)])
def test_other_shapes(heads: int, dim: int) -> None:
    pair = Pair(heads=heads, dim=dim, keep=0.2)
    pair.write([3, 0, 8], draw(3, heads=heads, dim=dim))
    pair.write([1], draw(1, heads=heads, dim=dim, seed=1))
    pair.check()


def test_one_token() -> None:
    """Of one token, `ceil(keep)` is stored whole."""
    for keep, whole in ((0.0, 0), (0.05, 1)):
        pair = Pair(keep=keep)
        pair.write([5], draw(1))
        pair.check()
        assert len(pair.slow[0, 0, 0].whole) == whole


HARD: dict[str, Callable[[Tensor], Tensor]] = {
    "opposite": lambda x: -x,
    "opposite and longer": lambda x: -3 * x,
    "zero": torch.zeros_like,
    "zero in both": torch.zeros_like,
    "equal": lambda x: x,
    "almost equal": lambda x: x * (1 + 1e-3),
    "huge": lambda x: x * 1e6,
    "tiny": lambda x: x * 1e-7,
    "across": lambda x: x.flip(-1) * torch.tensor([1.0, -1.0]).repeat(D // 2),
}


@pytest.mark.parametrize("t", [0.0, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("kind", HARD)
def test_hard_pairs_of_directions(kind: str, t: float) -> None:
    """Nothing is NaN, whatever the other layer holds, in either order."""
    whole = draw(4) * (kind != "zero in both")
    for swapped in (False, True):
        pair = Pair(t=t, keep=0.0)
        both = torch.stack([whole[0], HARD[kind](whole[0])])
        pair.write([0, 1, 2, 3], both.flip(0) if swapped else both)
        for layer in (0, 1):
            assert bool(pair.read(layer, 0).isfinite().all())
        pair.check()


def test_the_angle_to_the_shared_direction_is_the_fraction_of_the_arc() -> None:
    one, other = (unit_vectors(x)[0] for x in draw(50)[:, 0])
    shared = interpolate(one, other, 0.6)
    torch.testing.assert_close(angle_between(one, shared), 0.6 * angle_between(one, other))
    torch.testing.assert_close(shared.norm(dim=-1), torch.ones(B, H, 50, dtype=torch.float64))


def test_angles_are_those_of_arc_cosines_and_small_ones_have_their_digits() -> None:
    one, other = (unit_vectors(x)[0] for x in draw(50)[:, 0])
    torch.testing.assert_close(angle_between(one, other), (one * other).sum(-1).acos())
    small = torch.tensor([[math.cos(1e-9), math.sin(1e-9)]], dtype=torch.float64)
    assert angle_between(torch.tensor([[1.0, 0.0]], dtype=torch.float64), small).item() == pytest.approx(1e-9)


def test_of_equal_angles_the_first_ones_are_stored_whole() -> None:
    """All angles are equal: those that are stored whole stay, and then the tokens that are written first."""
    both = torch.zeros(2, 2, B, H, 4, 2)
    both[0, ..., 0] = 1
    both[1, ..., 1] = 1
    pair = Pair(dim=2, keep=0.5)
    pair.write([7, 2, 9, 4], both)
    assert pair.stores[0].codes.shared.whole_key_slots[0, 0].tolist() == [7, 2, -1, -1, -1, -1]
    pair.write([1, 3, 5, 6], both)
    assert pair.stores[0].codes.shared.whole_key_slots[0, 0].tolist() == [7, 2, 1, 3, -1, -1]
    pair.check()


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float16, 0.01), (torch.bfloat16, 0.01)])
def test_scores_and_sums_are_those_of_what_is_read(dtype: torch.dtype, near: float) -> None:
    pair = Pair(keep=0.3)
    pair.write([*range(SLOTS)], draw(SLOTS))
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(B, H, 3, D, generator=generator).to(dtype)
    weights = torch.rand(B, H, 3, SLOTS, generator=generator).to(dtype)
    for layer, stage in enumerate(pair.stages):
        scores = stage.score(pair.stores[layer], queries, None)
        sums = stage.mix(pair.stores[layer], weights)
        wanted = queries.float() @ pair.read(layer, 0).mT, weights.float() @ pair.read(layer, 1)
        for found, want in zip((scores, sums), wanted, strict=True):
            assert found.dtype == torch.float32 and (found - want).norm() <= near * want.norm()


def test_the_second_layer_reads_a_first_one_that_has_grown() -> None:
    """In a prompt behind another, the first layer has its new slots before the second one."""
    pair = Pair(keep=0.3)
    pair.write([*range(SLOTS)], draw(SLOTS))
    before = pair.read(1, 0)
    grown = pair.stages[0].alloc(B, H, 2 * SLOTS, D, "cpu")
    for target, source in zip(tensors(grown), tensors(pair.stores[0].codes), strict=True):
        target[:, :, : source.shape[2]] = source
    store = pair.stores[1]._replace(shared=grown.shared)
    assert torch.equal(pair.stages[1].keys(store, slice(0, SLOTS)), before)
    queries = torch.randn(B, H, 3, D)
    want = pair.stages[1].score(pair.stores[1], queries, None)
    assert torch.equal(pair.stages[1].score(store, queries, None), want)


def test_a_write_compiles_whole() -> None:
    both = draw(3)
    slots = torch.tensor([4, 0, 2]).expand(B, H, -1)
    mask = torch.ones(B, H, 3, dtype=torch.bool)
    fast = Pair(keep=0.3)
    slow = Pair(keep=0.3)
    for pair in (fast, slow):
        pair.write([5, 6], draw(2, seed=1))
        keys, values = ((both[0, side], both[1, side]) for side in (0, 1))
        write = pair.stages[0].write_group
        if pair is fast:
            write = torch.compile(write, fullgraph=True, backend="eager")
        write(pair.stores, keys, values, slots, mask, pair.occupied)
    for one, other in zip(tensors(fast.stores[0].codes), tensors(slow.stores[0].codes), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("start", "layers", "depth", "pairs"),
    [
        (0.5, range(8), 8, ((4, 5), (6, 7))),
        (0.5, range(7), 7, ((3, 4), (5, 6))),
        (0, range(5), 5, ((0, 1), (2, 3))),
        (0.0, range(4), 4, ((0, 1), (2, 3))),
        (6, range(8), 8, ((6, 7),)),
        (0.5, (1, 3, 5, 7, 9, 11), 12, ((7, 9),)),
    ],
)
def test_pairs(start: float, layers: range, depth: int, pairs: tuple[tuple[int, int], ...]) -> None:
    assert MiniCache(start=start).pairs(tuple(layers), depth) == pairs
    model = ModelInfo(layers=len(layers), heads=1, head_dim=8, evictable=tuple(layers), total=depth)
    assert MiniCache(start=start).groups(model) == pairs


@pytest.mark.parametrize("start", [7, 8, 1.0])
def test_a_model_without_a_pair_is_refused(start: float) -> None:
    with pytest.raises(KVPolicyError, match=r"start must leave two layers .* got .*; try 0\."):
        MiniCache(start=start).check(ModelInfo(layers=8, heads=1, head_dim=8))


@pytest.mark.parametrize("start", [True, "half"])
def test_a_start_of_another_type_is_refused(start: Any) -> None:
    with pytest.raises(KVPolicyTypeError, match=r"^MiniCache\.start must be .*, got .*; try .*\."):
        MiniCache(start=start)


def test_bytes_of_a_pair() -> None:
    """4 D of directions and 8 of norms, and for each token that is stored whole 8 D and the slots of two tables."""
    slots = 1000
    dim = 128
    codes = [MiniCacheLayer(pair=MiniCache(), number=number).alloc(1, 1, slots, dim, "meta") for number in (0, 1)]
    found = sum(t.nbytes for each in codes for t in tensors(each))
    assert found == slots * (4 * dim + 8) + 50 * (8 * dim + 8)
    assert found / (2 * slots * 4 * dim) == pytest.approx(0.5582, abs=1e-4)


def test_nothing_to_write() -> None:
    pair = Pair()
    before = [map_state(torch.clone, store.codes) for store in pair.stores]
    pair.write([], torch.zeros(2, 2, B, H, 0, D))
    for store, old in zip(pair.stores, before, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(tensors(store.codes), tensors(old), strict=True))


def test_the_slow_version_has_no_direction_between_opposite_ones_at_the_middle() -> None:
    assert between([1.0, 0.0], [-1.0, 0.0], 0.5) == [1.0, 0.0]

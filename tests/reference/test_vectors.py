"""Choices and budgets of the reference versions against numbers that the methods' authors recorded."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from . import allocators, selectors
from .allocators.pyramid import pyramid
from .allocators.squeeze import squeeze, top_group
from .selectors import kvcrush

# ---- KVCrush: the unit tests of OpenVINO GenAI, where a bit per token of a block stands for our bit per head


def test_half_of_twenty_tokens_are_marked() -> None:
    marked = kvcrush.bits([(j % 10) / 10 for j in range(20)], 0.5)
    assert [j for j, bit in enumerate(marked) if bit] == [*range(5, 10), *range(15, 20)]


def test_the_quantile_is_read_as_written() -> None:
    assert sum(kvcrush.bits([float(j) for j in range(10)], 0.9)) == 1  # 10 * (1 - 0.9) is 0.99... in floats


def test_fixed_anchors() -> None:
    rows = [[0]] * 4
    assert kvcrush.anchor("zeros", rows, 42, 0) == [0, 0, 0, 0]
    assert kvcrush.anchor("ones", rows, 42, 0) == [1, 1, 1, 1]
    assert kvcrush.anchor("alternate", rows, 42, 0) == [0, 1, 0, 1]


def test_random_anchors() -> None:
    drawn = [kvcrush.anchor("random", [[0]] * 32, seed, 0) for seed in range(5)]
    assert all(set(bits) == {0, 1} and len(bits) == 32 for bits in drawn)
    assert len({tuple(bits) for bits in drawn}) > 1
    assert drawn[1] == kvcrush.anchor("random", [[0]] * 32, 1, 0)
    assert drawn[1] != kvcrush.anchor("random", [[0]] * 32, 1, 1)


def _columns(blocks: list[str]) -> list[list[int]]:
    """Blocks of bits as one row per place in the block."""
    return [[int(block[place]) for block in blocks] for place in range(len(blocks[0]))]


def test_mean_anchor() -> None:
    assert kvcrush.anchor("mean", _columns(["1010", "1100", "1110", "0010", "0000"]), 42, 0) == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("blocks", "anchor", "expected"),
    [
        (["1010"] * 3, "0101", [4, 4, 4]),
        (["0101"] * 3, "0101", [0, 0, 0]),
        (["1111"] * 3, "0000", [4, 4, 4]),
        (["0000"] * 3, "1111", [4, 4, 4]),
        (["1010", "0101", "1100"], "1010", [0, 4, 2]),
    ],
)
def test_hamming_distances(blocks: list[str], anchor: str, expected: list[int]) -> None:
    rows = [dict(enumerate(row)) for row in _columns(blocks)]
    assert kvcrush.distances(rows, [int(bit) for bit in anchor]) == dict(enumerate(expected))


def test_a_head_that_dropped_a_token_has_a_zero_for_it() -> None:
    assert kvcrush.distances([{0: 1, 5: 1, 6: 0}, {5: 1, 6: 1}], [1, 0]) == {0: 0, 5: 1, 6: 2}


def _picked(eligible: list[int], k: int, **how: Any) -> list[int]:
    candidates = [kvcrush.Candidate(distance=i, position=i, priority=0.0) for i in eligible]
    options: dict[str, Any] = {"buckets": "rank", "pick": "first", "seed": 0, **how}
    return kvcrush.pick_candidates(candidates, k, **options)


@pytest.mark.parametrize(
    ("eligible", "k", "expected"),
    [([0, 1, 2, 3], 2, [0, 2]), ([0, 1, 2, 3], 4, [0, 1, 2, 3]), ([1, 3], 2, [1, 3]), ([2, 3], 5, [2, 3])],
)
def test_representatives(eligible: list[int], k: int, expected: list[int]) -> None:
    assert _picked(eligible, k) == expected


def test_ranks_reach_the_far_end() -> None:
    """OpenVINO's whole-number stride keeps ranks 0 to 3 of seven here, the four nearest to the anchor."""
    assert _picked(list(range(7)), 4) == [0, 1, 3, 5]


def test_distance_buckets_share_by_size() -> None:
    assert kvcrush.quotas([5, 3, 2], 4) == [2, 1, 1]  # 2.0, 1.2, 0.8
    assert kvcrush.quotas([1, 1, 2], 2) == [1, 0, 1]  # 0.5, 0.5, 1.0: a tie goes to the smaller distance
    assert kvcrush.quotas([2, 2], 4) == [2, 2]


EVICTIONS = [
    (10, {28, 10, 11}, {28, 10, 11}),
    (10, {18, 8, 31}, {18, 8, 31}),
    (6, {15, 36, 13, 10}, {10, 13}),
    (6, {9, 39, 31, 11}, {9, 11}),
    (22, set(), {8, 9, 10, 11, 12, 13}),
    (22, {30, 22}, {8, 9, 10, 11, 22, 30}),
    (22, {0, 2, 7, 24, 31, 49}, {8, 9, 10, 11, 24, 31}),
    (22, {5, 19, 27, 39, 50, 52}, {8, 9, 10, 19, 27, 39}),
]


def _evicted_pages(over: int, zeros: set[int], extra: int) -> set[int]:
    """Pages of 4 evicted from 192 + `over` tokens, start and recent 32, scores 1 but for the `zeros`.

    OpenVINO evicts the earlier of two equal blocks and we the later, hence scores that rise a little.
    """
    tokens = 192 + over
    limit = 192 + 4 * extra
    worth = [float(j // 4 not in zeros) + 1e-6 * j for j in range(tokens)]
    worth = [float("inf") if j < 32 or j >= tokens - 32 else x for j, x in enumerate(worth)]
    config = selectors.complete({"name": "kvcrush", "page": 4, "split": Fraction(4 * extra, limit)})
    apart = [random.Random(j).randrange(5) for j in range(tokens)]
    strong, standing = kvcrush.keep_tokens(config, list(range(tokens)), worth, dict(enumerate(apart)), limit)
    return {j // 4 for j in range(tokens)} - {j // 4 for j in [*strong, *standing]}


@pytest.mark.parametrize(("over", "zeros", "expected"), EVICTIONS)
def test_page_eviction(over: int, zeros: set[int], expected: set[int]) -> None:
    assert _evicted_pages(over, zeros, extra=0) == expected


@pytest.mark.parametrize(("over", "zeros", "expected"), EVICTIONS)
def test_page_representatives_spare_exactly_two(over: int, zeros: set[int], expected: set[int]) -> None:
    spared = _evicted_pages(over, zeros, extra=2)
    assert spared < expected
    assert len(spared) == len(expected) - 2


# ---- SqueezeAttention: the README's pairs, and k-means


def test_squeeze_readme_mistral() -> None:
    """32 layers, 0.21 and 0.08 of 8000 tokens, 20 layers in the top group: windows of 3413 and 640."""
    cosines = [0.1] * 6 + [0.5] * 6 + [0.9] * 20
    got = squeeze(cosines, 32 * 1680, floor=1, ceiling=10**6, share=0.08 / 0.21)
    assert got == [3414] * 4 + [3413] * 8 + [640] * 20  # the authors truncate and lose 4 tokens
    assert Fraction(3413) / 8000 == pytest.approx(0.4267, abs=1e-4)


def test_squeeze_readme_llama() -> None:
    """0.40 and 0.25 of the prompt: share 0.625."""
    cosines = [0.1] * 4 + [0.5] * 4 + [0.9] * 24
    got = squeeze(cosines, 32 * 3200, floor=1, ceiling=10**6, share=0.25 / 0.40)
    assert got == [6800] * 8 + [2000] * 24


@pytest.mark.parametrize("cosines", [[0.5, 0.9], [0.7] * 8, [0.7] * 4 + [0.9] * 4, [0.7, 0.9, 0.9 + 1e-7]])
def test_squeeze_of_nothing_to_tell_apart_is_even(cosines: list[float]) -> None:
    layers = len(cosines)
    assert squeeze(cosines, 10 * layers, 1, 100) == [10] * layers


def test_squeeze_ties_take_the_largest_top_group() -> None:
    assert top_group([0.25, 0.5, 0.75, 1.0], 3) == {2, 3}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_kmeans_against_sklearn(seed: int, groups: int) -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    generator = torch.Generator().manual_seed(seed)
    centers = torch.arange(groups) * 0.2 + 0.2
    sizes = torch.randint(2, 7, (groups,), generator=generator).tolist()
    values = torch.cat([c + 0.02 * torch.randn(n, generator=generator) for c, n in zip(centers, sizes, strict=True)])
    values = values[torch.randperm(len(values), generator=generator)]
    fit = cluster.KMeans(n_clusters=groups, n_init=20, random_state=0).fit(values[:, None].double().numpy())
    highest = fit.cluster_centers_[:, 0].argmax()
    expected = {i for i, label in enumerate(fit.labels_) if label == highest}
    assert top_group(values.tolist(), groups) == expected


# ---- PyramidKV: the published schedule overshoots, ours sums exactly


def _published_pyramid(capacity: int, window: int, layers: int, beta: int = 20) -> list[int]:
    base = capacity - window
    least = base // beta
    most = 2 * base - least
    step = (most - least) // (layers - 1)
    return [most - i * step + window for i in range(layers)]


@pytest.mark.parametrize(
    ("capacity", "window", "layers", "mean"), [(128, 8, 32, 133.5), (128, 64, 32, 142.5), (96, 32, 80, 117.5)]
)
def test_pyramid_sums_exactly(capacity: int, window: int, layers: int, mean: float) -> None:
    published = _published_pyramid(capacity, window, layers)
    assert sum(published) / layers == mean
    ours = pyramid(capacity * layers, layers, floor=1, ceiling=10**6)
    assert sum(ours) == capacity * layers
    assert ours == sorted(ours, reverse=True)


def test_published_pyramid_last_layer() -> None:
    assert _published_pyramid(128, 8, 32)[-1] == 25


# ---- waterfill


@pytest.mark.parametrize(
    ("targets", "total", "floor", "ceiling", "expected"),
    [
        ([1, 1, 1], 10, 0, 100, [4, 3, 3]),  # ties to the lower layer
        ([8, 1, 1], 10, 0, 4, [4, 3, 3]),  # the surplus goes on in proportion
        ([98, 1, 1], 100, 5, 100, [90, 5, 5]),  # and so does what the floors take
        ([1, 2, 3], 12, 1, 3, [4, 4, 4]),  # above L * ceiling: even surplus on top
        ([1, 2, 3], 11, 1, 3, [4, 4, 3]),
        ([5, 0, 0], 9, 0, 3, [3, 3, 3]),
        ([8, 0, 0], 8, 0, 5, [5, 2, 1]),  # no target left to go by: evenly
        ([100, 1, 1], 10, 3, 6, [4, 3, 3]),  # ceilings alone would leave too little for the floors
    ],
)
def test_waterfill(targets: list[int], total: int, floor: int, ceiling: int, expected: list[int]) -> None:
    assert allocators.waterfill(targets, total, floor, ceiling) == expected


def test_waterfill_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 12"):
        allocators.waterfill([1, 1, 1], 11, 4, 10)


@pytest.mark.parametrize("seed", range(200))
def test_waterfill_keeps_its_promises(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 8)
    floor = draw.randint(0, 6)
    ceiling = floor + draw.randint(0, 12)
    total = draw.randint(layers * floor, layers * ceiling + 5)
    got = allocators.waterfill([draw.choice([0, 1, 5, 100]) for _ in range(layers)], total, floor, ceiling)
    assert sum(got) == total
    assert min(got) >= floor
    assert max(got) <= ceiling or total > layers * ceiling


def test_base_budget() -> None:
    assert allocators.base_budget(0.29, 100) == 29  # 28.99... in floats
    assert allocators.base_budget(0.001, 100) == 1
    assert allocators.base_budget(7, 100) == 7
    with pytest.raises(ValueError, match=r"at least 0\.05"):
        allocators.base_budget(0.01, 100, floor=5)

"""Filters and centers are those of the definition, for the queries that the projections of the model give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.calibration import calibrate_qfilters, calibrate_triattention, query_centers, query_filters
from kvpolicy.calibration.qfilters import sample_queries
from kvpolicy.selectors.center_files import CENTER_FILES
from kvpolicy.selectors.filter_files import FILTER_FILES
from tests.calibration.test_heads import THETA, gemma, llama, projected, qwen, windows

Vectors = list[list[float]]


def slow_filter(group: list[Vectors]) -> list[float]:
    """The filter of a KV head from the queries of each of its query heads.

    The main direction is the eigenvector of the largest eigenvalue of the sum of outer products.
    """
    filters: list[list[float]] = []
    for queries in group:
        channels = range(len(queries[0]))
        sums = [[sum(query[a] * query[b] for query in queries) for b in channels] for a in channels]
        direction = np.linalg.eigh(np.array(sums))[1][:, -1].tolist()
        products = [sum(a * b for a, b in zip(query, direction, strict=True)) for query in queries]
        positive = sum(product > 0 for product in products)
        sign = 1 if positive > len(products) - positive else -1
        filters.append([-sign * number for number in direction])
    return [sum(column) / len(filters) for column in zip(*filters, strict=True)]


def rotate(vectors: Vectors) -> Vectors:
    """Vectors of the positions 0, 1 and so on, with their rotary embedding in halves."""
    half = len(vectors[0]) // 2
    rotated: Vectors = []
    for position, vector in enumerate(vectors):
        turns = [complex(vector[i], vector[i + half]) for i in range(half)]
        turns = [turn * np.exp(1j * position * THETA ** (-i / half)) for i, turn in enumerate(turns)]
        rotated.append([turn.real for turn in turns] + [turn.imag for turn in turns])
    return rotated


@pytest.mark.parametrize("make", [llama, qwen, gemma])
def test_filters_are_those_of_the_definition(make: Callable[[], Any]) -> None:
    model = make()
    texts = [windows(1, 9)[0], windows(1, 14)[0]]
    found = sample_queries(model, texts, tokens=28)
    assert sorted(found) == ([1] if make is gemma else [0, 1])
    every = [projected(model, ids) for ids in texts]
    for layer, queries in found.items():
        expected = [[vector for each in every for vector in rotate(each[layer][0][head].tolist())] for head in range(4)]
        torch.testing.assert_close(queries.double(), torch.tensor(expected).double(), atol=1e-5, rtol=1e-5)
        slow = [slow_filter(expected[2 * head : 2 * head + 2]) for head in range(2)]
        torch.testing.assert_close(query_filters(queries, 2).double(), torch.tensor(slow).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("count", "dim"), [(40, 8), (200, 3), (5, 8), (1, 4)])
def test_more_or_fewer_queries_than_channels(count: int, dim: int) -> None:
    queries = torch.randn(6, count, dim, generator=torch.Generator().manual_seed(count)) + 0.5
    slow = [slow_filter(queries[3 * head : 3 * head + 3].tolist()) for head in range(2)]
    torch.testing.assert_close(query_filters(queries, 2), torch.tensor(slow), atol=1e-4, rtol=1e-4)


def test_most_queries_decide_the_sign_and_a_tie_their_sum() -> None:
    filters = [
        query_filters(torch.tensor(numbers)[None, :, None], 1).item()
        for numbers in ([1.0, 1.0, -5.0], [-1.0, -1.0, 5.0], [1.0, -5.0], [-1.0, 5.0], [0.0, 0.0])
    ]
    assert filters == [-1.0, 1.0, 1.0, -1.0, 0.0]


def test_query_heads_that_disagree_make_a_short_filter() -> None:
    along = torch.tensor([[2.0, 0.0]] * 3)
    across = torch.tensor([[0.0, 3.0]] * 3)
    assert query_filters(torch.stack([along, across]), 1).tolist() == [[-0.5, -0.5]]
    assert query_filters(torch.stack([along, -along]), 1).abs().tolist() == [[0.0, 0.0]]


def test_the_same_tokens_are_drawn_in_all_layers() -> None:
    model = llama()
    texts = windows(2, 30)
    whole = sample_queries(model, texts, tokens=60)
    some = sample_queries(model, texts, tokens=20, seed=3)
    places = [places_of(whole[layer][head], some[layer][head]) for layer in (0, 1) for head in range(4)]
    assert all(each == places[0] for each in places) and places[0] == sorted(places[0])
    assert sum(place < 30 for place in places[0]) == 10 and len({*places[0]}) == 20
    assert places_of(whole[0][0], sample_queries(model, texts, tokens=20, seed=4)[0][0]) != places[0]


def places_of(whole: Tensor, some: Tensor) -> list[int]:
    """Where vectors [n, D] stand among all [N, D]."""
    return torch.cdist(some.double(), whole.double()).argmin(-1).tolist()


def test_a_file_is_written_for_the_model(tmp_path: Path) -> None:
    model = gemma()
    texts = windows(2, 70)
    path = tmp_path / "filters.safetensors"
    written = calibrate_qfilters(model.train(), texts, path, tokens=130)
    found = FILTER_FILES.load(str(path))
    assert model.training and (found.model, found.made) == (written.model, written.made)
    assert [*found.filters] == [1], "no filters of the sliding layer"
    queries = sample_queries(model.eval(), texts, tokens=130)
    assert torch.equal(found.filters[1], query_filters(queries[1], 2)) and torch.equal(
        found.filters[1], written.filters[1]
    )
    kvpolicy.attach(model, f"qfilters:file={path}@0.5").detach()
    with pytest.raises(kvpolicy.KVPolicyError, match=r"made for another model \(gemma2"):
        kvpolicy.attach(llama(), f"qfilters:file={path}@0.5")


@pytest.mark.parametrize("make", [llama, qwen, gemma])
def test_centers_are_means_of_projected_queries(make: Callable[[], Any]) -> None:
    model = make()
    texts = [windows(1, 9)[0], windows(1, 14)[0]]
    found = query_centers(model, texts)
    assert sorted(found) == ([1] if make is gemma else [0, 1])
    every = [projected(model, ids) for ids in texts]
    for layer, centers in found.items():
        queries = torch.cat([each[layer][0] for each in every], 1).double()  # [Hq, n, D]
        torch.testing.assert_close(centers.mean.double(), queries.mean(1), atol=1e-5, rtol=1e-5)
        first, second = queries.chunk(2, -1)
        torch.testing.assert_close(centers.lengths.double(), first.hypot(second).mean(1), atol=1e-5, rtol=1e-5)


def expected_scores(centers: Any, keys: Tensor, length: int, heads: int) -> Tensor:
    """By complex numbers and the cosine of every distance, [H, N], of keys [H, N, D] without their rotation."""
    half = keys.shape[-1] // 2
    omega = THETA ** (-np.arange(half) / half)
    scores = np.zeros((heads, keys.shape[1]))
    for head in range(heads):
        rows = []
        for hq in range(2 * head, 2 * head + 2):
            mean = centers.mean[hq].double().numpy()
            middle = mean[:half] + 1j * mean[half:]
            row = []
            for position, key in enumerate(keys[head].double().numpy()):
                other = key[:half] + 1j * key[half:]
                relative = middle * other.conj()
                ahead = length - position + 2.0 ** np.arange(17)
                phase = ahead[:, None] * omega + np.angle(relative)
                trigonometric = (np.abs(relative) * np.cos(phase)).sum(1).mean()
                row.append(trigonometric + ((centers.lengths[hq].numpy() - np.abs(middle)) * np.abs(other)).sum())
            rows.append(row)
        scores[head] = np.max(rows, 0)
    return torch.from_numpy(scores)


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("generated", [False, True])
def test_kept_tokens_of_a_padded_batch(make: Callable[[], Any], generated: bool, tmp_path: Path) -> None:
    """Where the model counts padding as positions, since it gets none, and where it does not."""
    model = make()
    length = 40
    file = str(tmp_path / "centers.safetensors")
    calibrate_triattention(model, [windows(1, 140)[0]], file)
    ids = torch.stack([windows(1, length)[0], windows(2, length)[1]])
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, :7] = 0
    how = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if generated else {}
    with torch.no_grad(), kvpolicy.attach(model, f"triattention:file={file}@12"):
        cache = kvpolicy.PolicyCache(model, prompt=mask.sum(1), new=4)
        model(ids, attention_mask=mask, cache=cache, **how)
    for row, first in ((0, 0), (1, 7)):
        own = ids[row, first:]
        for index, layer in enumerate(cache.policy_layers):
            keys = projected(model, own)[index][1]
            scores = expected_scores(CENTER_FILES.load(file).centers[index], keys, len(own), 2)
            scores[:, -1] = torch.inf
            kept = layer.store.tensors.positions[row].sort(-1).values
            want = scores.topk(12, dim=-1).indices.sort(-1).values
            assert kept.tolist() == want.tolist(), (row, index)

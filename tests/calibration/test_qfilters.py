"""Filters are those of the definition, for the queries that the model's own projections and rotation give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM

import kvpolicy
from kvpolicy.calibration import calibrate_qfilters, query_filters
from kvpolicy.calibration.qfilters import sample_queries
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
    places = [_places(whole[layer][head], some[layer][head]) for layer in (0, 1) for head in range(4)]
    assert all(each == places[0] for each in places) and places[0] == sorted(places[0])
    assert sum(place < 30 for place in places[0]) == 10 and len({*places[0]}) == 20
    assert _places(whole[0][0], sample_queries(model, texts, tokens=20, seed=4)[0][0]) != places[0]


def _places(whole: Tensor, some: Tensor) -> list[int]:
    """Where vectors [n, D] stand among all [N, D]."""
    return torch.cdist(some.double(), whole.double()).argmin(-1).tolist()


def test_a_model_with_an_attention_of_its_own() -> None:
    config = FalconConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=40,
        alibi=False,
        num_kv_heads=2,
        new_decoder_architecture=True,
    )
    found = sample_queries(FalconForCausalLM(config).eval(), windows(1))
    assert [queries.shape for queries in found.values()] == [(4, 12, 8)] * 2


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

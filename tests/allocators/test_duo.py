"""DuoAttention: which heads stream, and how a layer's pages are divided."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvpolicy
from kvpolicy.allocators.duo import DuoAttention, _lowest
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.protocols import HeadRequest, View
from tests.reference.head_allocators import duo


def written(path: Path, scores: list[list[float]]) -> str:
    HEAD_FILES.save(path, HeadFile(tuple(map(tuple, scores)), sinks=2, recent=6))
    return str(path)


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.25, 0.29, 0.5, 0.75, 0.99, 1.0])
def test_streaming_heads_are_those_below_the_quantile(sparsity: float) -> None:
    dice = np.random.default_rng(3)
    scores = dice.random((5, 3))
    found = np.array(_lowest(tuple(map(tuple, scores.tolist())), sparsity))
    threshold = {0.0: -1.0, 1.0: 2.0}.get(sparsity, np.quantile(scores, sparsity))
    assert (found == (scores < threshold)).all(), "as in the authors' code, without noise"
    for tied in (np.round(scores, 1), np.zeros((2, 4)), np.ones((1, 1))):
        rows = tied.tolist()
        assert [list(row) for row in _lowest(tuple(map(tuple, rows)), sparsity)] == duo.streams(rows, sparsity)


def test_a_quantile_that_is_a_score_is_not_rounded_up() -> None:
    """0.28 * 25 is 7, and slightly more in floating point: the quantile is the score of rank 7, and 7 are below it."""
    scores = tuple(number / 26 for number in range(26))
    assert _lowest((scores[:13], scores[13:]), 0.28) == ((True,) * 7 + (False,) * 6, (False,) * 13)


def test_of_equal_scores_the_first_heads_retrieve() -> None:
    assert _lowest(((0.5, 0.5), (0.5, 0.5)), 0.5) == ((False, False), (True, True))


def test_every_layer_is_divided_as_by_the_slow_version(tmp_path: Path) -> None:
    dice = random.Random(5)
    for case in range(60):
        heads = dice.choice([1, 2, 3, 8])
        scores = [[dice.choice([0.1, 0.2, 0.2, 0.7]) for _ in range(heads)] for _ in range(3)]
        sizes: dict[str, Any] = {
            "sparsity": dice.choice([0.0, 0.3, 0.5, 1.0]),
            "sinks": dice.choice([0, 4]),
            "recent": dice.choice([1, 30, 500]),
        }
        pages = [heads * dice.randint(1, 20) + dice.randrange(heads) for _ in range(2)]
        size = [dice.choice([4, 8]) for _ in pages]
        most = [max(count // heads, dice.randint(1, 40)) for count in pages]
        protected = dice.choice([0, 3, 17])
        layer = dice.randrange(3)
        priority = torch.rand(2, heads, 30)
        priority[..., 30 - protected :] = torch.inf
        view = View(torch.arange(30).expand(2, heads, -1), torch.tensor([30, 30]), torch.tensor([9, 9]), layer)
        request = HeadRequest(priority, view, *(torch.tensor(column) for column in (pages, size, most)))
        found = DuoAttention(file=written(tmp_path / f"{case}", scores), **sizes).divide(request)
        config = {"scores": scores, "layer": layer, **sizes}
        rows = zip(pages, size, most, strict=True)
        assert found.tolist() == [duo.pages(config, protected, *row) for row in rows]
        assert found.sum(-1).tolist() == pages and int(found.min()) >= 1


def test_sizes_are_those_of_the_file_unless_given(tmp_path: Path) -> None:
    view = View(torch.arange(9).expand(1, 2, -1), torch.tensor([9]), torch.tensor([8]), 0)
    request = HeadRequest(torch.rand(1, 2, 9), view, *(torch.tensor([n]) for n in (12, 4, 100)))
    path = written(tmp_path / "heads.json", [[0.2, 0.8]])
    assert DuoAttention(file=path).divide(request).tolist() == [[2, 10]]  # 2 + 6 tokens
    assert DuoAttention(file=path, recent=9).divide(request).tolist() == [[3, 9]]
    assert DuoAttention(file=path, sinks=0, recent=1).divide(request).tolist() == [[1, 11]]
    HEAD_FILES.save(path, HeadFile(((0.2, 0.8),)))
    assert DuoAttention(file=path).divide(request).tolist() == [[6, 6]]  # 64 + 256 tokens are more than there are


def test_streaming_heads_keep_sinks_and_recent_tokens() -> None:
    model = kvpolicy.tiny()[0]
    with torch.no_grad(), kvpolicy.attach(model, "uniform/duo+streaming@0.4") as handle:
        out = model(torch.arange(5, 205)[None])
        model(torch.tensor([[7]]), cache=out.cache)
    assert handle.cache is not None and handle.plan is not None
    assert handle.cache.nbytes == handle.plan.nbytes
    streams = DuoAttention().streaming_heads(4)
    layer = next(layer for layer, row in enumerate(streams) if 0 < sum(row) < 4)
    held: Any = handle.cache.layers[layer]
    kept = [set(head[head >= 0].tolist()) for head in held.head_positions[0]]
    for head, positions in enumerate(kept):
        if streams[layer][head]:  # as in the file of the embedded model
            assert positions == {*range(4), *range(201 - 28, 201)}
        else:
            assert len(positions) > 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("sparsity=1.5", "DuoAttention.sparsity must be between 0 and 1, got 1.5; try 0.5."),
        ("sinks=-1", "DuoAttention.sinks must be at least 0"),
        ("recent=0", "DuoAttention.recent must be at least 1"),
        ("file=", "DuoAttention.file must be a file or 'tiny', got an empty string; try 'tiny'."),
    ],
)
def test_wrong_options(options: str, message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        kvpolicy.Policy.parse(f"uniform/duo:{options}+streaming@0.5")

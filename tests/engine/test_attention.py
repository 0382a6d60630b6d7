"""Attention of a prompt: every way to compute it gives what the equations say."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention import attend
from kvpolicy.engine.columns import ExactColumns, attend_columns
from kvpolicy.statistics.channel_sums import largest_queries
from kvpolicy.statistics.windows import Past, ScoreTransform

HEADS = 2
GROUP = 3
DIM = 8
PADDINGS = {
    "left": ["001111", "111111", "000001"],
    "right": ["111100", "111111", "100000"],
    "both": ["011110", "011110", "001100"],
    "between": ["101101", "110011", "011111"],
    "every other row": ["001111", "000000", "001111"],
    "empty row": ["000000", "001111", "000000"],
    "nothing": ["000000", "000000", "000000"],
    "everything": ["111111", "111111", "111111"],
    "one token": ["0", "1", "1"],
}


def _expected(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, transform: ScoreTransform) -> tuple[Tensor, Tensor]:
    """The output and the summed weights, query by query."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    total = torch.zeros(*q.shape[:3], dtype=torch.float64)
    for row in range(len(q)):
        for head in range(q.shape[1]):
            for at in range(q.shape[2]):
                seen = [column for column in range(at + 1) if valid[row, column]]
                if not valid[row, at]:
                    continue
                scores = [float(q[row, head, at].double() @ k[row, head // GROUP, j].double()) for j in seen]
                scores = [score * transform.scale for score in scores]
                if transform.softcap is not None:
                    scores = [transform.softcap * math.tanh(score / transform.softcap) for score in scores]
                sink = [] if transform.sinks is None else [float(transform.sinks[head])]
                weights = torch.tensor([*scores, *sink], dtype=torch.float64).softmax(0)
                for weight, column in zip(weights, seen, strict=False):
                    out[row, head, at] += weight * v[row, head // GROUP, column].double()
                    total[row, head, column] += weight
    return out, total


def _tensors(size: int, rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(size)
    q = torch.randn(rows, size, HEADS * GROUP, DIM).transpose(1, 2)
    k, v = (torch.randn(rows, size, HEADS, DIM).transpose(1, 2) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("name", PADDINGS)
def test_prompts_with_padding(name: str) -> None:
    valid = torch.tensor([[mark == "1" for mark in row] for row in PADDINGS[name]])
    q, k, v = _tensors(valid.shape[1])
    transform = ScoreTransform(0.3)
    expected, expected_total = _expected(q, k, v, valid, transform)
    for sum_weights in (False, True):
        out, total = attend(q, k, v, transform, None, valid, sum_weights)
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
        if total is not None:
            torch.testing.assert_close(total.double(), expected_total, atol=1e-6, rtol=1e-5)
        assert (total is not None) == sum_weights


@pytest.mark.parametrize("held", [0, 3])
def test_several_tiles_are_those_of_one(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding at any place, in the first tile and in later ones; slots before the prompt are seen by all of them."""
    monkeypatch.setattr("kvpolicy.engine.attention.TILE_ELEMENTS", 1)  # tiles of 16 queries
    size = 37
    q, k, v = _tensors(held + size)
    valid = torch.rand(3, held + size, generator=torch.Generator().manual_seed(0)) < 0.7
    valid[1, held + 16 :] = False
    transform = ScoreTransform(0.3)
    past = Past(k[:, :, :held], v[:, :, :held], valid[:, None, :held].expand(-1, HEADS, -1)) if held else None
    own = slice(held, None)
    out, total = attend(q[:, :, own], k[:, :, own], v[:, :, own], transform, past, valid[:, own], True)
    # Queries of the slots have no part in the sums.
    expected, sums = _expected(q, k, v, valid, transform)
    _, before = _expected(q[:, :, :held], k[:, :, :held], v[:, :, :held], valid[:, :held], transform)
    sums = sums - F.pad(before, (0, size))
    torch.testing.assert_close(out.double(), expected[:, :, own], atol=1e-6, rtol=1e-5)
    assert total is not None
    torch.testing.assert_close(total.double(), sums, atol=1e-6, rtol=1e-5)


def test_the_largest_queries_are_those_of_tokens() -> None:
    q = torch.tensor([[[[1.0], [-5], [9]], [[2], [3], [-99]]], [[[4], [0], [0]], [[-6], [7], [8]]]])
    assert largest_queries(q, 1, None).tolist() == [[[99]], [[8]]]
    valid = torch.tensor([[True, True, False], [False, False, False]])
    assert largest_queries(q, 1, valid).tolist() == [[[5]], [[0]]]
    assert largest_queries(q, 2, valid).tolist() == [[[5], [3]], [[0], [0]]]


@pytest.mark.parametrize("transform", [ScoreTransform(1.0, softcap=2.0), ScoreTransform(0.5, sinks=torch.arange(6.0))])
def test_caps_and_sinks(transform: ScoreTransform) -> None:
    valid = torch.tensor([[mark == "1" for mark in row] for row in PADDINGS["between"]])
    q, k, v = _tensors(valid.shape[1])
    out, _ = attend(q, k, v, transform, None, valid, False)
    torch.testing.assert_close(out.double(), _expected(q, k, v, valid, transform)[0], atol=1e-6, rtol=1e-5)


def test_a_row_gets_the_output_that_it_gets_alone() -> None:
    valid = torch.tensor([[mark == "1" for mark in row] for row in PADDINGS["left"]])
    q, k, v = _tensors(valid.shape[1])
    together, _ = attend(q, k, v, ScoreTransform(0.3), None, valid, False)
    for row, mask in enumerate(valid):
        own_q, own_k, own_v = (t[row : row + 1, :, mask] for t in (q, k, v))
        alone, _ = attend(own_q, own_k, own_v, ScoreTransform(0.3), None, None, False)
        assert torch.equal(together[row : row + 1, :, mask], alone)


def test_a_compiled_graph_gives_the_same_output_and_gradients() -> None:
    valid = torch.tensor([[mark == "1" for mark in row] for row in PADDINGS["both"] + PADDINGS["empty row"]])
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        q, k, v = (t.detach().requires_grad_() for t in _tensors(valid.shape[1], len(valid)))

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, ScoreTransform(0.3), None, valid, False)[0]

        call = torch.compile(run, backend="eager", fullgraph=True) if compiled else run
        out = call(q, k, v)
        out.square().sum().backward()
        grads = [t.grad for t in (q, k, v)]
        assert all(grad is not None and grad.isfinite().all() for grad in grads)
        results.append([out.detach(), *(grad for grad in grads if grad is not None)])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("want_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_counts_of_thousands_are_not_rounded(dtype: torch.dtype, want_weights: bool) -> None:
    """Of keys that are equal, the slot that stands for a few more tokens has so much more weight."""
    counts = torch.tensor([[[3074.0, 2981.0, 5000.0]]]).log()
    occupied = torch.tensor([[[True, True, False]]])
    q = torch.zeros(1, 1, 1, 2, dtype=dtype)
    k = torch.zeros(1, 1, 3, 2, dtype=dtype)
    v = torch.tensor([[[[1.0, 0.0], [-1.0, 1.0], [9.0, 9.0]]]], dtype=dtype)
    out, _ = attend_columns(q, ExactColumns(k, v), (), ~occupied, ScoreTransform(1.0), want_weights, counts)
    assert out[0, 0, 0].tolist() == pytest.approx([93 / 6055, 2981 / 6055], abs=2e-3)

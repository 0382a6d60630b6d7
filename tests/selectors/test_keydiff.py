"""KeyDiff: its vector, its anchor over time, and keys that have no direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.protocols import HeadShape, View
from kvpolicy.selectors.keydiff import Differences, KeyDiff
from kvpolicy.statistics import Candidates, Results, Vectors
from tests.conformance.bench import Bench, draw, padding

VECTOR = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.9]]
"""The keys of the worked example."""


def scored(keys: Tensor, positions: Tensor | None = None) -> Any:
    batch, heads, count, dim = keys.shape
    where = torch.arange(count, dtype=torch.int32).expand(batch, heads, -1) if positions is None else positions
    view = View(where, torch.full((batch,), count), torch.full((batch,), 2), 0)
    state = KeyDiff().alloc(batch, heads, count, "cpu", HeadShape(1, dim))
    return KeyDiff().observe(state, Results({Vectors: Candidates(keys, keys, 1.0)}), view)


def test_the_vector() -> None:
    got = scored(torch.tensor(VECTOR)[None, None])
    assert got.score[0, 0].tolist() == pytest.approx([-0.686751, -0.762822, -0.726893, -0.726893], abs=1e-6)


def test_a_key_of_zeros_is_at_right_angles_to_all() -> None:
    keys = torch.tensor([*VECTOR, [0.0, 0.0]])[None, None]
    got = scored(keys)
    assert got.score[0, 0, -1] == 0 and torch.equal(got.anchor, scored(keys[:, :, :-1]).anchor)
    assert scored(torch.zeros(1, 1, 3, 2)).score.abs().tolist() == [[[0.0, 0.0, 0.0]]]


@pytest.mark.parametrize("others", [[], [[0.0] * 8], [[torch.nan] * 8, [torch.inf] * 8]])
def test_two_keys_are_equally_far_from_their_mean(others: list[list[float]]) -> None:
    """To the last bit, so that the earlier one stays, whatever the order of sums; keys of zeros do not count."""
    pair = torch.randn(50, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    pair[0, 0, 1] = -pair[0, 0, 0]
    keys = torch.cat([torch.tensor(others).reshape(-1, 8).expand(50, 4, -1, -1), pair], 2)
    places = torch.tensor([[0, 1], [0, 1, 2], [-1, -1, 0, 1]][len(others)], dtype=torch.int32)
    got = scored(keys, places.expand(50, 4, -1)).score[..., -2:]
    assert torch.equal(got[..., 0], got[..., 1])
    cosine = torch.cosine_similarity(pair[1:, :, 0].double(), pair[1:, :, 1].double(), dim=-1)
    torch.testing.assert_close(got[1:, :, 0].double(), -((1 + cosine) / 2).sqrt(), atol=1e-6, rtol=0)


def test_numbers_of_invalid_tokens_are_ignored() -> None:
    keys = torch.tensor([[9.0, torch.inf], [torch.nan, 1.0], *VECTOR])[None, None]
    got = scored(keys, torch.tensor([[[-1, -1, 0, 1, 2, 3]]], dtype=torch.int32))
    assert torch.equal(got.score[..., 2:], scored(torch.tensor(VECTOR)[None, None]).score)


def test_the_scale_of_a_key_means_nothing() -> None:
    keys = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(2, 3, 9, 1, generator=torch.Generator().manual_seed(1)) * 100 + 1e-3
    torch.testing.assert_close(scored(keys * scale).score, scored(keys).score)


def test_equal_keys_keep_the_earliest_and_the_newest() -> None:
    bench = Bench("keydiff:every=4", [4])
    for size in (9, 1, 1):
        q, k, v = draw(size, size)
        bench.forward(q, torch.ones_like(k), v)
    assert bench.turns[0].kept[0][0][-1] == 8 and bench.turns[-1].kept[0][0][-1] == 10
    assert bench.layer.tensors.state.score[bench.layer.tensors.positions >= 0].tolist() == pytest.approx(
        [-1] * 8, abs=1e-6
    )


@pytest.mark.parametrize("every", [1, 3])
def test_the_anchor_is_that_of_the_kept_tokens(every: int) -> None:
    """It is summed again after so many steps, so that nothing drifts however long the run."""
    bench = Bench(f"keydiff:every={every}", [12, 9])
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for number in range(30 * every):
        bench.forward(*draw(1, number + 1, batch=2))
    store = bench.layer
    units = torch.nn.functional.normalize(store.tensors.keys, dim=-1) * (store.tensors.positions >= 0)[..., None]
    torch.testing.assert_close(store.tensors.state.anchor, units.sum(2))
    bench.check()


def test_rows_take_their_anchor_with_them() -> None:
    """As in a beam search, which selects and repeats rows."""
    bench = Bench("keydiff:every=50", [12, 9])
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    before = bench.layer.tensors.state
    anchor = before.anchor.clone()
    score = before.score.clone()
    bench.layer.map_rows(lambda t: t[torch.tensor([1, 1, 0])])
    after: Any = bench.layer.tensors.state
    assert isinstance(after, Differences)
    assert torch.equal(after.anchor, anchor[[1, 1, 0]]) and torch.equal(after.score, score[[1, 1, 0]])
    bench.layer.append(*draw(1, 5, batch=3), None, bench.turns[0].kernel)
    bench.layer.count_step()
    assert bench.layer.contents.schedule.ranked_len == [13, 13, 20]

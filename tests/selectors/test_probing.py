"""Attention of probe queries, against the full matrix of each row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpolicy.selectors.probe import ProbeQueries, draw_probes
from kvpolicy.statistics import window_statistic, windows
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import Past, QueryWindow, ScoreTransform
from tests.engine.parts import candidates_of, generator
from tests.reference.selectors.probe import probes as slow_probes

ROWS = 3
HEADS = 2
GROUP = 2
NEW = 9
DIM = 4
PADDED = torch.tensor([[1] * 9, [0] * 5 + [1] * 4, [1] * 8 + [0]]).bool()
SHARES = [(0.3, 0.3), (0.0, 0.5), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.01, 0.0)]


def probe_queries(q: Tensor, valid: Tensor | None, probes: ProbeQueries) -> QueryWindow:
    """The probes of a prompt in one piece."""
    coming = Coming(valid, q.shape[2], torch.zeros(q.shape[0], dtype=torch.int64), None)
    window = probes.begun(coming).added(Tile(q, q, 0, valid, True)).window
    assert window is not None
    return window


def config(probes: ProbeQueries) -> dict[str, float]:
    return {"recent": probes.recent, "random": probes.random, "seed": probes.seed}


@pytest.mark.parametrize("share", SHARES)
def test_probes_are_the_newest_and_some_others(share: tuple[float, float]) -> None:
    for length in (1, 2, 9, 40):
        drawn = draw_probes(length, ProbeQueries(*share, seed=3)).tolist()
        recent = min(math.ceil(share[0] * length), length)
        assert drawn == sorted(set(drawn)) and all(0 <= index < length for index in drawn), length
        assert drawn[len(drawn) - recent :] == [*range(length - recent, length)], length
        assert len(drawn) == min(recent + math.ceil(share[1] * length), length), length
        assert drawn == slow_probes(config(ProbeQueries(*share, seed=3)), length), length


def test_the_seed_and_the_length_decide() -> None:
    some = [draw_probes(60, ProbeQueries(0.0, 0.1, seed)).tolist() for seed in range(5)]
    assert len({*map(tuple, some)}) == 5
    assert some[0] == draw_probes(60, ProbeQueries(0.0, 0.1, 0)).tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_queries_are_taken_from_the_row_alone(padded: bool) -> None:
    q = torch.randn(ROWS, HEADS * GROUP, NEW, DIM, generator=generator(0))
    probes = ProbeQueries(0.2, 0.3, seed=1)
    got = probe_queries(q, PADDED if padded else None, probes)
    for b in range(ROWS):
        columns = PADDED[b].nonzero()[:, 0].tolist() if padded else [*range(NEW)]
        want = [columns[index] for index in slow_probes(config(probes), len(columns))]
        assert got.at[b].tolist() == want + [-1] * (got.at.shape[1] - len(want))
        assert torch.equal(got.queries[b, :, : len(want)], q[b, :, want])


def slow_sums(
    q: Tensor, k: Tensor, valid: Tensor | None, past: Past | None, at: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """One probe after the other, over the tokens that it may see."""
    held = 0 if past is None else past.keys.shape[2]
    total, count = (torch.zeros(ROWS, HEADS * GROUP, held + NEW, dtype=torch.float64) for _ in range(2))
    for b in range(ROWS):
        for hq in range(HEADS * GROUP):
            for column in at[b]:
                seen: list[tuple[int, Tensor]] = []
                if past is not None:
                    h = hq // GROUP
                    seen += [(s, past.keys[b, h, s]) for s in range(held) if bool(past.occupied[b, h, s])]
                for j in range(column + 1):
                    if valid is None or bool(valid[b, j]):
                        seen.append((held + j, k[b, hq // GROUP, j]))
                scores = torch.stack([key.double() @ q[b, hq, column].double() for _, key in seen]) * 0.5
                for (place, _), weight in zip(seen, scores.softmax(0), strict=True):
                    total[b, hq, place] += weight
                    count[b, hq, place] += 1
    return total, count


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_past", [False, True])
@pytest.mark.parametrize("tile", [1 << 20, 1])
def test_sums_are_those_of_the_whole_matrix(
    padded: bool, with_past: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "TILE_ELEMENTS", tile)
    q = torch.randn(ROWS, HEADS * GROUP, NEW, DIM, generator=generator(0))
    k = torch.randn(ROWS, HEADS, NEW, DIM, generator=generator(1))
    valid = PADDED if padded else None
    past = None
    if with_past:
        occupied = torch.rand(ROWS, HEADS, 5, generator=generator(2)) < 0.6
        keys = torch.randn(ROWS, HEADS, 5, DIM, generator=generator(3))
        past = Past(keys, torch.zeros_like(keys), occupied)
    window = probe_queries(q, valid, ProbeQueries(0.3, 0.3, seed=2))
    at = [[column for column in row if column >= 0] for row in window.at.tolist()]
    total, count = ProbeQueries(0.3, 0.3, 2, window).reduced(candidates_of(k, valid, ScoreTransform(0.5), past))
    want, seen = slow_sums(q, k, valid, past, at)
    torch.testing.assert_close(total.double(), want, atol=1e-6, rtol=1e-5)
    # How many probes could see a token is only asked of tokens that there are.
    there = want > 0
    assert torch.equal(count.double()[there], seen[there])


def test_many_probes_take_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has at least 16 queries, so that 40 of them need three."""
    tiles: list[int] = []
    real = window_statistic.window_attention

    def counting(window: QueryWindow, *rest: object) -> Tensor:
        tiles.append(window.queries.shape[2])
        return real(window, *rest)  # pyright: ignore[reportArgumentType]

    q, k = (torch.randn(1, 1, 40, DIM, generator=generator(seed)) for seed in (0, 1))
    window = probe_queries(q, None, ProbeQueries(1.0, 0.0, seed=0))
    probes = ProbeQueries(1.0, 0.0, 0, window)
    whole, _ = probes.reduced(candidates_of(k, None, ScoreTransform(0.5)))
    monkeypatch.setattr(windows, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(window_statistic, "window_attention", counting)
    tiled, _ = probes.reduced(candidates_of(k, None, ScoreTransform(0.5)))
    assert tiles == [16, 16, 8]
    torch.testing.assert_close(tiled, whole)

"""Which slots and new tokens are kept, against a sort of each head by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.selection import Selection, rank_candidates, select_tokens
from kvpolicy.engine.state import tensors
from kvpolicy.protocols import View
from kvpolicy.selectors.probe import ProbeQueries
from kvpolicy.statistics import (
    AttentionSum,
    Forward,
    RecentQueries,
    Replay,
    Results,
    Statistic,
    Vectors,
)
from kvpolicy.statistics.channel_sums import LargestQueries
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, QueryWindow, ScoreTransform
from tests.engine.parts import Ranking, Worth, contents_of, generator, shuffled
from tests.readers.bench import Layer
from tests.readers.bench import draw as draw_tokens
from tests.sampling import each_once, product

ROWS = 3
HEADS = 2
GROUP = 2
NEW = 6
DIM = 4
LEFT = [[1] * 6, [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
RIGHT = [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
SEEN_BEFORE = torch.tensor([20, 11, 30])


def prompt(valid: list[list[int]] | None) -> PendingPrompt:
    keys, values = (torch.randn(ROWS, HEADS, NEW, DIM, generator=generator(seed)) for seed in (0, 1))
    return PendingPrompt(keys, values, None if valid is None else torch.tensor(valid).bool(), ScoreTransform(0.5))


def held_slots(count: int, seed: int) -> Tensor:
    """Positions of slots in any order, some of them empty."""
    positions = shuffled(count, rows=ROWS, heads=HEADS, most=11, seed=seed)
    return positions.where(torch.rand(positions.shape, generator=generator(seed)) < 0.7, -1)


def select(selector: Ranking, positions: Tensor, pending: PendingPrompt, keep: list[int]) -> Selection:
    state = Worth(positions.float(), positions.long())
    ranking = rank_candidates(contents_of(selector), (positions, state), pending, None, SEEN_BEFORE, torch.tensor(keep))
    return select_tokens(ranking, pending.idle)


def candidates(positions: Tensor, pending: PendingPrompt) -> Tensor:
    """Positions of the slots and the new tokens, [B, H, S + P]."""
    new = pending.positions(SEEN_BEFORE)[:, None].expand(-1, HEADS, -1)
    return torch.cat([positions, new], -1)


def test_a_token_that_may_never_be_kept_leaves_its_place_empty() -> None:
    """And a broken score is not lost silently: NaN ranks above every number."""
    worth = {20: -math.inf, 21: math.nan, 22: 5.0, 23: math.inf, 24: -1.0, 25: -math.inf}

    def score(state: Worth, seen: Results, view: View) -> Tensor:
        return torch.tensor([worth.get(p, 0.0) for p in view.positions.flatten().tolist()]).view(view.positions.shape)

    empty = torch.empty(ROWS, HEADS, 0, dtype=torch.int32)
    for keep, want in ((1, {23}), (2, {23, 21}), (3, {23, 21, 22}), (6, {23, 21, 22, 24})):
        got = select(Ranking(score=score), empty, prompt(None), [keep] * ROWS)
        assert set(got.positions[0, 0][got.chosen[0, 0]].tolist()) == want


def test_what_was_not_asked_for_is_not_shown() -> None:
    selector = Ranking()
    select(selector, torch.empty(ROWS, HEADS, 0, dtype=torch.int32), prompt(None), [2, 2, 2])
    (seen,) = selector.seen
    (view,) = selector.views
    assert not any(kind in seen for kind in (AttentionSum, RecentQueries, Vectors, Replay))
    assert view.alike and view.budget.tolist() == [2, 2, 2] and view.length.tolist() == (SEEN_BEFORE + NEW).tolist()
    select(selector, held_slots(1, 0), prompt(None), [2, 2, 2])
    assert not selector.views[-1].alike, "heads hold different tokens already"


VALID = [[True] * 5, [False, False, True, True, True], [True, False, True, False, False]]


def waiting(valid: Any = None, *statistics: Statistic[Any], forward: Forward | None = None) -> PendingPrompt:
    keys = torch.zeros(3, 2, 5, 8)
    values = torch.ones(3, 2, 5, 8)
    mask = None if valid is None else torch.tensor(valid)
    return PendingPrompt(keys, values, mask, ScoreTransform(1.0), statistics, forward)


def test_the_next_chunk_sees_what_slots_before_a_prompt_count_for() -> None:
    counts = torch.rand(3, 2, 4, generator=generator(0))
    past = Past(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), torch.ones(3, 2, 4, dtype=torch.bool), counts)
    after = waiting(VALID).after(past)
    assert after.counts is not None
    assert torch.equal(after.counts, torch.cat([counts, torch.zeros(3, 2, 5)], -1)), "each new token is one"
    assert waiting(VALID).after(past._replace(counts=None)).counts is None


def test_later_changes_of_the_callers_mask_do_not_count() -> None:
    one = waiting(VALID)
    own = one.owned()
    assert one.valid is not None and own.valid is not None
    one.valid.fill_(True)
    assert own.valid.tolist() == VALID


CHUNKED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("first", [1, 4, 6])
def test_chunks_are_joined_to_the_whole_prompt(first: int) -> None:
    """Rows begin and end in any chunk, and have padding between their tokens."""
    valid = torch.tensor(CHUNKED).bool()
    keys = torch.randn(4, 2, 7, 8, generator=generator(1))

    def chunk(columns: slice) -> PendingPrompt:
        mine = keys[:, :, columns]
        return PendingPrompt(mine, -mine, valid[:, columns], ScoreTransform(1.0), (LargestQueries(mine[:, :, 0]),))

    whole = chunk(slice(None))
    joined = chunk(slice(first)).joined(chunk(slice(first, None)))
    for name in ("keys", "values", "valid"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    found = first_of(LargestQueries, joined.statistics)
    assert found is not None and found.absmax is not None
    assert torch.equal(found.absmax, keys[:, :, 0].maximum(keys[:, :, first])), "statistics are joined pair by pair"
    assert first_of(RecentQueries, joined.statistics) is None


ROWS_OF = [
    ["merge", "d2o", "compensate", "elastic", "zsmerge", "keepkv:least=-1"],
    ["plain", "plain", "tokenwise:block_size=3:residual_length=2", "tokenwise:block_size=3:residual_length=2"],
]


@pytest.mark.parametrize(("merger", "codec"), [*each_once(*ROWS_OF), ("merge", ROWS_OF[1][2])])
def test_a_row_without_a_token_merges_nothing(merger: str, codec: str) -> None:
    """Neither its slots nor what the merger keeps of it change, while the other row evicts and merges."""
    layer = Layer(f"h2o+{codec}+{merger}@0.5", [13, 13])
    layer.prompt(*draw_tokens(26, 0, batch=2))
    layer.between()
    for step in range(3):
        before = {name: [t.clone() for t in tensors(part)] for name, part in layer.store.tensors.parts().items()}
        layer.step(*draw_tokens(1, 10 + step, batch=2), valid=torch.tensor([[True], [False]]))
        for name, part in layer.store.tensors.parts().items():
            for old, new in zip(before[name], tensors(part), strict=True):
                assert name == "columns" or torch.equal(new[1:], old[1:]), name
        layer.between()
        layer.step(*draw_tokens(1, 20 + step, batch=2))
        layer.between()


def test_bytes_are_those_of_every_tensor() -> None:
    keys = 3 * 2 * 5 * 8 * 4
    assert waiting().nbytes == 2 * keys
    queries = QueryWindow(torch.zeros(3, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int64))
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {}, queries=torch.zeros(3, 4, 5, 8))
    statistics = (
        AttentionSum(torch.zeros(3, 4, 5)),
        RecentQueries(2, queries),
        ProbeQueries(0.1, 0.1, 0, queries),
        LargestQueries(torch.zeros(3, 2, 8)),
    )
    window = queries.queries.nbytes + queries.at.nbytes
    extra = 3 * 4 * 5 * 4 + 2 * window + 3 * 2 * 8 * 4 + 3 * 5 * 16 * 4 + 3 * 4 * 5 * 8 * 4
    assert waiting(VALID, *statistics, forward=forward).nbytes == 2 * keys + 15 + extra


HOLES = [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]


def worth_of(levels: int) -> Any:
    """A score that depends on the position of a token alone, of so many different values."""

    def score(state: Worth, seen: Results, view: View) -> Tensor:
        assert bool((view.positions.diff(dim=-1) >= 0).all()), "candidates come by position, invalid ones first"
        return (view.positions * 7 % levels).float()

    return score


@product(
    "keep,valid,slots,levels",
    [[2, 3, 4], [1, 1, 1], [99, 99, 99]],
    [None, LEFT, RIGHT, HOLES],
    [0, 1, 5],
    [1, 3, 31],
)
def test_the_best_tokens_are_kept(keep: list[int], valid: list[list[int]] | None, slots: int, levels: int) -> None:
    positions = held_slots(slots, slots)
    pending = prompt(valid)
    got = select(Ranking(score=worth_of(levels)), positions, pending, keep)
    every = candidates(positions, pending)
    assert torch.equal(got.positions, every), "candidates stay in their order"
    for b in range(ROWS):
        idle = valid is not None and not any(valid[b])
        for h in range(HEADS):
            there = [j for j, p in enumerate(every[b, h].tolist()) if p >= 0]
            best = sorted(there, key=lambda j: (-(int(every[b, h, j]) * 7 % levels), int(every[b, h, j])))
            kept = there if idle else best[: keep[b]]
            assert got.chosen[b, h].nonzero()[:, 0].tolist() == sorted(kept), (b, h)
            for j in there:  # the state belongs to its token, whatever the order it was observed in
                position = int(every[b, h, j])
                old = position if j < slots else 0
                assert float(got.state.worth[b, h, j]) == (old if idle else position * 7 % levels)

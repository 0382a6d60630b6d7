"""Which slots and new tokens are kept, against a sort of each head by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.selection import Selection, finite_priority, rank_candidates, select_tokens
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import View
from kvpolicy.selectors.blocks import BlockAttention
from kvpolicy.selectors.scissorhands import BelowMean
from kvpolicy.statistics import (
    AttentionSum,
    Forward,
    ModuleCall,
    RecentQueries,
    Replay,
    Results,
    Rotation,
    UnrotatedKeys,
    Vectors,
)
from kvpolicy.statistics.replay import NOT_REPLAYED
from kvpolicy.statistics.windows import Past, ScoreTransform
from tests.conformance.fakes import Roll, undo
from tests.engine.parts import Ranking, Worth, candidates_of, contents_of, gathered, generator, newest_queries, shuffled
from tests.sampling import product

ROWS = 3
HEADS = 2
GROUP = 2
NEW = 6
DIM = 4
LEFT = [[1] * 6, [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]
RIGHT = [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
HOLES = [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
EVERY = (AttentionSum, RecentQueries, BelowMean, BlockAttention, Vectors, UnrotatedKeys, ModuleCall, Replay, Rotation)
SEEN_BEFORE = torch.tensor([20, 11, 30])


def prompt(valid: list[list[int]] | None, **more: Any) -> PendingPrompt:
    keys, values = (torch.randn(ROWS, HEADS, NEW, DIM, generator=generator(seed)) for seed in (0, 1))
    return PendingPrompt(
        keys, values, None if valid is None else torch.tensor(valid).bool(), ScoreTransform(0.5), **more
    )


def held_slots(count: int, seed: int) -> Tensor:
    """Positions of slots in any order, some of them empty."""
    positions = shuffled(count, rows=ROWS, heads=HEADS, most=11, seed=seed)
    return positions.where(torch.rand(positions.shape, generator=generator(seed)) < 0.7, -1)


def select(
    selector: Ranking, positions: Tensor, pending: PendingPrompt, keep: list[int], past: Past | None = None
) -> Selection:
    state = Worth(positions.float(), positions.long())
    ranking = rank_candidates(contents_of(selector), (positions, state), pending, past, SEEN_BEFORE, torch.tensor(keep))
    return select_tokens(ranking, pending.idle)


def candidates(positions: Tensor, pending: PendingPrompt) -> Tensor:
    """Positions of the slots and the new tokens, [B, H, S + P]."""
    new = pending.positions(SEEN_BEFORE)[:, None].expand(-1, HEADS, -1)
    return torch.cat([positions, new], -1)


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


def test_a_token_that_may_never_be_kept_leaves_its_place_empty() -> None:
    """And a broken score is not lost silently: NaN ranks above every number."""
    worth = {20: -math.inf, 21: math.nan, 22: 5.0, 23: math.inf, 24: -1.0, 25: -math.inf}

    def score(state: Worth, seen: Results, view: View) -> Tensor:
        return torch.tensor([worth.get(p, 0.0) for p in view.positions.flatten().tolist()]).view(view.positions.shape)

    empty = torch.empty(ROWS, HEADS, 0, dtype=torch.int32)
    for keep, want in ((1, {23}), (2, {23, 21}), (3, {23, 21, 22}), (6, {23, 21, 22, 24})):
        got = select(Ranking(score=score), empty, prompt(None), [keep] * ROWS)
        assert set(got.positions[0, 0][got.chosen[0, 0]].tolist()) == want


def test_finite_priorities_keep_their_order() -> None:
    given = torch.tensor([-torch.inf, -3.0, 0.0, 2.0, torch.nan, torch.inf])
    finite = finite_priority(given)
    assert finite.argsort().tolist() == [0, 1, 2, 3, 4, 5] and not finite.isnan().any()
    assert finite[[0, 1, 2, 3, 5]].tolist() == given[[0, 1, 2, 3, 5]].tolist()


@pytest.mark.parametrize("slots", [0, 4])
@pytest.mark.parametrize("valid", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_statistics_stand_with_their_tokens(valid: list[list[int]] | None, slots: int) -> None:
    positions = held_slots(slots, 7)
    q = torch.randn(ROWS, HEADS * GROUP, NEW, DIM, generator=generator(5))
    pending = prompt(valid)
    every = candidates(positions, pending)
    past_keys = torch.randn(ROWS, HEADS, slots, DIM, generator=generator(6))
    past = Past(past_keys, 2 * past_keys, positions >= 0) if slots else None
    wide = every.repeat_interleave(GROUP, 1)
    newest = newest_queries(q, pending.valid, 3)
    # Of the new tokens alone: no slot is in a block of this prompt.
    blocks = wide[..., slots:].float() * 7
    pending = pending._replace(
        statistics=gathered(
            attn_sum=wide.float() * 3, window=newest_queries(q, pending.valid, 2), below_mean=newest, blocks=blocks
        ),
        replay=every[..., slots:].float() * 5,
        forward=Forward(nn.Identity(), torch.zeros(ROWS, NEW, 8), {}),
        rotation=KeyRotation(Roll(), torch.tensor([0, 3, 1])),  # pyright: ignore[reportArgumentType]
    )
    asked = (Vectors(), UnrotatedKeys(), ModuleCall(), Replay(chunk=8))
    pending = pending._replace(statistics=(*pending.statistics, *asked))
    ignored = BelowMean(3, newest).reduced(candidates_of(pending.keys, pending.valid, pending.transform, past))
    selector = Ranking()
    select(selector, positions, pending, [3, 3, 3], past)
    (seen,) = selector.seen
    (view,) = selector.views
    tokens = seen[Vectors]
    replayed = seen[Replay]
    assert replayed is not None and tokens.scale == 0.5 and seen[ModuleCall] is pending.forward
    assert view.added is not None and view.added.tolist() == (pending.lengths(SEEN_BEFORE) - SEEN_BEFORE).tolist()
    assert view.added.tolist() == ([NEW] * ROWS if valid is None else [sum(row) for row in valid])
    assert torch.equal(seen[AttentionSum], view.positions.repeat_interleave(GROUP, 1).float() * 3)
    for b in range(ROWS):
        for h in range(HEADS):
            for place, position in enumerate(view.positions[b, h].tolist()):
                if position < 0:
                    continue
                source = every[b, h].tolist().index(position)
                queries = slice(h * GROUP, (h + 1) * GROUP)
                assert seen[BelowMean][b, queries, place].tolist() == ignored[b, queries, source].tolist()
                assert float(replayed[b, h, place]) == (NOT_REPLAYED if source < slots else position * 5)
                key = past_keys[b, h, source] if source < slots else pending.keys[b, h, source - slots]
                assert torch.equal(tokens.keys[b, h, place], key)
                assert torch.equal(seen[UnrotatedKeys][b, h, place], undo(key, position + (0, 3, 1)[b]))
                inside = 0 if source < slots else position * 7
                assert seen[BlockAttention][b, queries, place].tolist() == [inside] * GROUP
                value = 2 * key if source < slots else pending.values[b, h, source - slots]
                assert torch.equal(tokens.values[b, h, place], value)
        # The newest query sees every token there is, and nothing else.
        columns = [*range(NEW)] if valid is None else [j for j in range(NEW) if valid[b][j]]
        for hq in range(HEADS * GROUP):
            there = view.positions[b, hq // GROUP] >= 0
            scores = tokens.keys[b, hq // GROUP] @ q[b, hq, columns[-1]] * 0.5
            want = scores.masked_fill(~there, -torch.inf).softmax(-1)
            torch.testing.assert_close(
                seen[RecentQueries].weights[b, hq, -1].where(there, 0), want, atol=1e-6, rtol=1e-5
            )


def test_what_was_not_asked_for_is_not_shown() -> None:
    selector = Ranking()
    select(selector, torch.empty(ROWS, HEADS, 0, dtype=torch.int32), prompt(None), [2, 2, 2])
    (seen,) = selector.seen
    (view,) = selector.views
    assert not any(kind in seen for kind in EVERY)
    assert view.alike and view.budget.tolist() == [2, 2, 2] and view.length.tolist() == (SEEN_BEFORE + NEW).tolist()
    select(selector, held_slots(1, 0), prompt(None), [2, 2, 2])
    assert not selector.views[-1].alike, "heads hold different tokens already"

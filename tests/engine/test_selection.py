"""Which slots and new tokens are kept, against a sort of each head by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvpolicy import Policy
from kvpolicy.engine import merging
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import wanted
from kvpolicy.engine.selection import Selection, rank_candidates, select_tokens
from kvpolicy.engine.state import tensors
from kvpolicy.hf.layer import make_store
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
from kvpolicy.statistics.channel_sums import LargestQueries
from kvpolicy.statistics.replay import NOT_REPLAYED
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, QueryWindow, ScoreTransform
from tests.conformance.bench import Bench, draw
from tests.conformance.fakes import Roll, undo
from tests.conformance.policies import words
from tests.engine.parts import (
    Ranking,
    Worth,
    candidates_of,
    contents_of,
    gathered,
    generator,
    newest_queries,
    shuffled,
    slots_of,
)
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


def test_a_token_that_may_never_be_kept_leaves_its_place_empty() -> None:
    """And a broken score is not lost silently: NaN ranks above every number."""
    worth = {20: -math.inf, 21: math.nan, 22: 5.0, 23: math.inf, 24: -1.0, 25: -math.inf}

    def score(state: Worth, seen: Results, view: View) -> Tensor:
        return torch.tensor([worth.get(p, 0.0) for p in view.positions.flatten().tolist()]).view(view.positions.shape)

    empty = torch.empty(ROWS, HEADS, 0, dtype=torch.int32)
    for keep, want in ((1, {23}), (2, {23, 21}), (3, {23, 21, 22}), (6, {23, 21, 22, 24})):
        got = select(Ranking(score=score), empty, prompt(None), [keep] * ROWS)
        assert set(got.positions[0, 0][got.chosen[0, 0]].tolist()) == want


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


VALID = [[True] * 5, [False, False, True, True, True], [True, False, True, False, False]]


def waiting(valid: Any = None, forward: Forward | None = None, **statistics: Any) -> PendingPrompt:
    keys = torch.zeros(3, 2, 5, 8)
    values = torch.ones(3, 2, 5, 8)
    mask = None if valid is None else torch.tensor(valid)
    return PendingPrompt(keys, values, mask, ScoreTransform(1.0), gathered(**statistics), forward)


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


def test_a_prompt_has_the_statistics_that_its_parts_ask_for() -> None:
    k = torch.zeros(1, 1, 0, 4)

    def kinds(policy: str) -> list[str]:
        store = make_store(Policy.parse(policy), 0)
        store.initialize(k)
        return [type(each).__name__ for each in wanted(store.contents)]

    assert kinds("window@0.5") == []
    assert kinds("h2o@0.5") == ["AttentionSum", "GeneratedAttention"]
    assert kinds("snapkv+mikv@0.5") == ["RecentQueries", "LargestQueries"]
    assert kinds("kvcrush/probe@0.5") == ["ProbeQueries", "GeneratedAttention"]
    assert kinds("scissorhands@0.5") == ["BelowMean", "GeneratedAttention"]
    assert kinds("compactor@0.5") == ["Vectors", "UnrotatedKeys", "BlockAttention"]
    assert kinds("kvcrush/compactor@0.5") == ["Vectors", "UnrotatedKeys", "BlockAttention", "RecentQueries"]


CHUNKED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("first", [1, 4, 6])
def test_chunks_are_joined_to_the_whole_prompt(first: int) -> None:
    """Rows begin and end in any chunk, and have padding between their tokens."""
    valid = torch.tensor(CHUNKED).bool()
    keys = torch.randn(4, 2, 7, 8, generator=generator(1))

    def chunk(columns: slice) -> PendingPrompt:
        mine = keys[:, :, columns]
        return PendingPrompt(mine, -mine, valid[:, columns], ScoreTransform(1.0), gathered(query_absmax=mine[:, :, 0]))

    whole = chunk(slice(None))
    joined = chunk(slice(first)).joined(chunk(slice(first, None)))
    for name in ("keys", "values", "valid"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    found = first_of(LargestQueries, joined.statistics)
    assert found is not None and found.absmax is not None
    assert torch.equal(found.absmax, keys[:, :, 0].maximum(keys[:, :, first])), "statistics are joined pair by pair"
    assert first_of(RecentQueries, joined.statistics) is None


@pytest.mark.parametrize("codec", ["tokenwise:block_size=4:residual_length=2", "staircase"])
def test_a_token_is_read_from_any_slot(codec: str) -> None:
    bench = Bench(words("h2o", "merge", codec.split(":")[0], budget="14"), [14] * 2)
    bench.forward(*draw(30, 0, batch=2))
    for step in range(4):
        bench.forward(*draw(1, step + 1, batch=2))
    store = bench.layer
    past = store.past()
    assert past is not None and sum(store.layout.coded)
    for slot in range(store.layout.slots):
        at = torch.full((2, 2, 1), slot)
        token = merging.slot_tokens(
            at,
            at >= 0,
            (store.tensors.keys, store.tensors.values),
            slots_of(store).codes.view(),
            store.tensors.positions,
            store.tensors.counts,
        )
        torch.testing.assert_close(token.keys[:, :, 0], past.keys[:, :, slot])
        torch.testing.assert_close(token.values[:, :, 0], past.values[:, :, slot])
        assert torch.equal(token.positions[..., 0], store.tensors.positions[..., slot])
        assert token.counts is not None and past.counts is not None
        assert torch.equal(token.counts[..., 0], past.counts[..., slot])


@pytest.mark.parametrize("codec", ["plain", "tokenwise", "kivi"])
@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_every_token_is_counted_once(codec: str, decode: str) -> None:
    """Without a gate nothing is lost: the counts of a head add up to all tokens that it has seen."""
    policy = words(f"snapkv:window=4:decode={decode}", "merge:least=-1", codec, budget="12")
    bench = Bench(policy, [12], new=20)
    seen = 0
    for size in (20, 1, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1, 1):
        bench.forward(*draw(size, seen))
        seen += size
        past: Any = bench.layer.past()
        counts = (past.counts.exp() * past.occupied).sum(-1)
        torch.testing.assert_close(counts, torch.full_like(counts, seen), rtol=1e-5, atol=1e-4)


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


WINDOW = QueryWindow(torch.zeros(3, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int64))


def test_bytes_are_those_of_every_tensor() -> None:
    keys = 3 * 2 * 5 * 8 * 4
    assert waiting().nbytes == 2 * keys
    window = WINDOW.queries.nbytes + WINDOW.at.nbytes
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {}, queries=torch.zeros(3, 4, 5, 8))
    more: dict[str, Any] = {
        "attn_sum": torch.zeros(3, 4, 5),
        "window": WINDOW,
        "probes": WINDOW,
        "query_absmax": torch.zeros(3, 2, 8),
        "forward": forward,
    }
    extra = 3 * 4 * 5 * 4 + 2 * window + 3 * 2 * 8 * 4 + 3 * 5 * 16 * 4 + 3 * 4 * 5 * 8 * 4
    assert waiting(VALID, **more).nbytes == 2 * keys + 15 + extra


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


def test_what_reads_the_slots_before_it() -> None:
    assert not waiting().reads_past and not waiting(attn_sum=torch.zeros(3, 4, 5)).reads_past
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {})
    for name in ("window", "probes", "below_mean"):
        assert waiting(None, None, **{name: WINDOW}).reads_past
    assert waiting(forward=forward).reads_past

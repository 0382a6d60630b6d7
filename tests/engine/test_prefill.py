"""What is kept of a prompt until its budget is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvpolicy import Policy
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.prompt_statistics import wanted
from kvpolicy.engine.selection import rank_candidates
from kvpolicy.hf.layer import make_store
from kvpolicy.selectors.scissorhands import BelowMean
from kvpolicy.statistics import AttentionSum, Forward, QueryMoments, Results
from kvpolicy.statistics.channel_sums import AbsoluteSums, LargestQueries
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, QueryWindow, ScoreTransform
from tests.engine.parts import Ranking, contents_of, gathered, generator, newest_queries

WINDOW = QueryWindow(torch.zeros(3, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int64))
VALID = [[True] * 5, [False, False, True, True, True], [True, False, True, False, False]]


def prompt(valid: Any = None, forward: Forward | None = None, **statistics: Any) -> PendingPrompt:
    keys = torch.zeros(3, 2, 5, 8)
    values = torch.ones(3, 2, 5, 8)
    mask = None if valid is None else torch.tensor(valid)
    return PendingPrompt(keys, values, mask, ScoreTransform(1.0), gathered(**statistics), forward)


@pytest.mark.parametrize("seen", [[0, 0, 0], [4, 0, 9]])
@pytest.mark.parametrize("valid", [None, VALID, [[False] * 5, [True] * 5, [False] * 5]])
def test_rows_are_counted_without_padding(valid: list[list[bool]] | None, seen: list[int]) -> None:
    one = prompt(valid)
    flags = valid or [[True] * 5] * 3
    positions: list[list[int]] = []
    for row, start in zip(flags, seen, strict=True):
        count = start
        found = list[int]()
        for there in row:
            found.append(count if there else -1)
            count += there
        positions.append(found)
    assert one.positions(torch.tensor(seen)).tolist() == positions
    assert one.positions(torch.tensor(seen)).dtype == torch.int32
    assert one.lengths(torch.tensor(seen)).tolist() == [
        start + sum(row) for row, start in zip(flags, seen, strict=True)
    ]


def test_idle_rows_have_nothing_but_padding() -> None:
    assert prompt().idle is None
    idle = prompt([[False] * 5, [False, True, False, False, False], [False] * 5]).idle
    assert idle is not None and idle.tolist() == [True, False, True]


def test_what_reads_the_slots_before_it() -> None:
    assert not prompt().reads_past and not prompt(attn_sum=torch.zeros(3, 4, 5)).reads_past
    forward = Forward(nn.Identity(), torch.zeros(3, 5, 16), {})
    for name in ("window", "probes", "below_mean"):
        assert prompt(None, None, **{name: WINDOW}).reads_past
    assert prompt(forward=forward).reads_past


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


def seen_alone(pending: PendingPrompt) -> Results:
    """What a selector sees of a first prompt."""
    selector = Ranking()
    none = torch.zeros(len(pending.keys), dtype=torch.int64)
    held = torch.empty(len(none), 2, 0, dtype=torch.int32), selector.alloc(len(none), 2, 0, "cpu")
    rank_candidates(contents_of(selector), held, pending, None, none, none)
    return selector.seen[0]


def test_what_a_selector_sees_is_that_of_all_statistics() -> None:
    every = (AttentionSum, RecentQueries, BelowMean, LargestQueries)
    nothing = seen_alone(prompt())
    assert not any(kind in nothing for kind in every)
    found = {"attn_sum": torch.ones(3, 4, 5), "query_absmax": torch.ones(3, 2, 8)}
    seen = seen_alone(prompt(None, None, window=WINDOW, below_mean=WINDOW, **found))
    assert all(kind in seen for kind in every)
    assert seen[AttentionSum] is found["attn_sum"] and seen[LargestQueries] is None, "selectors do not see channels"
    assert seen[RecentQueries].weights.shape == (*seen[BelowMean].shape[:2], WINDOW.at.shape[1], 5)
    assert seen[RecentQueries].sinks is None
    none = torch.zeros(3, dtype=torch.int64)
    assert prompt().lengths(none).tolist() == [5, 5, 5] and prompt(VALID).lengths(none).tolist() == [5, 3, 2]


def test_the_next_chunk_sees_what_slots_before_a_prompt_count_for() -> None:
    counts = torch.rand(3, 2, 4, generator=generator(0))
    past = Past(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), torch.ones(3, 2, 4, dtype=torch.bool), counts)
    after = prompt(VALID).after(past)
    assert after.counts is not None
    assert torch.equal(after.counts, torch.cat([counts, torch.zeros(3, 2, 5)], -1)), "each new token is one"
    assert prompt(VALID).after(past._replace(counts=None)).counts is None


def test_a_window_does_not_keep_a_prompt_alive() -> None:
    queries = newest_queries(torch.randn(3, 4, 50, 8), None, 2).queries
    assert queries.untyped_storage().nbytes() == queries.nbytes


def test_rows_are_selected_everywhere() -> None:
    rows = torch.arange(3.0)

    def of(*shape: int) -> torch.Tensor:
        return rows.view(3, *[1] * len(shape)).expand(3, *shape).clone()

    window = QueryWindow(of(4, 2, 8), of(2).long())
    pending = PendingPrompt(
        of(2, 5, 8),
        of(2, 5, 8),
        torch.tensor([[True] * 5, [False] * 5, [True] * 5]),
        ScoreTransform(1.0),
        gathered(
            attn_sum=of(4, 5),
            window=window,
            probes=QueryWindow(*(t + 10 for t in window)),
            below_mean=QueryWindow(*(t + 20 for t in window)),
            moments=QueryMoments(of(), of(2, 2, 8), of(2, 2, 8, 8)),
            query_absmax=of(2, 8),
            sums=AbsoluteSums(of(4, 8), of(2, 8)),
        ),
        replay=of(2, 5),
    )
    index = torch.tensor([2, 0, 2, 1])
    moved = pending.map_rows(lambda t: t[index])
    pairs: list[Any] = [pair for pair in zip(pending, moved, strict=True) if isinstance(pair[0], torch.Tensor)]
    for before, after in zip(pending.statistics, moved.statistics, strict=True):
        pairs += zip(before.tensors, after.tensors, strict=True)
    for old, new in pairs:
        assert torch.equal(new, old[index])
    assert len(pairs) == 17


def test_it_owns_its_memory_without_copying_twice() -> None:
    whole = torch.randn(3, 2, 50, 8)
    one = prompt()._replace(keys=whole[:, :, :5])
    own = one.owned()
    assert torch.equal(own.keys, one.keys)
    assert own.keys.untyped_storage().nbytes() == own.keys.nbytes
    assert own.values.data_ptr() == one.values.data_ptr(), "what has memory of its own is not copied"


def test_later_changes_of_the_callers_mask_do_not_count() -> None:
    one = prompt(VALID)
    own = one.owned()
    assert one.valid is not None and own.valid is not None
    one.valid.fill_(True)
    assert own.valid.tolist() == VALID


def test_bytes_are_those_of_every_tensor() -> None:
    keys = 3 * 2 * 5 * 8 * 4
    assert prompt().nbytes == 2 * keys
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
    assert prompt(VALID, **more).nbytes == 2 * keys + 15 + extra


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

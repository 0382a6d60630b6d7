"""Requests are split into prefixes and pieces, and costs are summed."""

from __future__ import annotations

import pytest

from kvpolicy_lm_eval.scoring import reported_lengths, split, with_prefixes
from kvpolicy_lm_eval.stats import Stats, Tally

REQUESTS = [(None, [1, 2, 3], [4]), (None, [1, 2, 3], [5, 6]), (None, [7], [8, 9]), (None, [1, 2, 3, 4, 5], [6])]


def test_split_shares_prefixes_longest_first():
    groups = split(REQUESTS, max_length=10, holdback=1)
    assert list(groups) == [(1, 2, 3, 4), (1, 2), ()]
    assert [(p.request, p.tokens, p.scored) for p in groups[1, 2]] == [(0, (3, 4), 1), (1, (3, 5, 6), 2)]


def test_split_cuts_on_the_left_like_lm_eval():
    (prefix, (piece,)), *_ = split([(None, [1, 2, 3, 4, 5], [6, 7])], max_length=4, holdback=1).items()
    assert (prefix, piece.tokens) == ((3, 4), (5, 6, 7))


@pytest.mark.parametrize("answer", [[], [1, 2, 3]])
def test_split_rejects_answers_that_cannot_be_scored(answer: list[int]):
    with pytest.raises(
        ValueError, match=f"An answer must have between 1 and 2 tokens to be scored, got {len(answer)};"
    ):
        split([(None, [1], answer)], max_length=2, holdback=1)


@pytest.mark.parametrize("holdback", [0, 1, 3, 9])
def test_with_prefixes_restores_the_requests(holdback: int):
    pieces = with_prefixes(split(REQUESTS, max_length=10, holdback=holdback))
    assert {p.request: p.tokens for p in pieces} == {i: (*c, *a) for i, (_, c, a) in enumerate(REQUESTS)}


def test_reported_lengths_are_those_of_the_caches():
    groups = split(REQUESTS, max_length=10, holdback=1)
    assert sorted(reported_lengths(groups, rolling=False)) == [2, 2, 4]  # [7] alone feeds two of its three tokens
    assert sorted(reported_lengths(groups, rolling=True)) == [2, 3, 4, 5]


def test_reports_means_per_sequence():
    tally = Tally(requests=3, prompt_tokens=90, new_tokens=10, seconds=2.0)
    tally.add_cache(2, 100, 400)
    tally.add_cache(1, 200, 500)
    report = tally.report()
    assert (report["kv_bytes"], report["full_kv_bytes"], report["kv_share"]) == (100, 300, 0.3333)
    assert (report["tokens_per_second"], report["new_tokens_per_second"]) == (50.0, 5.0)


def test_processes_are_summed():
    stats = Stats()
    stats.replace(
        [{"a": Tally(requests=1, seconds=1.0)}, {"a": Tally(requests=2, seconds=2.0), "b": Tally(requests=5)}]
    )
    assert {name: (t.requests, t.seconds) for name, t in stats.tallies.items()} == {"a": (3, 3.0), "b": (5, 0.0)}

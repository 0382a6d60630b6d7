"""The slow versions of selectors that look at more than attention, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from . import selectors
from .coding import as_it_is
from .engine import ReferenceLayer
from .selectors import Look, caote, defensive, dropkv, lagkv

Rows = Sequence[Sequence[float]]
DIM = 8
PROJECTION = torch.randn(6, 4 * DIM, generator=torch.Generator().manual_seed(0))


def _look(positions: list[int], budget: int, *, keys: Rows = (), values: Rows = (), **more: Any) -> Look:
    """Tokens of a head as a selector sees them, the newest one last."""
    attention = more.pop("attention", None)
    projection = more.pop("projection", None)
    look = Look(
        positions=positions,
        keys=[list(map(float, key)) for key in keys],
        values=[list(map(float, value)) for value in values],
        queries=[],
        scale=1.0,
        undo=as_it_is,
        apply=as_it_is,
        length=positions[-1] + 1,
        memory={},
        scores=[0.0] * len(positions),
        budget=budget,
        attention=None if attention is None else [torch.tensor(m, dtype=torch.float64) for m in attention],
        projection=None if projection is None else [torch.tensor(m) for m in projection],
        report=lambda gap: None,
        layer=0,
        head=0,
    )
    return look._replace(**more)


def _scored(selector: str | dict[str, Any], look: Look) -> Look:
    """The tokens with their new scores."""
    scores = selectors.scores_of_tokens(selectors.complete(selector), look)
    assert scores is not None
    return look._replace(scores=scores)


def _reals(scores: Sequence[complex]) -> list[float]:
    return [score.real for score in scores]


def _worth(selector: str | dict[str, Any], look: Look) -> list[float]:
    return selectors.priorities(selectors.complete(selector), look)


def _layer(selector: str | dict[str, Any], budget: int, **more: Any) -> ReferenceLayer:
    return ReferenceLayer(selector, budget, num_heads=4, num_kv_heads=2, projection=PROJECTION, **more)


def _run(layer: ReferenceLayer, sizes: list[int], alike: bool = False) -> ReferenceLayer:
    """Random tokens, with equal values if they are `alike`."""
    for number, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        q, k, v = (torch.randn(heads, n, DIM, generator=generator) for heads in (4, 2, 2))
        layer.forward(q, k, v * 0 + 1 if alike else v, DIM**-0.5)
    return layer


# ---- knorm


def test_knorm_keeps_short_keys_and_the_newest() -> None:
    look = _scored("knorm", _look([0, 1, 2, 3], 2, keys=[(3, 4), (0, 1), (2, 0), (5, 12)]))
    assert _worth("knorm", look) == [-5, -1, -2, math.inf]


def test_knorm_measures_all_keys_at_a_prompt_and_the_newest_in_decode() -> None:
    look = _look([0, 1], 2, keys=[(3, 4), (0, 2)], scores=[-9 + 1j, 0])
    assert _reals(_scored("knorm", look).scores) == [-5, -2]
    assert selectors.score_of_newest(selectors.complete("knorm"), look) == -2 + 1j


# ---- LagKV

LAG = {"name": "lagkv", "sinks": 0, "lag": 2}
LAG_KEYS = [(1, 2), (2, 0), (0, 0), (2, 4), (9, 9)]
LAG_VALUES = [(0, 0), (2, 4), (0, 0), (2, 4), (9, 9)]


def test_lagkv_stretches_channels_by_the_next_part() -> None:
    """Keys (.5, .5) and (1, 0) deviate by 0 and .7071, values not at all."""
    assert lagkv.normalized([1, 2], [[0, 0], [2, 4]]) == [0.5, 0.5]
    assert lagkv.normalized([1, 2], [[0, 3], [2, 3]]) == [0.5, 0]
    look = _look([*range(5)], 8, keys=LAG_KEYS, values=LAG_VALUES)
    assert lagkv.salience(look, [0, 1], [2, 3]) == pytest.approx([0.415120, 0.584880], abs=1e-6)


def test_lagkv_scores_all_but_the_last_part_and_the_rest() -> None:
    look = _scored(LAG, _look([*range(5)], 8, keys=LAG_KEYS, values=LAG_VALUES))
    assert look.scores == [1j, 0.5 + 1j, 0, 0, 0]
    assert _worth(LAG, look) == [0, 0.5, 1 + 2, 1 + 3, math.inf]


def test_lagkv_goes_on_where_it_stopped() -> None:
    """Tokens 2 and 3 beside 4 and 5, of which the keys reach from 0 to 9 and the values are constant."""
    keys = [*LAG_KEYS, (0, 0)]
    values = [*LAG_VALUES, (9, 9)]
    look = _look([*range(6)], 8, keys=keys, values=values, scores=[1j, 0.5 + 1j, 0, 0, 0, 0])
    assert _scored(LAG, look).scores == [1j, 0.5 + 1j, 1j, 0.5 + 1j, 0, 0]


def test_lagkv_has_shorter_parts_with_little_budget() -> None:
    """Parts of one token rank nothing; half the budget are sinks."""
    config = {**LAG, "sinks": 9}
    look = _scored(config, _look([*range(5)], 4, keys=LAG_KEYS, values=LAG_VALUES))
    assert look.scores == [0, 0, 1j, 1j, 0]
    assert _worth(config, look) == [math.inf, math.inf, 0, 0, math.inf]


def test_lagkv_scores_more_while_generating() -> None:
    layer = _layer({"name": "lagkv", "sinks": 0, "lag": 3}, 12)
    _run(layer, [14])
    assert [sum(bool(score.imag) for score in head) for head in layer.scores] == [9 - 2] * 2
    for number in range(3):
        _run(layer, [1])
        layer.tick()
        new = [score.imag for score in layer.scores[0]][-5 - 1 - number :]
        assert any(new) == (number == 2)


# ---- CUR

CUR_KEYS = [(1, 0), (0.9, 0.1), (0, 1), (0, 0.9)]
CUR_VALUES = [(10, 0), (6, 2), (0, 10), (0, 8)]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("product", [0.351321, 0.115233, 0.351321, 0.182125]),
        ("keys", [0.275482, 0.225895, 0.275482, 0.223140]),
        ("values", [0.328947, 0.131579, 0.328947, 0.210526]),
        ("mean", [0.302215, 0.178737, 0.302215, 0.216833]),
    ],
)
def test_cur(of: str, expected: list[float]) -> None:
    """Squared lengths of keys 1, .82, 1, .81 and of values 100, 40, 100, 64; the numbers recorded add up to 1."""
    config = {"name": "cur", "sinks": 0, "window": 4, "of": of}
    scores = _reals(_scored(config, _look([*range(4)], 4, keys=CUR_KEYS, values=CUR_VALUES)).scores)
    assert [x / sum(scores) for x in scores] == pytest.approx(expected, abs=1e-6)
    assert sum(scores) == pytest.approx(0.257939 if of == "product" else 1, abs=1e-6)


def test_cur_compares_with_the_mean_of_a_window() -> None:
    """The second window has one new token, and one that has its score; nothing is divided by a mean of 0."""
    config = {"name": "cur", "sinks": 1, "window": 4}
    look = _look([0, 1, 3, 5, 6, 8], 4, keys=[(9,), (1,), (2,), (7,), (3,), (0,)], values=[(1,)] * 6)
    look = _scored(config, look._replace(scores=[0, 0, 0, 0.5 + 1j, 0, 0]))
    assert look.scores == [0, 0.4 / 16 + 1j, 1.6 / 16 + 1j, 0.5 + 1j, 1 / 16 + 1j, 1j]
    assert _worth(config, look) == [math.inf, 0.4 / 16, 1.6 / 16, 0.5, 1 / 16, math.inf]
    assert _worth(config, look._replace(scores=[0] * 6))[1:-1] == [1 + 1, 1 + 3, 1 + 5, 1 + 6]


# ---- DefensiveKV


def test_defensive_pooling_keeps_the_sum() -> None:
    assert defensive.pooled([0.3, 0.6, 0, 0.1], 3) == pytest.approx([0.346154, 0.346154, 0.269231, 0.038462], abs=1e-6)
    assert defensive.pooled([0, 0], 3) == [0, 0]


def test_defensive() -> None:
    """The last query gives .1 .5 0 .2: at least the mean, .2; .5 alone is more than half of the sum, .8."""
    rows = [[1, 0, 0, 0, 0], [0.1, 0.5, 0, 0.2, 0.2]]
    config = selectors.complete({"name": "defensive", "window": 1, "kernel": 1, "mass": 0.5})
    here = _look([*range(5)], 4, values=[(1, 1)] * 5, attention=[rows], projection=[[[1.0, 0], [0, 2]]])
    there = _look([0, 3, 4], 4, values=[(6, 0), (0, 0), (1, 0)], attention=[[[0, 1, 0]]], projection=[[[1.0, 0]]])
    scores = selectors.scores_of_layer(config, [here, there])
    assert scores[0] == pytest.approx([0.2 * 3 / 9, 1.5, 0.2, 0.2, 0])
    assert scores[1] == pytest.approx([0.5 * 6 / 9, 2, 0])  # the mean of 0 and 1 is .5
    assert _worth(config, here._replace(scores=scores[0] or []))[-1] == math.inf


def test_defensive_takes_the_most_over_queries_and_the_mean_for_the_first() -> None:
    """Rows (.6, .2), (.2, .4) and (0, .8), (.2, .4) over the past: the most .6, .8, the mean .25, .45."""
    attention = [[[0.6, 0.2, 0.2, 0], [0.2, 0.4, 0.2, 0.2]], [[0, 0.8, 0.2, 0], [0.2, 0.4, 0.2, 0.2]]]
    config = selectors.complete({"name": "defensive", "window": 2, "kernel": 1})
    look = _look([*range(4)], 4, values=[(1,)] * 4, attention=attention, projection=[[[1.0]], [[1.0]]])
    assert selectors.scores_of_layer(config, [look])[0] == pytest.approx([1.25, 1.45, 0, 0])  # .45 < .9 * .7
    config["mass"] = 0.6
    assert selectors.scores_of_layer(config, [look])[0] == pytest.approx([0.7, 1.45, 0, 0])


def test_defensive_says_how_near_the_share_was() -> None:
    gaps: list[float] = []
    look = _look([0], 1, report=gaps.append)
    assert defensive.leading([0.5, 0.25, 0.25], 0.75, 3, look) == {0, 1}
    assert min(gaps) == 0
    assert defensive.leading([0.5, 0.25, 0.25], 1.0, 1, look) == {0}


# ---- DropKV and CAOTE

ROW = [0.1, 0.3, 0.4, 0.2]
VALUES = [[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0], [3.0, 3.0]]


def _change_without(gone: int, row: list[float] = ROW) -> float:
    """How far the output moves if attention never saw a token."""
    p = torch.tensor(row, dtype=torch.float64)
    v = torch.tensor(VALUES, dtype=torch.float64)
    without = p.clone()
    without[gone] = 0
    return float((p @ v - without / without.sum() @ v).norm())


def test_dropkv_is_the_squared_change_of_every_query() -> None:
    """The first query is before the window."""
    other = [0.7, 0.1, 0.1, 0.1]
    config = selectors.complete({"name": "dropkv", "window": 2})
    look = _look([*range(4)], 4, values=VALUES, attention=[[[0.25] * 4, ROW, other], [[0.25] * 4, other, ROW]])
    expected = [2 * (_change_without(j) ** 2 + _change_without(j, other) ** 2) for j in range(4)]
    assert dropkv.scores_of_tokens(config, look) == pytest.approx(expected)
    assert _worth(config, _scored(config, look))[2:] == [math.inf] * 2


def test_dropkv_by_hand() -> None:
    """Output .5, distances .5: odds of 1, twice."""
    look = _look([0, 1], 2, values=[(0,), (1,)], attention=[[[0.5, 0.5]]])
    assert _scored("dropkv", look).scores == [0.25, 0.25]


CAOTE = {"name": "caote", "base": {"name": "h2o", "recent": 0.0}}


def test_caote_is_the_change_without_a_token() -> None:
    """With 20 times the attention of one query as the scores; the newest token stays."""
    look = _scored(CAOTE, _look([*range(4)], 2, values=VALUES, scores=[20 * p for p in ROW]))
    assert look.scores == [20 * p for p in ROW]
    assert _worth(CAOTE, look) == pytest.approx([*(_change_without(j) for j in range(3)), math.inf])


def test_the_square_of_caote_is_dropkv_with_one_query() -> None:
    squares = _scored("dropkv", _look([*range(4)], 2, values=VALUES, attention=[[ROW]])).scores
    look = _scored(CAOTE, _look([*range(4)], 2, values=VALUES, scores=ROW))
    assert [x**2 for x in _worth(CAOTE, look)[:3]] == pytest.approx(squares[:3])


def test_caote_remembers_the_output() -> None:
    """Output (0, 1), or (1, 1) as the mean: the new value (3, 5) is 5 or sqrt(20) away."""
    for fast, distance in [(False, 5), (True, math.sqrt(20))]:
        config = {**CAOTE, "fast": fast}
        look = _look([0, 1], 2, values=[(0, 0), (2, 2)] if fast else [(0, 1), (0, 1)], scores=[1, 1])
        look = _scored(config, look)._replace(positions=[0, 1, 2], values=[[7.0, 7.0]] * 2 + [[3.0, 5.0]])
        assert selectors.score_of_newest(selectors.complete(config), look) is None
        worth = _worth(config, look._replace(scores=[1, 1, 2], length=4))
        assert worth[2] == pytest.approx(distance)  # half of all attention, odds of 1
    assert caote.rerank_every(selectors.complete("caote")) == 128


# ---- CriticalKV

CRITICAL = {"name": "critical", "base": {"name": "h2o", "recent": 0.0}}


def test_critical() -> None:
    """Values of 1 5 2 3 7 count twice: the first is marked as the highest but for the newest, of which one stays."""
    look = _look(
        [*range(5)],
        4,
        values=[(1,), (5,), (-2,), (3,), (7,)],
        scores=[4, 1, 3, 2, 0],
        attention=[[[0.2] * 5]],
        projection=[[[1.0], [-1.0]]],
    )
    look = _scored(CRITICAL, look)
    assert look.scores == [4, 1, 3, 2, 0]
    assert _worth(CRITICAL, look) == pytest.approx([math.inf, 1.001, 1.2004, 1.2006, math.inf])
    later = look._replace(positions=[*range(5), 5, 6], scores=[4, 1, 3, 2, 0, 0, 0], length=7)
    expected = [math.inf, 1.001, 1.2004, 1.2006, math.inf, 7.2e-4, math.inf]  # a mean length of 7.2
    assert _worth(CRITICAL, later) == pytest.approx(expected)


def test_critical_marks_nothing_where_all_stays() -> None:
    look = _look([0, 1], 2, values=[(1,), (2,)], scores=[3, 1], attention=[[[0.5] * 2]], projection=[[[1.0]]])
    assert _worth(CRITICAL, _scored(CRITICAL, look)) == pytest.approx([0.7501, math.inf])


@pytest.mark.parametrize("base", ["h2o", "snapkv"])
def test_critical_without_marks_and_with_equal_values_is_its_base(base: str) -> None:
    layers = [_layer(selector, 12) for selector in (base, {"name": "critical", "base": base, "split": 0.0})]
    plain, wrapped = (_run(layer, [30, 1, 1, 9, 1, 1], alike=True) for layer in layers)
    assert wrapped.positions == plain.positions


# ---- ChunkKV

CHUNK = {"name": "chunk", "base": {"name": "h2o", "recent": 0.0}, "size": 2}


def test_chunk() -> None:
    """Means 2.5 2 4 6 of positions 0 to 3: 2.25 and 5 in the mean; position 5, in a chunk of its own, is kept."""
    here = _look([0, 1, 2, 5], 3, scores=[1, 2, 3, 9], attention=[[[0.0] * 4]])
    there = _look([0, 2, 3, 5], 3, scores=[4, 5, 6, 9], attention=[[[0.0] * 4]])
    assert selectors.scores_of_layer(selectors.complete(CHUNK), [here, there]) == [None, None]
    assert _worth(CHUNK, here) == [2.25, 2.25, 5, math.inf]
    assert _worth(CHUNK, there) == [2.25, 5, 5, math.inf]
    later = here._replace(positions=[0, 2, 5, 6, 7, 8], scores=[1, 3, 9, 0, 0, 0], length=9)
    worth = _worth(CHUNK, later)
    assert worth[:3] == [2.25, 5, 0]
    assert 5 < worth[3] < worth[4] < worth[5] == math.inf


def test_chunks_of_one_token_are_the_sum_of_the_base_over_heads() -> None:
    everything = _run(_layer("h2o", 30), [30])
    summed = [a.real + b.real for a, b in zip(*everything.scores, strict=True)]
    expected = sorted([*selectors.top(summed[:24], 6), *range(24, 30)])
    layer = _run(_layer({"name": "chunk", "base": "h2o", "size": 1}, 12), [30])
    assert layer.positions == [expected] * 2


# ---- what wraps another selector


@pytest.mark.parametrize("name", ["critical", "caote", "chunk"])
@pytest.mark.parametrize("base", ["h2o", "snapkv"])
def test_scores_stay_those_of_the_base(name: str, base: str) -> None:
    """All tokens stay, so that both see the same."""
    plain, wrapped = (_run(_layer(s, 50), [30, 1, 1, 9, 1]) for s in (base, {"name": name, "base": base}))
    assert wrapped.scores == plain.scores


def test_what_needs_attention_refuses_other_bases() -> None:
    for name in ("critical", "caote"):
        with pytest.raises(AssertionError, match="the base must be one of"):
            _run(_layer({"name": name, "base": "window"}, 12), [30])
    with pytest.raises(ValueError, match="kvcrush goes outside"):
        _layer({"name": "chunk", "base": "kvcrush"}, 12)


@pytest.mark.parametrize("base", ["cur", "lagkv", "keydiff", "defensive", "critical", "caote"])
def test_chunk_runs_over_what_looks_at_vectors(base: str) -> None:
    layer = _run(_layer({"name": "chunk", "base": base, "size": 3}, 12), [30, 1, 1, 1, 9, 1])
    assert [len(head) for head in layer.positions] == [12] * 2


# ---- how near choices were


def test_doubtful_numbers_are_nearer() -> None:
    assert selectors.margin([1.0, 0.5, 0.5]) == 0.5
    assert selectors.margin([1.0, 0.5, 0.5], [1.0, 10.0, 1.0]) == 0.05
    assert selectors.margin([1.0, 0.0, 0.0], [1.0, 1.0, math.inf]) == 0
    assert selectors.margin([1e6, 1e6 + 1]) == math.inf
    assert selectors.margin([1.0, math.inf], [math.inf, math.inf]) == math.inf


def test_differences_of_equal_values_are_noise() -> None:
    caote_of_h2o = {"name": "caote", "base": "h2o"}
    assert _run(_layer(caote_of_h2o, 12), [30], alike=True).margin < 1e-6
    assert _run(_layer(caote_of_h2o, 12), [30]).margin > 1e-6


def test_dropkv_takes_equal_values_as_equal() -> None:
    assert {score for head in _run(_layer("dropkv", 12), [30], alike=True).scores for score in head} == {0}

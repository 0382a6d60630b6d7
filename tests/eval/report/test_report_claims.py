"""What a report claims about unusual sweeps: lengths, scales, kinds of budgets, few examples, ties."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.report import curves, tables
from kvpolicy_eval.report.gather import Findings, Score, front, gather
from kvpolicy_eval.report.markdown import markdown
from kvpolicy_eval.report.page import page
from kvpolicy_eval.report.parts import Difference, differences
from kvpolicy_eval.report.sections import positions, sections
from kvpolicy_eval.sweep import tidy
from kvpolicy_eval.sweep.cells import Cell, Store
from tests.eval.report.cells import cell

COIN = [0.0, 1.0] * 10


def accuracies(findings: Findings) -> dict[str, Any]:
    return {point.policy: point.mean and point.mean.value for point in findings.points}


# places of the question


def test_places_of_the_question_are_apart(tmp_path: Path) -> None:
    for task, right in (("a", 1.0), ("b", 0.5), ("a_after", 0.0), ("b_after", 0.25)):
        for policy, factor in (("full", 1.0), ("h2o@0.2", 0.5)):
            share = 1.0 if policy == "full" else 0.1 if task.endswith("_after") else 0.2
            cell(tmp_path, policy, task, share, acc=[right * factor] * 4)
    found = gather(tmp_path)
    assert found.modes == ["inside", "after"] == found.facets
    points = {point.policy: point for point in found.points}
    h2o = points["h2o@0.2"]
    assert [score and score.value for score in map(h2o.score, ("inside", "after", "second", None))] == [
        0.375,
        0.0625,
        None,
        0.21875,
    ]
    assert [h2o.average("kv_share", mode) for mode in ("inside", "after")] == [0.2, 0.1]
    by_mode = tables.by_mode(found, "m")
    assert by_mode.head == ["policy", "inside", "after"]
    assert [row[1][:4] for row in by_mode.rows] == ["0.75", "0.38"] and by_mode.rows[0][2].startswith("0.12")
    parts = {section.key: section for section in sections(found)}
    assert list(parts["bytes"].tables) == ["m, inside", "m, after"]
    assert all(title in parts["bytes"].figures[0] for title in ("m, question inside", "m, question after"))
    assert parts["bytes"].tables["m, after"].rows[1][-1] == "10.0%"
    assert list(parts)[:2] == ["bytes", "modes"]


def test_one_place_of_the_question_is_not_named(tmp_path: Path) -> None:
    for policy in ("full", "h2o@0.2"):
        cell(tmp_path, policy, "a_after", acc=[0.5] * 4)
    found = gather(tmp_path)
    assert found.facets == [None] and "modes" not in [section.key for section in sections(found, draw=False)]
    assert list(sections(found, draw=False)[0].tables) == ["m"]


# RULER's lengths


def test_a_length_that_was_not_measured_is_never_chosen(tmp_path: Path) -> None:
    """RULER writes -1 for an example of another length, and its mean leaves those out."""
    mixed = [-1.0, 1.0] * 10 + [-1.0, 0.0] * 10
    for policy in ("full", "h2o@0.2"):
        lengths: dict[str, Any] = {"16384": [-1.0] * 40, "4096": (mixed, 0.5)}
        cell(tmp_path, policy, "niah", **lengths)
    assert {row.metric for row in tidy.collect(tmp_path)} == {"4096"}
    findings = gather(tmp_path)
    assert findings.metrics == {"niah": "4096,none"}
    assert accuracies(findings) == {"full": 0.5, "h2o@0.2": 0.5}
    for point in findings.points:
        assert point.tasks["niah"].examples == 20
        assert 0.2 < point.tasks["niah"].low < 0.5 < point.tasks["niah"].high < 0.8


def test_values_that_are_minus_one_stay_where_they_are_measured(tmp_path: Path) -> None:
    cell(tmp_path, "full", "signs", score=[-1.0, 1.0, 1.0, 1.0])
    (row,) = tidy.collect(tmp_path)
    assert (row.value, row.examples, row.high) == (0.5, 4, 1.0)


# budgets of several kinds


@pytest.fixture
def mixed(tmp_path: Path) -> Findings:
    """A number of tokens that is more than one share and less than the other, and the full cache."""
    for budget, share in (("0.5", 0.5), ("0.05", 0.06), ("200", 0.2), ("1MiB", 0.3)):
        cell(tmp_path, f"h2o@{budget}", "recall", share, acc=COIN)
    cell(tmp_path, "full", "recall", 1.0, acc=COIN)
    return gather(tmp_path)


def test_the_smallest_budget_is_that_of_fewest_bytes(mixed: Findings) -> None:
    assert [point.policy for point in curves.smallest(mixed, "m")] == ["full", "h2o@0.05"]


def test_mixed_budgets_stand_at_the_bytes_they_held(mixed: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(curves.Drawing, "svg", lambda self, _: drawn.append(self.axes[0]) or "")
    curves.accuracy_by_budget(mixed, "m")
    (axes,) = drawn
    line = next(line for line in axes.lines if len(line.get_xdata()) == 4)
    assert list(line.get_xdata()) == pytest.approx([50, 30, 20, 6], rel=0.01)
    assert axes.get_xlabel() == "bytes held, % of the full cache"
    mixed.points = [point for point in mixed.points if point.budget == "200"]
    curves.accuracy_by_budget(mixed, "m")
    assert drawn[1].get_xlabel() == "budget, tokens per layer"
    assert list(drawn[1].lines[0].get_xdata()) == pytest.approx([200], rel=0.01)


# means


def test_a_mean_is_of_scores_between_0_and_1(tmp_path: Path) -> None:
    for policy in ("full", "h2o@0.2"):
        cell(tmp_path, policy, "recall", acc=COIN)
        cell(tmp_path, policy, "translate", bleu=[10.0, 60.0])
        cell(tmp_path, policy, "corpus", chrf=([["a", "b"]], 0.9))
    findings = gather(tmp_path)
    assert (findings.averaged, findings.excluded) == (["recall"], ["corpus", "translate"])
    assert accuracies(findings) == {"full": 0.5, "h2o@0.2": 0.5}
    text = sections(findings, draw=False)[0].text
    assert text.startswith("Means over `recall`, ")
    assert text.endswith("Not in the mean, because some of their scores lie outside 0 and 1: `corpus`, `translate`.")


def test_the_only_task_may_have_any_scale(tmp_path: Path) -> None:
    cell(tmp_path, "full", "translate", bleu=[10.0, 60.0])
    assert accuracies(gather(tmp_path)) == {"full": 35.0}


def test_no_mean_is_said_as_it_is(tmp_path: Path) -> None:
    for policy in ("h2o@0.2", "squeeze+h2o@0.2"):
        cell(tmp_path, policy, "text", higher=False, perplexity=[9.0] * 20)
    found = {section.key: section for section in sections(gather(tmp_path), draw=False)}
    assert found["bytes"].text.startswith("There is no mean accuracy") and "bold" not in found["bytes"].text
    assert found["parts"].text == "No two policies with a mean accuracy differ in a single part."


# differences


@pytest.mark.parametrize(
    ("low", "high", "fewest", "verdict"),
    [
        (0.1, 0.3, 10, "better"),
        (-0.3, -0.1, 10, "worse"),
        (-0.1, 0.3, 10, "no difference shown"),
        (0.1, 0.3, 9, "too few examples"),
        (math.nan, math.nan, 10, "no interval"),
    ],
)
def test_a_verdict_wants_examples_and_an_interval(
    low: float, high: float, fewest: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Difference("m", "squeeze+h2o@0.2", "h2o@0.2", "layer budgets", Score(0.2, low, high, 40), fewest)
    row = tables.changes([one]).rows[0]
    assert row[-1] == verdict and "nan" not in row[-2]
    hollow: list[bool] = []
    monkeypatch.setattr(curves, "_dot", lambda *arguments: hollow.append(arguments[4].dashed))
    curves.differences_plot([one])
    assert hollow == [verdict not in ("better", "worse")]


def test_the_task_with_fewest_examples_counts(tmp_path: Path) -> None:
    for policy, right in (("h2o@0.2", 0.0), ("squeeze+h2o@0.2", 1.0)):
        cell(tmp_path, policy, "many", acc=[right] * 20)
        cell(tmp_path, policy, "few", acc=[right] * 9)
    (one,) = differences(gather(tmp_path))
    assert (one.score.low, one.fewest, one.verdict) == (1.0, 9, "too few examples")
    assert "fewer than 10 examples, no verdict" in sections(gather(tmp_path), draw=False)[2].text


def test_a_score_that_is_no_number_is_in_no_mean(tmp_path: Path) -> None:
    cell(tmp_path, "h2o@0.2", "recall", acc=COIN)
    cell(tmp_path, "squeeze+h2o@0.2", "recall", acc=([math.nan], math.nan))
    findings = gather(tmp_path)
    assert accuracies(findings) == {"h2o@0.2": 0.5, "squeeze+h2o@0.2": None}
    assert not differences(findings) and [point.policy for point in front(findings.points)] == ["h2o@0.2"]
    assert tables.accuracy(findings, "m").rows[1][1] == "a score is missing"


# names and groups


def test_a_groups_probes_are_drawn(tmp_path: Path) -> None:
    """A cell of a group has the group's name, and its scores those of its tasks."""
    for policy in ("h2o@0.2", "tova@0.2"):
        cell(tmp_path, policy, "recall", acc=COIN)
    findings = gather(tmp_path)
    for point in findings.points:
        point.probes = {name: {"kept": [[100, 0]] * 2, "layers": [0, 1]} for name in ("group", "other")}
    section = positions(findings, draw=True)
    assert len(section.figures) == 1 and section.figures[0].startswith("<h3>m, group</h3><svg")
    assert list(section.folded) == ["m, other"]


def test_names_and_errors_break_nothing(tmp_path: Path) -> None:
    model = r"<b>$\a$ & $\frac$"
    cell(tmp_path, "h2o@0.2", "recall", model=model, acc=COIN)
    failed = Cell(model=model, task="recall", method="tova")
    Store(tmp_path).fail(failed, ValueError("a|b"), 1.0)
    findings = gather(tmp_path)
    findings.points[0].probes = {"recall": {"kept": [[100, 0]] * 2, "layers": [0, 1]}}
    text = page(findings)
    assert "<b>" not in text and "&lt;b&gt;$\\a$ &amp; $\\frac$" in text
    assert r"ValueError: a\|b |" in markdown(findings)
    assert table(["a"], [["x|y\nz"]]).splitlines()[2:] == [r"| x\|y z |"]


def test_equals_are_in_bold_together(tmp_path: Path) -> None:
    for policy in ("h2o@0.2", "tova@0.2", "snapkv@0.2"):
        cell(tmp_path, policy, "recall", 0.2, acc=COIN if policy != "snapkv@0.2" else [0.0] * 20)
    bold = [row[0] for row in tables.accuracy(gather(tmp_path), "m").rows if row[1].startswith("**")]
    assert bold == ["`h2o`", "`tova`"]

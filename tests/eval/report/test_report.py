"""The report of a sweep: its sections, numbers and claims, on a page that loads nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvpolicy_eval import cli
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.report import curves, tables
from kvpolicy_eval.report.gather import Findings, Score, front, gather
from kvpolicy_eval.report.markdown import markdown
from kvpolicy_eval.report.page import page
from kvpolicy_eval.report.parts import Difference, differences
from kvpolicy_eval.report.sections import positions, sections
from kvpolicy_eval.sweep import tidy
from kvpolicy_eval.sweep.cells import Cell, Store, write
from tests.eval.pages import page_with
from tests.html_pages import Page


def cell(
    folder: Path,
    policy: str,
    task: str,
    share: float = 0.5,
    higher: bool = True,
    model: str = "m",
    probe: dict[str, Any] | None = None,
    **metrics: Any,
) -> None:
    """Write a cell: each metric has its examples, and, where lm-eval would not take their mean, what it found."""
    method, _, budget = policy.partition("@")
    fields = {"model": model, "task": task, "method": method, "budget": budget}
    found = {name: one if isinstance(one, tuple) else (one, sum(one) / len(one)) for name, one in metrics.items()}
    cost = {"kv_bytes": int(4e6 * share), "full_kv_bytes": 4 * 10**6, "kv_share": share}
    cost |= {"tokens_per_second": 1000 / share, "new_tokens_per_second": 50.0}
    record: dict[str, Any] = {"cell": fields, "seconds": 1.0, "peak_bytes": None, "probe": probe or {}}
    record["scores"] = {task: {f"{name},none": values for name, (values, _) in found.items()}}
    values = {f"{name},none": value for name, (_, value) in found.items()}
    results = {
        "results": {task: {"alias": task, **values, **{f"{name}_stderr,none": "N/A" for name in found}}},
        "higher_is_better": {task: dict.fromkeys(metrics, higher)},
        "config": {"kvpolicy": {"tasks": {f"{task}/generate_until": cost}}},
        "kvpolicy_sweep": record | {"versions": {"torch": "2.13.0", "kvpolicy": "0.1.0"}},
    }
    Store(folder).finish(Cell(**fields), results, {})


METHODS = {"full": 0.95, "h2o": 0.5, "squeeze+h2o": 0.6, "kvcrush/h2o": 0.45, "kivi:bits=4": 0.9}
TASKS = ["recall", "choice"]
KEYS = ["bytes", "budget", "parts", "layers", "positions", "costs", "run", "failed"]


def measured(folder: Path, task: str, policy: str, share: float) -> None:
    """Write what a sweep finds of 40 examples, of which the share that is right follows from the bytes."""
    method = policy.partition("@")[0]
    draw = Random(task)
    right = METHODS[method] * share**0.1
    probe: dict[str, Any] = {"cosine": [0.3, 0.9, 0.95, 0.99]}
    if method != "full":
        late = [[100 * (at >= 40) for at in range(48)] for _ in range(4)]
        budgets = [30.0, 10.0, 10.0, 30.0] if "squeeze" in method else [20.0] * 4
        probe |= {"layers": [0, 1, 2, 3], "prompt": 100.0, "budget": budgets, "kept": late}
    scores = [float(draw.random() < right) for _ in range(40)]
    cell(folder, policy, task, share, model="embedded", probe=probe, acc=scores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nothing was measured for: the numbers are made up."""
    place = tmp_path_factory.mktemp("report")
    store = Store(place)
    for task in TASKS:
        for method in METHODS:
            for share in (0.2, 0.1) if "h2o" in method else (1.0 if method == "full" else 0.4,):
                measured(place, task, f"{method}@{share}" if "h2o" in method else method, share)
    store.fail(Cell(model="embedded", task="recall", method="tova", budget="0.001"), ValueError("<b>small</b>"), 0.1)
    config = {"name": "made-up", "about": "A `test`.", "tasks": TASKS, "policies": list(METHODS)}
    note = {"config": config, "commands": ["kvpolicy-eval sweep made-up"], "settings": {"limit": 40}}
    write(place / "sweep.json", json.dumps(note))
    return place


@pytest.fixture(scope="module")
def findings(folder: Path) -> Findings:
    return gather(folder)


@pytest.fixture(scope="module")
def html(findings: Findings) -> str:
    return page(findings)


def test_the_page_is_whole_and_loads_nothing(html: str) -> None:
    read = Page(html)
    assert [key for key in read.ids if key in KEYS] == KEYS
    assert read.tags["svg"] >= 7 and not {"script", "iframe", "link", "object"} & read.tags.keys()
    assert all(target.startswith(("#", "data:image/png;base64,")) for target in read.refers), read.refers
    assert not re.search(r"https?:|url\((?!#)|@import|<script", html)
    assert len(read.ids) == len(set(read.ids)), "an id twice"
    assert len(html) < 1_000_000


def test_the_page_has_the_readers_colors_and_shows_text_as_text(html: str) -> None:
    assert "prefers-color-scheme: dark" in html and "currentColor" in html
    assert "#010203" not in html and "fill: #000000" not in html.lower()
    assert "ValueError: &lt;b&gt;small&lt;/b&gt;" in html and "<b>small" not in html
    assert "<code>kvpolicy-eval sweep made-up</code>" in html and "2.13.0" in html
    assert "<title>squeeze+h2o@0.2: " in html, "what a marker says"


def test_every_accuracy_has_an_interval(findings: Findings) -> None:
    for point in findings.points:
        assert point.mean is not None
        assert point.mean.low <= point.mean.value <= point.mean.high
        assert point.mean.high - point.mean.low < max(s.high - s.low for s in point.tasks.values()), "more examples"
    for section in sections(findings, draw=False)[:2]:
        for each in section.tables.values():
            scores = [cell for row in each.rows for cell in row[1:-1] if cell]
            assert scores and all(re.fullmatch(r"(\*\*)?\d\.\d\d \[\d\.\d\d, \d\.\d\d\](\*\*)?", one) for one in scores)


def test_differences_are_of_one_part(findings: Findings) -> None:
    found = {(one.policy, one.base): one for one in differences(findings)}
    assert {(a, b): one.part for (a, b), one in found.items()} == {
        ("squeeze+h2o@0.2", "h2o@0.2"): "layer budgets",
        ("squeeze+h2o@0.1", "h2o@0.1"): "layer budgets",
        ("kvcrush/h2o@0.2", "h2o@0.2"): "representatives",
        ("kvcrush/h2o@0.1", "h2o@0.1"): "representatives",
        ("kivi:bits=4", "full"): "codec",
    }
    points = {point.policy: point for point in findings.points}
    one = found["squeeze+h2o@0.2", "h2o@0.2"]
    mean = points["squeeze+h2o@0.2"].mean
    base = points["h2o@0.2"].mean
    assert mean and base and one.score.value == pytest.approx(mean.value - base.value)
    assert one.score.high - one.score.low < mean.high - mean.low, "pairs differ less than samples do"


def test_layers_and_positions(findings: Findings) -> None:
    rows = tables.layers(findings, "embedded").rows
    assert ["budget, `squeeze+h2o@0.1`", "1.50", "0.50", "0.50", "1.50"] in rows
    assert not any("`h2o" in row[0] for row in rows), "even layers say nothing"
    assert ["cosine, recall", "0.300", "0.900", "0.950", "0.990"] in rows
    kept = {row[0]: row[2:] for row in tables.positions(findings, "embedded").rows}
    assert kept["`h2o@0.1`"] == ["0%", "0%", "0%", "100%", "50%"]


def test_a_task_that_is_missing_leaves_no_mean(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "part")
    missing = Cell(model="embedded", task="choice", method="h2o", budget="0.2")
    (tmp_path / "part" / missing.folder / "results.json").unlink()
    found = gather(tmp_path / "part")
    assert next(point for point in found.points if point.policy == "h2o@0.2").mean is None
    assert "a score is missing" in str(tables.accuracy(found, "embedded").rows)
    assert not [one for one in differences(found) if one.base == "h2o@0.2"]


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = page_with(tmp_path / "guide.md", "made-up-parts")
    words = ["report", str(folder), "--out", str(tmp_path / "a.html"), "--markdown", str(tmp_path / "a.md")]
    assert cli.main([*words, "--fill", str(place)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    said = (tmp_path / "a.md").read_text(encoding="utf-8")
    assert [line[3:] for line in said.splitlines() if line.startswith("## ")] == [
        section.title for section in sections(gather(folder), draw=False)
    ]
    assert "| layer budgets | `squeeze+h2o@0.2` | `h2o@0.2` | +" in place.read_text(encoding="utf-8")
    assert (tmp_path / "a.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("arguments", [["--fill", "none.md"], []])
def test_refusals(arguments: list[str], folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none.md").write_text("no place", encoding="utf-8")
    assert cli.main(["report", str(folder if arguments else tmp_path), "--no-page", *arguments]) == 2
    error = capsys.readouterr().err
    assert ("has no place for made-up" if arguments else "holds no results of a sweep; run kvpolicy-eval") in error


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
def test_a_browser_shows_it(html: str, tmp_path: Path) -> None:
    """The whole page has a picture, ask for nothing, and says nothing on its console."""
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    common = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    common += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0", "--window-size=1180,3000"]
    words = [*common, "--dump-dom", f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "page.html").as_uri()]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in ran.stderr and "ERR_NAME_NOT_RESOLVED" not in ran.stderr
    picture = (tmp_path / "page.png").read_bytes() if (tmp_path / "page.png").exists() else b""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 50_000


COIN = [0.0, 1.0] * 10


def accuracies(findings: Findings) -> dict[str, Any]:
    return {point.policy: point.mean and point.mean.value for point in findings.points}


def test_places_of_the_question_are_apart(tmp_path: Path) -> None:
    for task, right in (("a", 1.0), ("b", 0.5), ("a_after", 0.0), ("b_after", 0.25)):
        for policy, factor in (("full", 1.0), ("h2o@0.2", 0.5)):
            share = 1.0 if policy == "full" else 0.1 if task.endswith("_after") else 0.2
            cell(tmp_path, policy, task, share, acc=[right * factor] * 4)
    found = gather(tmp_path)
    assert found.modes == ["inside", "after"] == found.facets
    points = {point.policy: point for point in found.points}
    h2o = points["h2o@0.2"]
    scores = [score and score.value for score in map(h2o.score, ("inside", "after", "second", None))]
    assert scores == [0.375, 0.0625, None, 0.21875]
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
    cell(tmp_path / "other", "full", "signs", score=[-1.0, 1.0, 1.0, 1.0])
    (row,) = tidy.collect(tmp_path / "other")
    assert (row.value, row.examples, row.high) == (0.5, 4, 1.0), "-1 of one metric is a value"


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


def test_a_mean_is_of_scores_between_0_and_1(tmp_path: Path) -> None:
    for policy in ("full", "h2o@0.2"):
        cell(tmp_path, policy, "recall", acc=COIN)
        cell(tmp_path, policy, "translate", bleu=[10.0, 60.0])
        cell(tmp_path, policy, "corpus", chrf=([["a", "b"]], 0.9))
    findings = gather(tmp_path)
    assert (findings.averaged, findings.excluded) == (["recall"], ["corpus", "translate"])
    assert accuracies(findings) == {"full": 0.5, "h2o@0.2": 0.5}
    cell(tmp_path / "alone", "full", "translate", bleu=[10.0, 60.0])
    assert accuracies(gather(tmp_path / "alone")) == {"full": 35.0}, "the only task may have any scale"
    text = sections(findings, draw=False)[0].text
    assert text.startswith("Means over `recall`, ")
    assert text.endswith("Not in the mean, because some of their scores lie outside 0 and 1: `corpus`, `translate`.")


def test_no_mean_is_said_as_it_is(tmp_path: Path) -> None:
    for policy in ("h2o@0.2", "squeeze+h2o@0.2"):
        cell(tmp_path, policy, "text", higher=False, perplexity=[9.0] * 20)
    found = {section.key: section for section in sections(gather(tmp_path), draw=False)}
    assert found["bytes"].text.startswith("There is no mean accuracy") and "bold" not in found["bytes"].text
    assert found["parts"].text == "No two policies with a mean accuracy differ in a single part."


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

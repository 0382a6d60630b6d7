"""The report of a sweep: its sections and numbers, on a page that loads nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvpolicy_eval import cli
from kvpolicy_eval.report import tables
from kvpolicy_eval.report.gather import Findings, Point, front, gather
from kvpolicy_eval.report.page import page
from kvpolicy_eval.report.parts import differences
from kvpolicy_eval.report.sections import sections
from kvpolicy_eval.sweep.cells import Cell, Store, write
from tests.eval.pages import page_with
from tests.eval.report.cells import cell
from tests.html_pages import Page

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


def test_the_page_takes_the_readers_colors(html: str) -> None:
    assert "prefers-color-scheme: dark" in html and "currentColor" in html
    assert "#010203" not in html and "fill: #000000" not in html.lower()


def test_the_page_shows_text_as_text(html: str) -> None:
    assert "ValueError: &lt;b&gt;small&lt;/b&gt;" in html and "<b>small" not in html
    assert "<code>kvpolicy-eval sweep made-up</code>" in html and "2.13.0" in html
    assert "<title>squeeze+h2o@0.2: " in html, "what a marker says"


def test_every_accuracy_has_an_interval(findings: Findings) -> None:
    for point in findings.points:
        assert point.mean is not None
        assert point.mean.low <= point.mean.value <= point.mean.high
        assert point.mean.high - point.mean.low < max(s.high - s.low for s in point.tasks.values()), "more examples"
    for section in sections(findings, draw=False)[:2]:
        for table in section.tables.values():
            scores = [cell for row in table.rows for cell in row[1:-1] if cell]
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


def worth(point: Point) -> tuple[float, float]:
    """Accuracy and lightness: the higher the better."""
    return point.mean.value if point.mean else 0.0, -(point.average("kv_share") or 0.0)


def test_the_front_is_what_nothing_beats(findings: Findings) -> None:
    best = front(findings.points)
    for point in findings.points:
        right, light = worth(point)
        others = [worth(other) for other in findings.points]
        beaten = any(other != (right, light) and other[0] >= right and other[1] >= light for other in others)
        assert (point in best) == (not beaten), point.policy


def test_layers_and_positions(findings: Findings) -> None:
    rows = tables.layers(findings, "embedded").rows
    assert ["budget, `squeeze+h2o@0.1`", "1.50", "0.50", "0.50", "1.50"] in rows
    assert not any("`h2o" in row[0] for row in rows), "even layers say nothing"
    assert ["cosine, recall", "0.300", "0.900", "0.950", "0.990"] in rows
    kept = {row[0]: row[2:] for row in tables.positions(findings, "embedded").rows}
    assert kept["`h2o@0.1`"] == ["0%", "0%", "0%", "100%", "50%"]


def test_a_task_that_is_missing_leaves_no_mean(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "part")
    (
        tmp_path / "part" / Cell(model="embedded", task="choice", method="h2o", budget="0.2").folder / "results.json"
    ).unlink()
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
    assert (
        "has no place for made-up" if arguments else "holds no results of a sweep; run kvpolicy-eval sweep"
    ) in error


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

"""`kvpolicy tune`: a file from texts, its evidence, and what `explain` says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.cli.app import main
from kvpolicy.cli.commands import tune
from kvpolicy.tuning import tune as measuring
from kvpolicy_eval.data.windows import windows
from tests.cli.conftest import Facts, Run

GRID = ["--policy", "snapkv", "--policy", "snapkv+tokenwise:bits=4", "--shares", "0.1,0.4,1.0", "--quiet"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = windows(["recall"], "inside", 4, 0, 512)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_policy_is_tuned_compared_and_explained(texts: Path, tmp_path: Path, run: Run, facts: Facts) -> None:
    out = tmp_path / "plan.json"
    call = ["tune", "tiny", "--text", str(texts), "--out", str(out), "--budget", "0.2", "--held-out", "0.5", *GRID]
    found = facts([*call, "--rival", "snapkv", "--rival", "window"])
    assert found["policy"] == f"tuned:file={out}@0.2" and found["texts"] == {"tuned": 2, "held_out": 2}
    assert found["candidates"] == 6 and found["evidence"]["rivals"] == 2
    text = tune._render(found)
    assert "On 2 texts that were held out, beside the best of 2 ordinary" in " ".join(text.split())
    rows = [re.split("  +", line.strip()) for line in text.splitlines() if "  " in line]
    assert rows[0] == ["answered", "same token", "KL", "bytes"] and [row[0] for row in rows[1:]] == ["tuned", "snapkv"]
    for row, name in zip(rows[1:], ("tuned", "ordinary"), strict=True):
        scores = found["evidence"][name]
        assert row[1:] == [
            *(f"{scores[measure]:.1%}" for measure in ("correct", "top1")),
            f"{scores['kl']:.4f}",
            f"{scores['nbytes']:,.0f}",
        ]
    told = facts(["explain", found["policy"]])
    assert told["tuned"]["evidence"]["0.2"]["verdict"] == found["evidence"]["verdict"] and len(told["layers"]) == 8
    text = run(["explain", found["policy"]])
    assert "Evidence on texts that were held out" in text and "at half" in text
    assert "--force" in run([*call, "--no-evidence"], 2)
    text = " ".join(run([*call, "--no-evidence", "--force"]).split())
    assert f"Use it with tuned:file={out}@0.2" in text


def test_an_interrupted_one_says_that_it_continues(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = measuring._measured
    calls: list[int] = []

    def stops(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*given)

    monkeypatch.setattr(measuring, "_measured", stops)
    out = tmp_path / "plan.json"
    call = ["tune", "tiny", "--text", str(texts), "--out", str(out), "--budget", "0.2", "--no-evidence", *GRID]
    assert main(call) == 130
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1] == f"Interrupted. The same command continues from {out}.unfinished."
    assert main(call) == 0 and len(calls) == 5  # of four texts, the first one is known
    assert "Interrupted" not in capsys.readouterr().err


def test_plain_text_is_cut(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "text.txt"
    file.write_text("tiger=4821\nlion=1234\nwolf=9310\n" * 40)
    out = tmp_path / "new" / "plan.json"
    call = ["tune", "tiny", "--text", str(file), "--out", str(out), "--no-evidence", *GRID]
    assert "Wrote" in run([*call, "--prompt", "60", "--answer", "8", "--windows", "2", "--measure", "output"])
    assert out.is_file(), "the folder is made"


def test_the_bar_shows_how_many_texts_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    bar = tune._Bar()
    for done in (1, 2, 3):
        bar(done, 3)
    assert "measuring: 100%" in capsys.readouterr().err and (bar._bar.n, bar._bar.total) == (3, 3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budget", "2.5"], "budget"),
        (["--measure", "mean"], "--measure must be one of joint, kl, output"),
        (["--shares", "a"], "--shares must be fractions"),
        (["--policy", "squeeze+h2o"], "same budget"),
        (["--policy", "nothing"], "must have a registered name"),
        (["--held-out", "2"], "between 0 and 1"),
        (["--out", "FOLDER", "--force"], "The file to write must be a file, got the folder"),
        (["--text", "none.txt"], "none.txt must be readable UTF-8 text, got no such file or directory; try"),
        (["--rival", "snapvk"], "must have a registered name"),
        (["--rival", "snapkv", "--no-evidence"], "--rival must be given without --no-evidence, which compares"),
        (["--rival", "snapkv@0.1"], "--rival must be without a budget, got snapkv@0.1; try snapkv with"),
        (["--policy", "h2o@0.1"], "--policy must be without a budget, got h2o@0.1; try h2o with --shares"),
        (["--held-out", "0.25"], "held out must be at least two to compare policies on, got 1; try a larger"),
        (["--seed", str(2**64)], "Invalid value for '--seed'"),
        (["--budget", "1MiB"], "must exceed the 1000000000 bytes that layers without a policy hold of a text, got"),
        (["--budget", "1KiB", "--no-evidence"], "got 1024 bytes, which is less than the"),
    ],
)
def test_refused(
    more: list[str], message: str, texts: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    monkeypatch.setattr("kvpolicy.tuning.tune._measured", lambda *_: pytest.fail("is measured"))
    monkeypatch.setattr("kvpolicy.tuning.proof.unmanaged_bytes", lambda *_: 10**9)
    call = ["tune", "tiny", "--text", str(texts), "--out", "FOLDER/plan.json", "--held-out", "0.5", *GRID, *more]
    assert message in run([word.replace("FOLDER", str(tmp_path)) for word in call], 2)
    assert not (tmp_path / "plan.json").exists()

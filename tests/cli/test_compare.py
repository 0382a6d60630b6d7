"""`kvpolicy compare`: the scores of the tuner on texts of one's own, and the progress of a long command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.cli.app import main
from kvpolicy.cli.commands.compare import wilson
from kvpolicy.cli.formatting import Progress
from kvpolicy.tuning.evidence import reference_logits, score
from kvpolicy.tuning.windows import Window, read_windows
from tests.cli.conftest import Facts, Run

LINES = [
    {"prompt": "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n", "question": "?lion=", "answer": "1234"},
    {"prompt": "tiger=1821\nlion=1235\nwolf=9210\nsheep=7765\n", "question": "?sheep=", "answer": "7765"},
    {"prompt": "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n?tiger=4821\n?wolf=", "answer": "9310"},
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.mark.parametrize("tile", ["none", "9"])
def test_scores_are_those_of_the_tuner(text: Path, tile: str, facts: Facts) -> None:
    policies = ["full", "window@0.3", "snapkv@0.5"]
    named = [word for policy in policies for word in ("--policy", policy)]
    found = facts(["compare", "tiny", "--text", str(text), *named, "--tile", tile])
    assert found["texts"] == 3
    model, tokenizer = kvpolicy.tiny()
    windows = read_windows(tokenizer, text)
    reference = reference_logits(model, windows)
    for row, policy in zip(found["policies"], policies, strict=True):
        scored = score(model, windows, policy, reference=reference)
        assert row["answered"] == int(scored.correct.sum())
        assert row["kl"] == pytest.approx(float(scored.kl.mean()), abs=1e-3)
        assert row["same_token"] == pytest.approx(float(scored.top1.mean()), abs=1e-6)
        assert row["bytes"] == scored.nbytes and row["seconds"] > 0 and row["peak_bytes"] > 0
    assert "compared_with_the_first" not in found["policies"][0]
    assert found["policies"][1]["compared_with_the_first"]["verdict"] == "too few"


def test_the_table(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "tiny", "--text", str(text), "--policy", "full", "--policy", "window@0.3"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "full cache, for KL ...\nfull ...\nwindow@0.3 ...\n"
    said = " ".join(shown.out.split())
    assert "policy answered same token KL bytes peak seconds" in said
    assert "3 of 3 (44%-100%)" in said and "3 texts are too few to compare window@0.3 with full" in said


def test_a_verdict_has_the_margin_of_the_command(tmp_path: Path, facts: Facts) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [LINES[0] | {"prompt": f"cat={number}\n" + LINES[0]["prompt"]} for number in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["compare", "tiny", "--text", str(path), "--policy", "full", "--policy", "window@0.3"]
    verdicts: list[str] = []
    for margin in ("0", "1000"):
        found = facts([*words, "--margin", margin])["policies"][1]["compared_with_the_first"]
        assert found["margin"] == float(margin) and found["sentence"].startswith("window@0.3 is ")
        verdicts.append(found["verdict"])
    assert verdicts == ["worse", "as good"]


def test_json_has_no_progress(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "tiny", "--text", str(text), "--policy", "window@0.5", "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_one_text_has_no_interval_of_its_divergence(text: Path, facts: Facts) -> None:
    words = ["--policy", "full", "--policy", "window@0.3", "--windows", "1"]
    found = facts(["compare", "tiny", "--text", str(text), *words])
    assert found["texts"] == 1 and found["policies"][1]["kl_interval"] is None
    assert "compared_with_the_first" not in found["policies"][1]


def test_a_reference_in_tiles_is_that_of_one_piece() -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer(LINES[0]["prompt"], return_tensors="pt").input_ids[0]
    windows = [Window(ids, ids[:4], ids[4:9])]
    whole, tiled = (reference_logits(model, windows, tile)[0] for tile in (None, 7))
    torch.testing.assert_close(tiled, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "answer", "message"),
    [
        (["--policy", "full", "--policy", "full@1.0"], "1234", "--policy must name each policy once"),
        (["--policy", "snapkw@0.2"], "1234", "snapkw"),
        (["--policy", "full", "--tile", "x"], "1234", "--tile must be a number of tokens"),
        (["--policy", "full", "--margin", "-1"], "1234", "margin must be a number from 0, got -1.0; try 0.01."),
        (["--policy", "full", "--policy", "full+lowrank:rank=99"], "1234", "got 99"),
        (["--policy", "full", "--policy", "snapkv@1KiB"], "1234", "The budget must be at least "),
        (["--policy", "full", "--tile", "none"], "1234\n" * 900, "must fit into 2,048 positions, got "),
    ],
)
def test_errors(
    words: list[str], answer: str, message: str, text: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured."""
    text.write_text(json.dumps({"prompt": "tiger=4821\n?tiger=", "answer": answer}))
    monkeypatch.setattr("kvpolicy.tuning.evidence.reference_logits", lambda *_: pytest.fail("is measured"))
    assert message in run(["compare", "tiny", "--text", str(text), *words], 2)


def test_a_policy_that_the_model_does_not_take_is_refused_before_others_run(
    text: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kvpolicy.attach

    def attach(model: Any, policy: kvpolicy.Policy, **options: Any) -> Any:
        if policy.budget != 1.0:
            raise kvpolicy.KVPolicyError("The model must be another one.")
        return real(model, policy, **options)

    monkeypatch.setattr("kvpolicy.hf.attach.attach", attach)
    monkeypatch.setattr("kvpolicy.tuning.evidence.reference_logits", lambda *_: pytest.fail("is measured"))
    policies = ["--policy", "full", "--policy", "window@0.5"]
    assert "The model must be another one." in run(["compare", "tiny", "--text", str(text), *policies], 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"answers": "1"}, "must have keys among prompt, question, answer, id, task, got 'answers'; did you mean"),
        ({"questions": "?a=", "answer": "1", "id": 3}, "got 'questions'; did you mean 'question'?"),
    ],
)
def test_wrong_lines_are_refused(line: dict[str, Any], message: str, tmp_path: Path, run: Run) -> None:
    for name in ("mine.jsonl", "mine.txt"):  # which would be plain text
        (tmp_path / name).write_text(json.dumps({"prompt": "a=1\n"} | line) + "\n")
        assert message in run(["compare", "tiny", "--text", str(tmp_path / name), "--policy", "full"], 2)


@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (3, 7)])
def test_intervals_are_those_of_scipy(right: int, count: int) -> None:
    from scipy.stats import binomtest

    found = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right, count) == pytest.approx([found.low, found.high], abs=1e-6)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_on(stream: io.StringIO) -> str:
    """What is shown of two parts of ten texts, ten seconds each."""
    seconds = [0.0]
    progress = Progress(2, stream, lambda: seconds[0])
    for name in ("full", "snapkv@0.2"):
        done = progress.part(name)
        for text in range(10):
            seconds[0] += 10
            done(text + 1, 10)
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then() -> None:
    lines = progress_on(io.StringIO()).splitlines()
    assert lines[0] == "full ..." and lines[1] == "full: 3 of 10 texts, about 3 min left in all"
    assert lines[2] == "full: 6 of 10 texts, about 2 min left in all"
    assert "snapkv@0.2 ..." in lines and lines[-1] == "snapkv@0.2: 8 of 10 texts, about 20 s left in all"
    assert len(lines) == 8


def test_a_terminal_gets_one_line_for_each_part() -> None:
    shown = progress_on(Terminal())
    assert shown.count("\n") == 2 and shown.endswith("\n")
    states = [state.strip() for state in shown.split("\r")]
    assert "full: 1 of 10 texts, about 3 min left in all" in states and "full: 10 texts" in states
    assert states[-1] == "snapkv@0.2: 10 texts"
    assert len({len(state.rstrip("\n")) for state in shown.split("\r")[1:]}) == 1, "nothing of a longer line is left"

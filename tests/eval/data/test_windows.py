"""Files of windows: made as the tasks are asked, and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.tuning.windows import read_windows
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_eval.data.windows import main, windows
from kvpolicy_lm_eval.data.modes import MODES

NAMES = [name for name in tasks(512) if name != "passkey"]


@pytest.mark.parametrize("mode", MODES)
def test_a_file_has_the_windows_of_its_tasks(tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.jsonl"
    main(["--out", str(file), "--mode", mode, "-n", "2", "--seed", "5", "--length", "512"])
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = NAMES if mode == "second" else [*tasks(512)]
    assert [line["task"] for line in lines] == [name for name in names for _ in range(2)]
    assert f"{2 * len(names)} windows of recall, " in capsys.readouterr().out
    model, tokenizer = kvpolicy.tiny()
    for line, window in zip(lines, read_windows(tokenizer, file), strict=True):
        whole = line["prompt"] + line["question"]
        assert whole[whole.rindex("\n") + 1] == "?" and whole[-1] in "=:"
        assert tokenizer.decode(window.follow) == line["question"] + line["answer"]
        assert 300 < len(window.prompt) < 700 < model.config.max_position_embeddings
        if mode == "after":
            assert line["question"][0] == "?" and line["prompt"][-1] == "\n"
        elif mode == "second":
            first, second = line["question"].split("\n")
            assert first and second[0] == "?" and line["prompt"][-1] in "=:"
        else:
            # A label is a single token, so that a token of its question comes after the compression.
            assert line["question"] == (":" if line["task"] == "few_shot" else "")


def test_other_seeds_give_other_documents() -> None:
    some, others = (windows(NAMES, "after", 3, seed, 512) for seed in (1, 2))
    assert not {line["prompt"] for line in some} & {line["prompt"] for line in others}
    assert len({line["prompt"] for line in some}) == len(some) == 15
    assert windows(NAMES, "after", 3, 1, 512) == some
    assert windows(["needles"], "after", 2, 1, 512) == [line for line in some if line["task"] == "needles"][:2]


def test_a_second_question_is_there_at_any_length() -> None:
    assert len(windows(["hot_keys"], "second", 8, 0, 1000)) == 8, "some hot keys have no other that is as hot"


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "w.jsonl")]
    for given, message in (
        ([*out, "-n", "0"], "-n must be at least 1, got 0"),
        ([*out, "--tasks", "passkey", "--mode", "second"], "must have something else to ask for"),
        ([*out, "--tasks", "nothing"], "invalid choice: 'nothing'"),
        ([*out, "--length", "9"], "must be from"),
        (["--out", str(tmp_path / "none" / "w.jsonl")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

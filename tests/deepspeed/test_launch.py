"""Both launchers run a script on CPU ranks, which exits cleanly, or fails with its error and without a deadlock."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvpolicy_deepspeed
from kvpolicy.parallel.launch import World
from kvpolicy_deepspeed import launch
from kvpolicy_deepspeed.launch import _exit_code
from tests.deepspeed.checkpoints import save
from tests.parallel.launchers import LIMIT, words
from tests.sampling import product

SCRIPT = Path(__file__).with_name("script.py")
ROOT = SCRIPT.parent.parent.parent


def _launch(launcher: str, *arguments: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_SIZE", "RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), kept.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *words(launcher), str(SCRIPT), *arguments],
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _check_sampled(output: str) -> None:
    """Both ranks sampled the same, from the same seed."""
    sampled = re.findall(r"sampled (\[[\d, ]+\])", output)
    assert len(sampled) == 2 and sampled[0] == sampled[1], output


# On every commit, docs/examples/two_ranks.py and lm-eval's ranks start with both launchers, generate and exit.
@product("launcher", ["torchrun", "deepspeed"], sample=[])
def test_ranks_load_generate_and_exit(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    code, output = _launch(launcher, save("llama", tmp_path), "deepspeed", "exit")
    assert code == 0, output
    _check_sampled(output)
    assert "AssertionError" not in output


@pytest.mark.slow
@product("launcher", ["torchrun", "deepspeed"], sample=[("torchrun",)])
def test_a_rank_that_fails_ends_the_job_with_its_error(launcher: str, tmp_path: Path) -> None:
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed")
    code, output = _launch(launcher, save("llama", tmp_path), "hf", "fail")
    assert code != 0, output
    _check_sampled(output)
    assert "Rank 1 of 2 failed" in output and "RuntimeError: the second rank failed on purpose" in output, output


def test_without_a_launcher_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"torchrun --standalone --nproc_per_node N .* or `deepspeed"):
        kvpolicy_deepspeed.load("nowhere")
    with pytest.raises(RuntimeError, match="must be started by a launcher"), kvpolicy_deepspeed.ranks():
        pass


class Ended(Exception):
    """In place of the end of the process."""


def test_a_block_is_seeded_and_ends_with_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[str | int] = []

    def end(code: int) -> None:
        steps.append(code)
        raise Ended

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "meet", lambda: World(1, 2, 1))
    monkeypatch.setattr(launch.os, "_exit", end)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(launch.dist, name, lambda name=name: steps.append(name))
    with pytest.raises(Ended), kvpolicy_deepspeed.ranks(seed=7) as place:
        steps.append(torch.initial_seed())
    assert place.rank == 1 and steps == [7, "barrier", "destroy_process_group", 0]
    with pytest.raises(Ended), kvpolicy_deepspeed.ranks():
        raise ValueError("on purpose")
    said = capsys.readouterr().err
    assert steps[4:] == [1] and said.startswith("Rank 1 of 2 failed:\nTrace") and "on purpose" in said
    monkeypatch.setattr(launch.dist, "barrier", interrupt)  # what a launcher does if another rank has failed
    with pytest.raises(Ended), kvpolicy_deepspeed.ranks():
        pass
    assert steps[5:] == [1] and "Rank 1 of 2 finished, but another rank did not:\nTrace" in capsys.readouterr().err


def test_the_exit_code_of_a_rank() -> None:
    ends = [SystemExit(), SystemExit(0), SystemExit(3), SystemExit(256), SystemExit("no"), KeyboardInterrupt()]
    assert [_exit_code(end) for end in [*ends, ValueError()]] == [0, 0, 3, 1, 1, 130, 1]

"""The time that compiled reads of codes add to the first step of a process."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from kvpolicy.kernels import compiled
from kvpolicy_eval.bench import kernel_start


def test_a_first_read_compiles_and_a_second_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "_is_on", True)
    monkeypatch.setattr(compiled, "_missing_compiler", lambda device: "")
    torch._dynamo.reset()
    assert kernel_start.compilation("kivi:bits=4") > 0
    assert len(compiled._compiled) == 5, "bounds and codes of keys, codes of values, a score and a mix"


def test_two_processes_share_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []

    def run(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        folders.append(given["env"]["TORCHINDUCTOR_CACHE_DIR"])
        assert command[-4:] == ["--codec", "kivi:bits=4", "--threads", "1"]
        return subprocess.CompletedProcess(command, 0, stdout=f"{8.04 / len(folders)}\n")

    monkeypatch.setattr(kernel_start.subprocess, "run", run)
    assert kernel_start.line("kivi:bits=4", 1) == ["`kivi:bits=4`", "8.0", "4.0"]
    assert folders[0] == folders[1]

"""The arithmetic of floors and limits, throughput in limited memory, and how kernels start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.kernels import compiled
from kvpolicy_eval.bench import bars, kernel_start, longrun, startup, throughput
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.floor import Machine, Work, decode_work, measure_machine, prefill_work
from kvpolicy_eval.bench.longrun import Block, Run
from kvpolicy_eval.bench.models import llama
from kvpolicy_eval.bench.timing import Quantity, Ratio, Row

MACHINE = Machine(bandwidth=1e9, rate=1e10)


def test_the_floor_is_the_longer_of_both() -> None:
    assert Work(2 * 10**9, 10**9).floor(MACHINE) == 2
    assert Work(10**9, 3 * 10**10).floor(MACHINE) == 3
    assert Work(1, 2) + Work(3, 4) == Work(4, 6) and Work(1, 2).times(3) == Work(3, 6)


def test_work_of_a_model() -> None:
    layers = 2
    hidden = 64
    inner = 176
    vocabulary = 1024
    model = llama(layers=layers, hidden=hidden, heads=2)
    matrices = layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden  # norms too
    step = decode_work(model, kv_bytes=1000, kv_numbers=250)
    assert step == Work((matrices + hidden * vocabulary) * 4 + 1000, 2 * (matrices + hidden * vocabulary + 250))
    prompt = prefill_work(model, 10)
    kv = 2 * layers * hidden * 10
    assert prompt.nbytes == (matrices + hidden * vocabulary + kv) * 4
    assert prompt.operations == 2 * (matrices * 10 + hidden * vocabulary) + kv * 11


def test_a_machine_can_be_measured() -> None:
    machine = measure_machine(nbytes=1 << 20, size=64, rounds=2)
    assert machine.bandwidth > 0 and machine.rate > 0


def row(median: float, limit: float | None) -> Row:
    work = Work(10**9, 10**9)
    return Row("decode", "window@0.1", Ratio(median, 0.1, 0.2, 2.0, 1.0), limit, work, work)


def test_lines_say_pass_or_miss() -> None:
    assert bars.line(row(0.09, 0.1), MACHINE)[3] == "<= 0.1x: pass"
    assert bars.line(row(0.11, 0.1), MACHINE)[3] == "<= 0.1x: miss"
    assert bars.line(row(0.11, None), MACHINE)[3:] == ["", "2.0x", "1.0x"]
    quick = Quantity("import", "", [0.1, 0.11, 0.12], "s", 0.2)
    assert bars.line(quick, MACHINE)[2:4] == ["0.11 s (0.1-0.12)", "<= 0.2 s: pass"]
    lines = [bars.line(row(ratio, limit), MACHINE) for ratio, limit in ((0.11, 0.1), (0.11, 0.2), (0.12, None))]
    assert [line[3] for line in bars.joined(lines)] == ["<= 0.1x: miss; <= 0.2x: pass", ""]


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bars", "decod"])
    assert "choose from decode, prefill" in capsys.readouterr().err


def test_attach_and_plan_of_eighty_layers() -> None:
    """Ten times the limit, for machines under load."""
    found = startup.attach_and_plan("squeeze+kvcrush/snapkv+kivi:bits=4@0.2", rounds=3)
    assert "80 layers" in found.what and min(found.values) < 10 * startup.ATTACH_LIMIT


def test_a_long_run_compares_its_ends_with_a_reference() -> None:
    steady = Run("h2o@512", "", [Block(10, 0.002, 1.1, 0), Block(10, 0.004, 1.1, 0)], 0)
    assert steady.slowdown == 1 and steady.passes
    assert not steady._replace(blocks=[Block(10, 0.002, 1.1, 0), Block(11, 0.002, 1.1, 0)]).passes
    assert not steady._replace(blocks=[Block(10, 0.002, 1.1, 0), Block(10, 0.002, 1.3, 0)]).passes
    assert not steady._replace(compiled=2).passes


@pytest.mark.parametrize("backend", ["", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_short_long_run(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block of steps demotes tokens twice."""
    monkeypatch.setattr(longrun, "PIECE", 10)
    monkeypatch.setattr(longrun, "REFERENCE_STEPS", 2)
    torch.compiler.reset()
    policy = "snapkv+kivi:bits=4:group_size=8:residual_length=8@64"
    found = longrun.run(policy, 40, backend, block=20, prompt=128)
    assert len(found.blocks) == 2 and len({block.nbytes for block in found.blocks}) == 1
    assert found.compiled == (1 if backend else 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return throughput.mistral(hidden=512, layers=2)


@pytest.mark.parametrize(
    ("side", "slots"), [("dynamic", 1535), ("static", 1536), ("streaming@307", 307), ("squeeze+streaming@307", 307)]
)
def test_a_step_attends_to_the_tokens_of_its_batch(model: Any, side: str, slots: int) -> None:
    found = throughput.measure_side(model, side, batch=3, steps=1, seconds=60)
    assert found["steps"] == [1]
    assert found["numbers"] == pytest.approx(2 * 2 * 128 * slots, abs=2 * 2 * 128)  # keys and values of two layers
    assert found["bytes"] >= 3 * 4 * found["numbers"]
    assert found["bytes"] < 3 * 4 * found["numbers"] * 1.2


def test_codes_hold_fewer_bytes_than_their_numbers(model: Any) -> None:
    found = throughput.measure_side(model, "streaming+tokenwise:bits=4@307", batch=2, steps=3, seconds=60)
    assert found["steps"] == [3, 3, 3]
    assert len(found["seconds"]) == 3
    assert found["bytes"] < 2 * 4 * found["numbers"] * 0.4


class Simulated(throughput.Runs):
    """Runs that need `held` bytes for a row."""

    held = 10

    def _run(self, side: str, batch: int, steps: int) -> throughput.Result | None:
        if batch * self.held > self.memory:
            return None
        return {"seconds": [0.5] * 3, "bytes": batch * self.held, "numbers": 5}


@pytest.mark.parametrize("rows", [0, 7, 8, 63, 64, 100, 1003])
def test_the_largest_batch_is_near_what_fits(rows: int) -> None:
    found = Simulated(None, 10 * rows, []).largest("dynamic")
    assert found % throughput.GRAIN == 0
    assert found <= rows
    assert rows - found < max(throughput.GRAIN, rows // 16)


def test_results_are_measured_once(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "mistral", lambda: model)
    file = tmp_path / "results.jsonl"
    machine = Machine(1e9, 1e9)
    rows = list(throughput.lines(Simulated(file, 400, []), ("dynamic",), machine, 4))
    assert [row[1] for row in rows] == ["1", "16", "40 (largest)"]
    assert rows[0][3] == "2.0"
    measured = len(file.read_text().splitlines())
    again = Simulated(file, 400, [])
    monkeypatch.setattr(again, "_run", None)
    assert list(throughput.lines(again, ("dynamic",), machine, 4)) == rows
    assert len(file.read_text().splitlines()) == measured
    assert json.loads(file.read_text().splitlines()[0])[0].startswith("dynamic batch=")


@pytest.mark.full  # a process that imports everything
def test_memory_is_limited() -> None:
    runs = throughput.Runs(None, 64 << 20, ["--threads", "1"])
    assert runs.result("dynamic", 1, 1) is None, "the weights alone take more"


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

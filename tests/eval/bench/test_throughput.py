"""Throughput in limited memory: what is timed is a cache of the size that is said, and memory is limited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_eval.bench import throughput
from kvpolicy_eval.bench.floor import Machine


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

"""Reads of codes by the GPU script, on the CPU at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.kernels import compiled
from kvpolicy_eval.gpu import reads
from kvpolicy_eval.gpu.__main__ import main
from kvpolicy_eval.gpu.results import read_results
from kvpolicy_eval.gpu.suites import plan_suites
from tests.codecs.compiling import compile_all


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_all(monkeypatch)
    monkeypatch.setitem(reads.SHAPES, "tiny", ((2, 64),))
    monkeypatch.setattr(reads, "ROUNDS", 1)
    monkeypatch.setattr(reads, "CODECS", ("tokenwise", "no_such_codec"))


def test_every_way_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "gpu.jsonl"
    given = ["--device", "cpu", "--shape", "tiny", "--only", "reads", "--results", str(results)]
    assert main(given) == main(given) == 0
    records = read_results(results)
    assert [(record["case"]["codec"], record["case"]["way"], record["status"]) for record in records] == [
        ("", "bf16", "ok"),
        ("", "fp32", "ok"),
        ("tokenwise", "fused", "ok"),
        ("tokenwise", "decoded", "ok"),
        ("no_such_codec", "fused", "failed"),
        ("no_such_codec", "decoded", "failed"),
    ]
    bf16, fp32, fused, decoded = (record["nbytes"] for record in records[:4])
    assert fp32 == 2 * bf16 == 2 * 2 * 2 * reads.HEADS * 64 * 128 * 2
    assert fused == decoded < bf16 / 3
    text = capsys.readouterr().out
    assert "**One layer, 2 x 64 tokens**" in text and "decoded, over dense bf16 |" in text and "| `tokenwise` |" in text
    assert "- `no_such_codec`, fused: KVPolicyError" in text


def test_codes_are_read_in_the_way_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    switches: list[bool] = []

    def noted(side: object, device: str) -> dict[str, float]:
        switches.append(compiled._is_on)
        return {"score_s": 1.0, "mix_s": 1.0}

    monkeypatch.setattr(reads, "_times", noted)
    for case in reads.cases("cpu", "tiny", ("tokenwise",)):
        assert reads.measure(case)["status"] == "ok"
    assert switches == [True, True, True, False] and compiled._is_on


def test_chosen_sides_and_batch_sizes() -> None:
    (series,) = [one for one in plan_suites("mistral-7b") if one.side.startswith("dynamic")]
    assert [*series.at([7]).batch_sizes()] == [7]
    assert series.at([]) is series

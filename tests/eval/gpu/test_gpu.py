"""The GPU script, on the CPU with a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.kernels import compiled
from kvpolicy_eval.gpu import case as gpu_case
from kvpolicy_eval.gpu import reads
from kvpolicy_eval.gpu.__main__ import main
from kvpolicy_eval.gpu.results import read_results
from kvpolicy_eval.gpu.runner import Runner
from kvpolicy_eval.gpu.suites import Series, plan_suites
from kvpolicy_eval.gpu.tables import report
from tests.codecs.compiling import compile_all

TINY = Series("table3", "tiny", 32, 16, "dynamic", "eager", batches=(1, 4), until_full=True)


def case(method: str, mode: str, policy: str = "", batch: int = 2, limit: int = 0, prompt: int = 32) -> dict[str, Any]:
    return Series("table3", "tiny", prompt, 16, method, mode, policy).case(batch, "cpu", limit)


@pytest.mark.parametrize(
    ("method", "mode", "policy"),
    [
        ("dynamic", "eager", ""),
        pytest.param("static", "graphs", "", marks=pytest.mark.full),
        ("policy", "eager", "squeeze:profile=PROFILE+window@9"),
        ("policy", "graphs", "squeeze+window@9"),
        ("policy", "eager", "kvcrush/snapkv:window=4@0.5"),
        ("policy", "eager", "snapkv:window=4+csr@0.9"),
    ],
)
def test_every_side_runs(method: str, mode: str, policy: str) -> None:
    torch.compiler.reset()
    found = gpu_case.measure(case(method, mode, policy))
    full = 2 * 4 * 2 * 32 * 2  # keys and values of a token: layers, heads, numbers, bytes
    assert found["decode_tokens_per_s"] > 0 and found["prefill_s"] > 0
    if method != "policy":
        assert found["kv_bytes"] == 2 * 48 * full
    elif "window@9" in policy:
        assert found["kv_bytes"] < 2 * 48 * full / 4


def test_a_prompt_in_tiles_has_its_planned_peak() -> None:
    (stock, *ours) = (series for series in plan_suites("tiny") if series.suite == "small card")
    assert "tile" not in stock.case(1, "cpu", 0) and stock.case(1, "cpu", 5)["limit"] == stock.limit
    records: list[dict[str, Any]] = []
    for series in ours:
        given = series.case(1, "cpu", 0)
        found = gpu_case.measure(given)
        sizes = {name: given[name] for name in ("batch", "prompt", "new", "tile")}
        assert (
            found["planned_bytes"] == kvpolicy.plan(gpu_case.build("tiny", "cpu"), series.policy, **sizes).peak_nbytes
        )
        made = {"card": "card", "versions": {}, "date": "2026-01-01", "status": "ok"}
        records.append({**found, **made, "case": given, "peak_bytes": 3 << 30, "planned_bytes": 4 << 30})
    assert report(records).count("| 128 | 3.00 | 4.00 | 0.750x |") == 2


def test_a_prompt_goes_through_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_case, "MAX_TOKENS", 16)
    assert gpu_case.chunk_size(2, 32) == 8
    found = gpu_case.measure(case("policy", "eager", "squeeze+window@9"))
    assert found["kv_bytes"] > 0


def test_running_out_of_memory_ends_one_case(tmp_path: Path) -> None:
    """In a real process of its own, which the file remembers."""
    results = tmp_path / "gpu.jsonl"
    runner = Runner(results, "cpu", limit=1000, quiet=True)
    runner.run(TINY)
    (record,) = read_results(results)
    assert record["status"] == "out of memory" and record["card"] == "CPU"
    assert record["versions"]["torch"] == torch.__version__


def fake(start: list[int], room: int, card: str = "card") -> Any:
    """A GPU whose memory fits `room` rows of the stock cache."""

    def run(self: Runner, case: dict[str, Any]) -> dict[str, Any]:
        batch = case["batch"]
        start.append(batch)
        more = {"card": card, "versions": {"torch": "1"}, "case": case, "date": "2026-01-01"}
        rows = room * (5 if case["method"] == "policy" else 1)
        if batch > rows:
            return {**more, "status": "out of memory", "error": ""}
        rate = batch * (300.0 if case["method"] == "policy" else 100.0)
        held = {"prefill_s": 1.0, "step_ms": 1.0, "kv_bytes": 10}
        return {**more, "status": "ok", "decode_tokens_per_s": rate, "peak_bytes": 10**9, **held}

    return run


def test_the_largest_batch_is_found_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(Runner, "_start", fake(started, 100))
    results = tmp_path / "gpu.jsonl"
    Runner(results, "cpu", quiet=True).run(TINY)
    assert 88 <= max(batch for batch in started if batch <= 100) <= 100
    first = list(started)
    results.write_text(results.read_text() + '{"case": {"cut')  # killed while it wrote
    Runner(results, "cpu", quiet=True).run(TINY)
    assert started == first


def test_targets_pass_or_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_start", fake([], 64))
    runner = Runner(tmp_path / "gpu.jsonl", "cpu", quiet=True)
    for series in plan_suites("tiny"):
        if series.suite == "table3":
            runner.run(series)
    text = report(runner.records)
    assert "3.00x | >= 2.5x | pass" in text
    assert "| >= 5.0x | miss" in text or "| >= 5.0x | pass" in text
    assert "kvpress" not in text  # there is no environment of it here


def test_each_setting_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may hold several sizes of memory, prompts and devices: none is a side of another."""
    results = tmp_path / "gpu.jsonl"
    for limit, device, room in ((0, "cpu", 100), (1000, "cpu", 20), (0, "other", 7)):
        monkeypatch.setattr(Runner, "_start", fake([], room))
        Runner(results, device, limit, quiet=True).run(TINY)
    Runner(results, "cpu", quiet=True).run(Series("table3", "tiny", 99, 16, "policy", "eager", "squeeze+window@9"))
    titles = [line for line in report(read_results(results)).splitlines() if line.startswith("**")]
    assert titles == [
        "**tiny, 32 + 16 tokens** (table3, cpu)",
        "**tiny, 32 + 16 tokens** (table3, cpu, 1,000 bytes of memory)",
        "**tiny, 32 + 16 tokens** (table3, other)",
        "**tiny, 99 + 16 tokens** (table3, cpu)",
    ]
    text = report(read_results(results))
    largest = [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| stock")]
    assert all(int(batch) <= room for batch, room in zip(largest, (100, 20, 7), strict=True))
    assert "target at" not in text, "ours and theirs were never measured alike"


def test_another_card_needs_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_start", fake([], 2))
    results = tmp_path / "gpu.jsonl"
    results.write_text(json.dumps({"case": {}, "status": "ok", "card": "another"}) + "\n")
    with pytest.raises(ValueError, match="give another --results"):
        Runner(results, "cpu", quiet=True).run(TINY)


def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory", "much", "--report", "--results", str(tmp_path / "none.jsonl")]) == 2
    assert "much" in capsys.readouterr().err
    assert main(["--report", "--results", str(tmp_path / "none.jsonl")]) == 0
    assert "No results yet." in capsys.readouterr().out


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_all(monkeypatch)
    monkeypatch.setitem(reads.SHAPES, "tiny", ((2, 64),))
    monkeypatch.setattr(reads, "ROUNDS", 1)
    monkeypatch.setattr(reads, "CODECS", ("tokenwise", "no_such_codec"))


@pytest.mark.usefixtures("small_reads")
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


@pytest.mark.usefixtures("small_reads")
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

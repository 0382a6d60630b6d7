"""Benchmarks of layers, parts, shared prefixes and servers run, fill their tables, and say what is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy_eval.bench import parts, prefix, serve, steps
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.clients import Measured, requests
from kvpolicy_eval.bench.parts import Case
from kvpolicy_eval.bench.steps import Layer, LayerTimes
from kvpolicy_eval.bench.stock_servers import NAMES, Place
from tests.eval.pages import cells, page_with


def run(*arguments: str) -> None:
    torch.compiler.reset()
    main([*arguments, "--quick"])
    torch.compiler.reset()


def test_tables_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "parts-heads", "parts-prompts")
    monkeypatch.setattr(parts, "STEP_CASES", {"heads": [Case("uniform/adakv+h2o", "h2o", 1e9)]})
    monkeypatch.setattr(parts, "PROMPT_CASES", [Case("kvzip", "", 1e9)])
    run("parts", "--backend", "eager", "--fill", str(page))
    rows = [line for line in page.read_text().splitlines() if "pass" in line]
    assert len(rows) == 2 and "the stock model" in rows[1]


def test_the_table_of_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "prefix")
    some = "snapkv:decode=grow@0.25"
    monkeypatch.setattr(prefix, "POLICIES", {some: prefix.POLICIES[some]})
    run("prefix", "--rows", "3", "--fill", str(page))
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{some}` |")]
    assert "0.12x" in line and "miss" in line, "256 tokens are too few for the goal"


def test_both_tables_of_steps(tmp_path: Path) -> None:
    page = page_with(tmp_path / "page.md", "steps-layer", "steps-model")
    run("steps", "--policies", "h2o", "window+kivi", "--backend", "eager", "--fill", str(page))
    lines = page.read_text().splitlines()
    assert sum(line.startswith("| `h2o` |") for line in lines) == 3, "two sizes of a layer, one model"
    assert sum(line.startswith("| `window+kivi` |") for line in lines) == 3


def test_one_table_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    run("steps", "--only", "model", "--policies", "window")
    printed = capsys.readouterr().out
    assert "stock, ms" in printed and "compiled" not in printed


def test_heads_differ_at_equal_bytes() -> None:
    """Or the benchmark would not be one of heads of different size."""
    store = Layer("uniform/adakv+h2o", 64, "eager", 128).store
    counts = store.geometry.tokens_by_head()[0]
    assert int(counts.sum()) == 64 * 8 and int(counts.max()) > int(counts.min())
    assert store.nbytes / Layer("h2o", 64, "eager", 128).store.nbytes == pytest.approx(1, abs=0.01)


def test_a_merge_has_victims_and_targets() -> None:
    store = Layer("h2o+merge:least=-1.0", 64, "eager", 128).store
    torch.testing.assert_close(store.tensors.counts.exp().sum(-1), torch.full((1, 8), 128.0))


def test_bytes_are_those_of_one_text_and_of_the_rows() -> None:
    """The text is held once, whatever the number of rows, and at least as large as its keys and values."""
    one, eight = (prefix.measure_caches("full", 512, rows, rounds=2) for rows in (1, 8))
    own = (eight.shared - one.shared) // 7
    text = one.shared - own
    assert text >= 2 * prefix.LAYERS * 512 * prefix.WIDTH * 4
    assert eight.copies > 4 * eight.shared


@pytest.mark.parametrize("policy", steps.LAYER_POLICIES)
def test_a_layer_is_full_and_stays_so(policy: str) -> None:
    """Each step evicts, so that all steps read the same bytes."""
    layer = Layer(policy, 256, "eager")
    before = layer.store.nbytes
    with torch.no_grad():
        for _ in range(40):
            layer.eager()
            layer.store.count_step()
    assert layer.store.nbytes == before
    assert (layer.store.tensors.positions >= 0).sum(-1).tolist() == [[256] * steps.HEADS]


def test_targets() -> None:
    small = LayerTimes("h2o", 1024, 1000, eager=2.0, compiled=1.0)
    fine = LayerTimes("h2o", 8192, 8000, eager=16.0, compiled=8.0)
    assert small.misses(small, [small, fine]) == fine.misses(small, [small, fine]) == []
    slow = fine._replace(compiled=17.0)
    assert slow.misses(small, [small, slow]) == [
        "slower than eager",
        "grows faster than bytes",
        "more than 10 times 1,024 slots",
    ]
    assert fine._replace(compiled=9.0).misses(small, [small, fine]) == ["grows faster than bytes"]


def test_every_server_gets_both_workloads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With memory for as many tokens as some rows of the full cache, each as long as the longest request."""
    places: list[tuple[str, int, int, int]] = []
    asked: list[tuple[str, int, int]] = []

    def ours(policy: str, rows: int, made: Any, length: int, compile: bool) -> Measured:
        asked.append((policy, rows, max(len(each.prompt) for each in made)))
        assert length > max(len(each.prompt) + each.new for each in made)
        return Measured(1000 * rows, 10.0 * rows, [1.0], [0.1])

    def stock(name: str, args: Any, work: Any) -> Measured:
        place = Place(None, args.full_rows * work.length, work.length, work.clients, 1, False, None)  # pyright: ignore[reportArgumentType]
        places.append((name, place.tokens, place.longest, max(len(each.prompt) for each in requests(work))))
        return Measured(5000, 60.0, [2.0], [0.2])

    monkeypatch.setattr(serve, "measure_server", ours)
    monkeypatch.setattr(serve, "measure_stock", stock)
    monkeypatch.setattr(serve, "fitting", lambda policy, rows, work: rows if policy == "full" else work.clients)
    options = ["--policies", "h2o@256", "--beside", *NAMES, "--vllm", "env"]
    main(["serve", *options])
    table = cells(capsys.readouterr().out)
    servers = ["full", "full", "h2o@256", "h2o@256", *(serve.TITLES[name].strip("`") for name in NAMES)]
    assert [row[:2] for row in table] == [[work, server] for work in ("chat", "documents") for server in servers]
    assert [row[6] for row in table if row[1] == "vLLM"] == ["1.50x", "1.50x"]  # over four rows of `full`
    longest = {work: serve.WORKLOADS[work].length for work in serve.WORKLOADS}
    assert [place[:3] for place in places] == [(name, 4 * size, size) for size in longest.values() for name in NAMES]
    assert all(prompt <= 500 for *_, prompt in places[:3]) and all(prompt > 500 for *_, prompt in places[3:])
    assert {rows for _, rows, _ in asked} == {1, 4, 12, 24}
    main(["serve", *options, "--requests", "documents"])
    assert {row[0] for row in cells(capsys.readouterr().out)} == {"documents"}


def test_documents_beside_another_server(capsys: pytest.CaptureFixture[str]) -> None:
    """A short run of both kinds of servers, with prompts that take several steps."""
    options = ["--quick", "--requests", "documents", "--full-rows", "2", "--policies", "full"]
    main(["serve", *options, "--beside", "batching"])
    table = cells(capsys.readouterr().out)
    assert [row[1] for row in table] == ["full", "full", serve.TITLES["batching"].strip("`")]
    assert all(float(row[4]) > 0 for row in table)

"""Servers under clients: chats and documents, of kvpolicy and of servers without a policy in the same memory."""

from __future__ import annotations

from typing import Any

import pytest

from kvpolicy_eval.bench import serve
from kvpolicy_eval.bench.__main__ import main
from kvpolicy_eval.bench.clients import Measured, requests
from kvpolicy_eval.bench.stock_servers import NAMES, Place
from tests.eval.pages import cells


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

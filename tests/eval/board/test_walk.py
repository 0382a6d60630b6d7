"""The walk along a ring of records: what is asked, what is right, and what a run keeps."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("transformers")

from kvpolicy.embedded import tiny
from kvpolicy_eval.board import walk as board
from kvpolicy_eval.board.walk import Walk, main, measure, policies, rows, texts
from kvpolicy_eval.data.prompts import ring

SMALL = Walk(records=5, hops=15, walks=2, model="tiny")


def test_a_ring_returns_to_its_first_word() -> None:
    document, words = ring(Random(3), 40)
    table = dict(line.split("=") for line in document.splitlines())
    assert len(set(words)) == 40 and table == dict(zip(words, [*words[1:], words[0]], strict=True))
    assert [*table] != words, "records are not in the order in which they are asked for"
    with pytest.raises(ValueError, match=r"The number of records must be from 1 to 256, got 257\."):
        ring(Random(0), 257)


def test_every_answer_is_the_next_question() -> None:
    tokenizer = tiny()[1]
    given = texts(SMALL, tokenizer)
    text = tokenizer.decode(given.prompt[1], skip_special_tokens=True)
    text += "".join(tokenizer.decode(step) for step in given.steps[1])
    document, _, walked = text.partition("?")
    table = dict(line.split("=") for line in document.splitlines())
    asked = [line.split("=") for line in f"?{walked}".splitlines()]
    assert len(asked) == 16 and asked[-1] == [f"?{asked[-2][1]}", ""]
    assert all(value == table[key.removeprefix("?")] for key, value in asked[:-1])
    assert {value for _, value in asked[:5]} == set(table), "a pass asks for all"
    assert given.tokens == len(tokenizer(text).input_ids)


def test_the_full_cache_answers_everything_and_a_window_what_it_holds() -> None:
    model, tokenizer = tiny()
    given = texts(SMALL, tokenizer)
    full = measure(SMALL, "full", 0.1, model, given)
    assert full == {"right": [15, 15], "passes": [1.0, 1.0, 1.0], "held": 1.0}
    window = measure(SMALL, "window", 0.1, model, given)
    assert sum(window["right"]) < 12 and window["held"] <= 0.1
    assert "refused" in measure(SMALL, "window", 0.001, model, given)


def test_a_run_continues_and_fills_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "walk.jsonl", tmp_path / "page.md"
    page.write_text("<!-- table:walk -->\n<!-- /table -->\n", encoding="utf-8")
    options = ["--records", "5", "--hops", "10", "--n", "1", "--shares", "0.3", "0.2", "--results", str(results)]
    main([*options, "--only", "full", "window"])
    assert len(results.read_text(encoding="utf-8").splitlines()) == 4
    monkeypatch.setattr(board, "measure", lambda *_: {"refused": "why"})
    main([*options, "--only", "full", "window", "h2o", "--fill", str(page)])
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [line["key"].split()[0] for line in lines[4:]] == ["h2o", "h2o"] and lines[4]["refused"] == "why"
    filled = page.read_text(encoding="utf-8")
    assert "| `full` | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) | 1.00 |" in filled
    assert "h2o" not in filled and "| policy | 30% | 20% | last pass, 20% |" in filled
    capsys.readouterr()


def test_all_selectors_and_mergers_are_listed_once() -> None:
    listed = policies()
    assert len(set(listed)) == len(listed) and {"full", "keyformer", "h2o+d2o", "qfilters:file=tiny-4k"} <= {*listed}
    assert rows(SMALL, {}, listed, [0.1]).count("\n| `") == 0

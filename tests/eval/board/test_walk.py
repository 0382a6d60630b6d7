"""The walk along rings of records: what is asked, what is right, and what a run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpolicy.embedded import tiny
from kvpolicy_eval.board import walk as board
from kvpolicy_eval.board.walk import Walk, main, measure, policies, rows, texts
from tests.eval.pages import cells, page_with

SMALL = Walk(records=5, passes=4, first=2, walks=2, model="tiny")


def test_every_answer_is_that_of_a_record_told_before() -> None:
    tokenizer = tiny()[1]
    given = texts(SMALL, tokenizer)
    text = tokenizer.decode(given.prompt[1], skip_special_tokens=True)
    text += "".join(tokenizer.decode(step[1]) for step in given.steps)
    table = dict[str, str]()
    asked = list[str]()
    for line in text.splitlines()[:-1]:
        key, value = line.split("=")
        if key.startswith("?"):
            assert table[key[1:]] == value
            asked.append(key[1:])
        else:
            table[key] = value
    assert len(table) == 10 and len(asked) == 20
    passes = [set(asked[start : start + 5]) for start in range(0, 20, 5)]
    assert passes[0] == passes[1] == passes[3] and passes[2] == set(table) - passes[0]
    assert text.splitlines()[-1] == f"?{asked[0]}=", "what is fed after the last answer is not answered"
    assert given.prompt.shape[1] + given.new == len(tokenizer(text).input_ids)


def test_the_full_cache_answers_everything_and_a_window_what_it_holds() -> None:
    model, tokenizer = tiny()
    given = texts(SMALL, tokenizer)
    full = measure(SMALL, "full", 0.1, model, given)
    assert full == {"right": [20, 20], "passes": [1.0] * 4, "held": 1.0}
    window = measure(SMALL, "window", 0.1, model, given)
    assert sum(window["right"]) < 20 and window["held"] <= 0.1
    assert "refused" in measure(SMALL, "window", 0.001, model, given)


def test_what_answers_less_than_chance_is_marked() -> None:
    known = {
        SMALL.key(name, 0.1): {"right": right}
        for name, right in (("random", [4, 6]), ("h2o", [5, 5]), ("tova", [4, 5]))
    }
    found = cells(rows(SMALL, known, ["h2o", "random", "tova"], [0.1]))
    assert [row[0] for row in found if any("†" in cell for cell in row)] == ["tova"] and len(found) == 3
    assert "†" not in rows(SMALL, known, ["h2o", "random"], [0.1])
    assert "†" not in rows(SMALL, {SMALL.key("tova", 0.1): {"right": [0, 0]}}, ["tova"], [0.1])


def test_a_run_continues_and_fills_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "walk.jsonl"
    page = page_with(tmp_path / "page.md", "walk")
    options = ["--records", "4", "--passes", "5", "--n", "1", "--shares", "0.2", "0.3", "--results", str(results)]
    main([*options, "--only", "full", "window"])
    assert len(results.read_text(encoding="utf-8").splitlines()) == 4
    monkeypatch.setattr(board, "measure", lambda *_: {"refused": "why"})
    main([*options, "--only", "full", "window", "h2o", "--fill", str(page)])
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [line["key"].split()[0] for line in lines[4:]] == ["h2o", "h2o"] and lines[4]["refused"] == "why"
    filled = page.read_text(encoding="utf-8")
    assert "| `full` | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) | 1.00 | 1.00 |" in filled
    assert "h2o" not in filled and "| policy | 30% | 20% | prompt's ring at last, 20% | other ring, 20% |" in filled
    capsys.readouterr()


def test_all_selectors_and_mergers_are_listed_once() -> None:
    listed = policies()
    assert len(set(listed)) == len(listed) and {"full", "keyformer", "h2o+d2o", "qfilters:file=tiny-4k"} <= {*listed}
    assert rows(SMALL, {}, listed, [0.1]).count("\n| `") == 0


def test_a_page_without_results_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path / "none.jsonl"), "--page-only"])
    assert "--results must be an existing file with --page-only" in capsys.readouterr().err

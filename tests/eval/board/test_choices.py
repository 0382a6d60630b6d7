"""The best policies by situation: what is compared, in which order, and that the page has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy_eval.board import walk
from kvpolicy_eval.board.__main__ import main
from kvpolicy_eval.board.cells import DOCS, Board, Cell
from kvpolicy_eval.board.choices import PLACE, SITUATIONS, tables
from kvpolicy_eval.board.policies import Entry, entries
from kvpolicy_eval.common.markdown import pages_with
from kvpolicy_eval.common.results import Known, read_results
from tests.eval.pages import cells, first_lines, page_with, text_at

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "assets" / "board.jsonl"
WALKS = RESULTS.with_name("walk.jsonl")
LISTED = [
    Entry("full", "all tokens"),
    Entry("window", "selector"),
    Entry("snapkv", "selector"),
    Entry("h2o", "selector"),
    Entry("kvzip", "selector"),
    Entry("squeeze+snapkv", "allocator"),
    Entry("kvzip", "combination", "codes"),
    Entry("full+exact:read={read}", "reader"),
    Entry("full+quest:read={read}", "reader"),
]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "board.jsonl", {512: 10, 4096: 10}, "tiny-4k")


def answer(board: Board, entry: Entry, mode: str, right: int, length: int = 512, share: float = 0.1) -> None:
    """Keep a result of ten prompts of one task."""
    key = Cell(entry, share, mode, length).key(10, board.model)
    board._keep(key, {"right": {"recall": right}, "docs": 10, "held": share, "moved": share})


def time(board: Board, entry: Entry, ratio: float) -> None:
    board._keep(f"time {entry.name} at 0.1", {"ratio": ratio, "low": ratio, "high": ratio})


def section(text: str, title: str) -> list[list[str]]:
    """The rows of the table of a situation."""
    return cells(text.partition(f"### {title}\n")[2].partition("###")[0])


def test_the_three_best_come_first_and_equal_ones_stay_in_order(board: Board) -> None:
    for entry, right in zip(LISTED[:7], [10, 5, 7, 5, 9, 4, 10], strict=True):
        answer(board, entry, "inside", right)
    text = tables(board, LISTED, {})
    rows = section(text, "The question is in the prompt")
    # Neither the full cache nor the same policy held in codes is one of them.
    assert [row[:2] for row in rows] == [
        ["kvzip", "0.90 (.60-.98)"],
        ["snapkv", "0.70 (.40-.89)"],
        ["window", "0.50 (.24-.76)"],
    ]
    assert rows[0][3] == "runs twice; layers wait for the last one" and rows[1][3] == ""
    assert text.count("###") == 1, "a situation without results has no table"
    assert text.endswith("<!-- 7 results, 0 walks -->")


def test_answers_of_all_lengths_are_counted_together(board: Board) -> None:
    """A policy that was not measured at one of them is left out; a length where few were measured is."""
    window, snapkv, h2o = LISTED[1:4]
    for entry, short, long in ((window, 5, 5), (snapkv, 9, 2)):
        answer(board, entry, "after", short)
        answer(board, entry, "after", long, 4096)
    answer(board, h2o, "after", 10)
    title = "The question comes later"
    found = section(tables(board, LISTED, {}), title)
    assert [row[0] for row in found] == ["snapkv", "window"] and found[0][1].startswith("0.55")
    for entry in LISTED[4:6]:
        answer(board, entry, "after", 0)
    # Now 2 of 5 policies have results of long prompts, so that short ones alone are compared.
    assert [row[0] for row in section(tables(board, LISTED, {}), title)] == ["h2o", "snapkv", "window"]


def test_a_fast_policy_must_answer_something(board: Board) -> None:
    for entry, right, ratio in ((LISTED[1], 0, 0.1), (LISTED[2], 5, 0.5), (LISTED[5], 8, 0.4)):
        answer(board, entry, "inside", right)
        time(board, entry, ratio)
    rows = section(tables(board, LISTED, {}), "Fast decoding")
    assert [(row[0], row[2]) for row in rows] == [("squeeze+snapkv", "0.40"), ("snapkv", "0.50")]
    assert rows[0][3] == "layers wait for the last one"


def test_few_bytes_count_every_place_and_readers_hold_everything(board: Board) -> None:
    for mode in ("inside", "after", "second"):
        answer(board, LISTED[2], mode, 3, share=0.02)
        answer(board, LISTED[7], mode, 10)
        answer(board, LISTED[8], mode, 8)
    answer(board, LISTED[3], "inside", 10, share=0.02)
    text = tables(board, LISTED, {})
    assert [row[0] for row in section(text, "As few bytes as possible")] == ["snapkv"]
    # `exact` computes every score, so that it is no reader to use.
    assert [row[0] for row in section(text, "Memory suffices, and steps are slow")] == ["full+quest:read=0.1"]


def test_long_generations_are_of_the_walks(board: Board) -> None:
    task = walk.Walk(model="tiny-4k")
    total = task.passes * task.records
    known: Known = {
        task.key("full", 0.05): {"right": [total], "passes": [1.0]},
        task.key("h2o", 0.05): {"right": [total // 2, total], "passes": [1.0]},
        task.key("window", 0.05): {"right": [0, 0], "passes": [0.0]},
        task.key("tova", 0.05): {"refused": "too small"},
    }
    rows = section(tables(board, LISTED, known), "A long generation")
    assert [row[:2] for row in rows] == [["h2o", "0.75 (.50-1.00)"], ["window", "0.00 (.00-.00)"]]


def test_pages_are_checked_before_anything_is_written(
    tmp_path: Path, board: Board, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(board, LISTED[1], "inside", 5)
    page = page_with(tmp_path / "board.md", "board-top", "board-order")
    (tmp_path / "docs").mkdir()
    whole = page_with(tmp_path / "docs" / "a.md", "choices")
    half = tmp_path / "docs" / "b.md"
    half.write_text("<!-- table:places -->\n")
    before = {each: each.read_text() for each in (page, whole, half)}
    common = ["--results", str(board.results), "--page-only"]
    for arguments, message in (
        (["--fill", str(page)], "board.md has no place for board-refused; add the lines"),
        (["--fill-places", str(tmp_path)], "b.md has no place for places"),
        (["--fill-full", str(whole)], "a.md has no place for board-full"),
        (["--pictures", str(tmp_path / "none")], "must be an existing folder"),
        (["--results", str(tmp_path / "none")], "--results must be an existing file with --page-only"),
    ):
        with pytest.raises(SystemExit):
            main([*common, *arguments])
        assert message in capsys.readouterr().err
        assert {each: each.read_text() for each in before} == before
    half.unlink()
    main([*common, "--fill-places", str(tmp_path)])
    assert "<!-- 1 results, 0 walks -->" in whole.read_text()


def test_the_page_has_what_the_results_give(tmp_path: Path) -> None:
    """Of the results that were known when it was filled: others may be added to the files later."""
    (page,) = pages_with(ROOT, PLACE)
    text = text_at(page, PLACE)
    ((results, walks),) = re.findall(r"<!-- (\d+) results, (\d+) walks -->", text)
    board = Board(first_lines(RESULTS, int(results), tmp_path), DOCS, "tiny-4k")
    assert text == tables(board, entries("tiny-4k"), read_results(first_lines(WALKS, int(walks), tmp_path)))
    for situation in SITUATIONS:
        rows = section(text, situation.title)
        assert len(rows) == 3
        for spec, *_ in rows:
            assert str(kvpolicy.Policy.parse(spec))

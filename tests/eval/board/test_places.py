"""The tables of answers by the place of the question: which policies they have, and that the pages have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpolicy import registry
from kvpolicy_eval.board.__main__ import main
from kvpolicy_eval.board.cells import DOCS, SHARES, Board, Cell
from kvpolicy_eval.board.places import OVERVIEW, PLACE, compared, page_table, shown_length
from kvpolicy_eval.board.policies import entries
from kvpolicy_eval.common.markdown import pages_with
from kvpolicy_eval.methods.plan import DEFAULTS, methods
from tests.eval.pages import cells, first_lines, page_with, text_at

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "assets" / "board.jsonl"
TASKS = ["recall", "needles"]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board on which every policy answers half of the prompts of 512 tokens at 10 %, with the question after them."""
    made = Board(tmp_path / "results.jsonl", {512: 4, 4096: 2}, "tiny-4k")
    for entry in entries("tiny-4k"):
        cell = Cell(entry, 0.1, "after", 512)
        made._keep(cell.key(4, made.model), {"right": dict.fromkeys(TASKS, 2), "docs": 4, "held": 0.1, "moved": 0.1})
    return made


def test_a_method_is_compared_with_its_base() -> None:
    defaults = {"uniform", "even", "drop", "plain", "all"}
    listed = entries()
    for name in methods():
        specs = [entry.spec for entry in compared(name, listed)]
        assert len(set(specs)) == len(specs), name
        assert name in defaults or any(name in re.split("[+/:]", spec) for spec in specs)
        assert len(specs) > 1 or name in defaults


def test_a_table_has_what_is_known_and_nothing_else(board: Board) -> None:
    listed = entries("tiny-4k")
    text = page_table("kivi", board, listed, [0.2, 0.1, 0.02])
    assert text.startswith("| policy | inside, 20% | inside, 10% | after, 20% | after, 10% |\n")
    assert cells(text) == [
        ["snapkv", "", "", "", "0.50"],
        ["snapkv+kivi:bits=2", "", "", "", "0.50"],
    ]
    assert "prompts of 512 tokens, ±0.20" in text and "(../board.md)" in text and "Empty: not measured" in text
    assert f"<!-- {len(listed)} results -->" in text
    kivi = next(entry for entry in listed if "kivi" in entry.spec)
    for share, mode, result in (
        (0.2, "inside", {"refused": "too small"}),
        (0.2, "after", {"right": {"recall": 0}, "docs": 4, "held": 0.1, "moved": 0.1}),
    ):
        board._keep(Cell(kivi, share, mode, 512).key(4, board.model), result)
    more = page_table("kivi", board, listed, [0.2, 0.1])
    assert cells(more) == [cells(text)[0], ["snapkv+kivi:bits=2", "", "", "0.00", "0.50"]]


def test_answers_below_chance_are_marked(board: Board) -> None:
    listed = entries("tiny-4k")
    assert "†" not in page_table("tova", board, listed, [0.1])
    tova = next(entry for entry in listed if entry.spec == "tova")
    lower = {"right": {"recall": 1, "needles": 0}, "docs": 4, "held": 0.1, "moved": 0.1}
    board._keep(Cell(tova, 0.1, "after", 512).key(4, board.model), lower)
    text = page_table("tova", board, listed, [0.1])
    assert cells(text)[-1] == ["tova", "", "0.12†"] and text.count("†") == 2
    assert "†: fewer right answers than `random`." in text


def test_the_longer_prompts_are_shown_if_every_policy_has_half_of_its_results(board: Board) -> None:
    board.docs[1024] = 4
    found = compared("kivi", entries("tiny-4k"))
    for entry in found:
        assert shown_length(board, found, [0.1]) == 512
        cell = Cell(entry, 0.1, "inside", 1024)
        board._keep(cell.key(4, board.model), {"right": {"recall": 1}, "docs": 4})
    assert shown_length(board, found, [0.1]) == 1024


def test_the_full_cache_has_no_budget(board: Board) -> None:
    text = page_table("full", board, entries("tiny-4k"), [0.2, 0.1])
    assert cells(text)[-1] == ["full", "", "", "0.50", "0.50"]


def test_the_command_fills_every_page_of_a_tree(board: Board, tmp_path: Path) -> None:
    (tmp_path / "docs" / "methods").mkdir(parents=True)
    filled = [page_with(tmp_path / name, "places") for name in ("README.md", "docs/methods/h2o.md")]
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    main(
        ["--results", str(board.results), "--page-only", "--lengths", "512", "--n", "4", "--fill-places", str(tmp_path)]
    )
    overview, of_h2o = ([row[0] for row in cells(page.read_text())] for page in filled)
    assert overview == list(OVERVIEW) and of_h2o == ["window", "snapkv", "h2o", "caote/h2o"]
    assert (tmp_path / "docs" / "other.md").read_text() == "# Other\n"


def test_the_overview_is_of_the_board() -> None:
    assert set(OVERVIEW) <= {entry.spec for entry in entries("tiny-4k")}


def test_the_pages_have_what_the_results_give(tmp_path: Path) -> None:
    """Of the results that were known when a page was filled: others may be added to the file later."""
    found = pages_with(ROOT, PLACE)
    names = {page.stem for page in found}
    assert names >= {*registry.SELECTORS, *registry.CODECS, "README"} - set(DEFAULTS)
    for page in found:
        text = text_at(page, PLACE)
        count = int(re.findall(r"<!-- (\d+) results -->", text)[0])
        board = Board(first_lines(RESULTS, count, tmp_path), DOCS, "tiny-4k")
        assert text == page_table(page.stem, board, entries("tiny-4k"), sorted(SHARES, reverse=True)), page
        assert cells(text), page

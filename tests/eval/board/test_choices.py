"""What pages recommend and compare: policies by situation, by the place of the question, and in long walks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy import registry
from kvpolicy.embedded import tiny
from kvpolicy_eval.board import walk
from kvpolicy_eval.board.__main__ import main
from kvpolicy_eval.board.cells import DOCS, SHARES, Board, Cell
from kvpolicy_eval.board.choices import PLACE, SITUATIONS, tables
from kvpolicy_eval.board.places import OVERVIEW, compared, page_table, shown_length
from kvpolicy_eval.board.places import PLACE as PLACES
from kvpolicy_eval.board.policies import Entry, entries
from kvpolicy_eval.board.walk import Walk, measure, policies, rows, texts
from kvpolicy_eval.common.markdown import pages_with
from kvpolicy_eval.common.results import Known, read_results
from kvpolicy_eval.methods.plan import DEFAULTS, methods
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


TASKS = ["recall", "needles"]


@pytest.fixture
def halves(tmp_path: Path) -> Board:
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


def test_a_table_has_what_is_known_and_nothing_else(halves: Board) -> None:
    listed = entries("tiny-4k")
    text = page_table("kivi", halves, listed, [0.2, 0.1, 0.02])
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
        halves._keep(Cell(kivi, share, mode, 512).key(4, halves.model), result)
    more = page_table("kivi", halves, listed, [0.2, 0.1])
    assert cells(more) == [cells(text)[0], ["snapkv+kivi:bits=2", "", "", "0.00", "0.50"]]


def test_answers_below_chance_are_marked(halves: Board) -> None:
    listed = entries("tiny-4k")
    assert "†" not in page_table("tova", halves, listed, [0.1])
    tova = next(entry for entry in listed if entry.spec == "tova")
    lower = {"right": {"recall": 1, "needles": 0}, "docs": 4, "held": 0.1, "moved": 0.1}
    halves._keep(Cell(tova, 0.1, "after", 512).key(4, halves.model), lower)
    text = page_table("tova", halves, listed, [0.1])
    assert cells(text)[-1] == ["tova", "", "0.12†"] and text.count("†") == 2
    assert "†: fewer right answers than `random`." in text


def test_the_full_cache_has_no_budget(halves: Board) -> None:
    text = page_table("full", halves, entries("tiny-4k"), [0.2, 0.1])
    assert cells(text)[-1] == ["full", "", "", "0.50", "0.50"]


def test_the_longer_prompts_are_shown_if_every_policy_has_half_of_its_results(halves: Board) -> None:
    halves.docs[1024] = 4
    found = compared("kivi", entries("tiny-4k"))
    for entry in found:
        assert shown_length(halves, found, [0.1]) == 512
        cell = Cell(entry, 0.1, "inside", 1024)
        halves._keep(cell.key(4, halves.model), {"right": {"recall": 1}, "docs": 4})
    assert shown_length(halves, found, [0.1]) == 1024


def test_the_command_fills_every_page_of_a_tree(halves: Board, tmp_path: Path) -> None:
    (tmp_path / "docs" / "methods").mkdir(parents=True)
    filled = [page_with(tmp_path / name, "places") for name in ("README.md", "docs/methods/h2o.md")]
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    sizes = ["--lengths", "512", "--n", "4"]
    main(["--results", str(halves.results), "--page-only", *sizes, "--fill-places", str(tmp_path)])
    overview, of_h2o = ([row[0] for row in cells(page.read_text())] for page in filled)
    assert overview == list(OVERVIEW) and of_h2o == ["window", "snapkv", "h2o", "caote/h2o"]
    assert (tmp_path / "docs" / "other.md").read_text() == "# Other\n"


def test_the_pages_have_what_the_results_give(tmp_path: Path) -> None:
    """Of the results that were known when a page was filled: others may be added to the file later."""
    found = pages_with(ROOT, PLACES)
    names = {page.stem for page in found}
    assert names >= {*registry.SELECTORS, *registry.CODECS, "README"} - set(DEFAULTS)
    for page in found:
        text = text_at(page, PLACES)
        count = int(re.findall(r"<!-- (\d+) results -->", text)[0])
        board = Board(first_lines(RESULTS, count, tmp_path), DOCS, "tiny-4k")
        assert text == page_table(page.stem, board, entries("tiny-4k"), sorted(SHARES, reverse=True)), page
        assert cells(text), page


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
    walk.main([*options, "--only", "full", "window"])
    assert len(results.read_text(encoding="utf-8").splitlines()) == 4
    monkeypatch.setattr(walk, "measure", lambda *_: {"refused": "why"})
    walk.main([*options, "--only", "full", "window", "h2o", "--fill", str(page)])
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
        walk.main(["--results", str(tmp_path / "none.jsonl"), "--page-only"])
    assert "--results must be an existing file with --page-only" in capsys.readouterr().err

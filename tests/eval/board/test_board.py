"""The board: what it compares, what it measures once and asks other libraries, and what it shows of it."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvpolicy
from kvpolicy import H2O, registry
from kvpolicy.text.arguments import named_options
from kvpolicy.text.embedded_names import EmbeddedName
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.board import cells, pictures
from kvpolicy_eval.board.__main__ import main
from kvpolicy_eval.board.cells import DOCS, MARKED, SHARES, Board, Cell, accuracy, is_below_chance
from kvpolicy_eval.board.order import LEAST, order
from kvpolicy_eval.board.page import full_cache, peer_refusals, refusals, row, tables, top
from kvpolicy_eval.board.peers import METHODS, PEERS, PeerEvaluator
from kvpolicy_eval.board.policies import CODECS, SELECTOR, Entry, entries, kind_of
from kvpolicy_eval.board.rows import write_rows
from kvpolicy_eval.board.times import Times
from kvpolicy_eval.common.intervals import interval
from kvpolicy_eval.data.tasks import draw_prompts
from kvpolicy_eval.peers import theirs
from kvpolicy_eval.peers.process import Failed
from kvpolicy_lm_eval.data.modes import MODES, place, second_question
from tests.eval.pages import first_lines, page_with, text_at

ASSETS = Path(__file__).parents[3] / "docs" / "assets"
FULL = Entry("full", "all tokens")
SNAPKV = Entry("snapkv", "selector")
QUEST = Entry("full+quest:read={read}", "reader")


def test_every_method_is_on_the_board() -> None:
    listed = entries()
    specs = "+".join(entry.spec for entry in listed)
    for names in registry.BUILT_IN.values():
        for name in set(names) - {"uniform", "even", "drop", "plain", "all"}:
            assert name in specs, name
    assert len({entry.name for entry in listed}) == len(listed)
    assert any("tiny-4k" in entry.spec for entry in entries("tiny-4k"))


class Evaluator:
    """Answers that need no model; `tova` is refused."""

    model = None
    calls: list[tuple[str, float | None, str]]

    def __init__(self, docs: int, length: int, *_: Any) -> None:
        self.docs = docs
        self.calls = []

    def accuracy(
        self, policy: str, byte_share: float | None, mode: str, hold: str = "plain"
    ) -> tuple[dict[str, float], float]:
        self.calls.append((policy, byte_share, mode))
        if policy == "tova":
            raise KVPolicyError("The budget must be larger, got 1; try 2.")
        tasks = ["recall", "needles", *(["passkey"] if mode != "second" else [])]
        return dict.fromkeys(tasks, 1.0 if policy == "full" else 0.5), byte_share or 1.0


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    monkeypatch.setattr(cells, "TaskEvaluator", Evaluator)
    monkeypatch.setattr(cells, "_moved", lambda cell, model: cell.share / 2)
    return Board(tmp_path / "results.jsonl", {512: 4}, "tiny")


def test_a_cell_is_measured_once(board: Board) -> None:
    cell = Cell(SNAPKV, 0.1, "inside", 512)
    assert board.known_cell(cell) is None
    found = board.cell(cell)
    assert found == {"right": {"recall": 2, "needles": 2, "passkey": 2}, "docs": 4, "held": 0.1, "moved": 0.05}
    assert board.cell(cell) is found
    again = Board(board.results, {512: 4}, "tiny")
    assert again.known_cell(cell) == found
    assert again.known_cell(cell._replace(mode="after")) is None
    assert Board(board.results, {512: 5}, "tiny").known_cell(cell) is None
    assert Board(board.results, {512: 4}, "tiny-4k").known_cell(cell) is None


def test_readers_hold_everything_and_the_full_cache_serves_every_budget(board: Board) -> None:
    board.cell(Cell(QUEST, 0.1, "inside", 512))
    board.cell(Cell(FULL, 0.1, "inside", 512))
    board.cell(Cell(FULL, 0.2, "inside", 512))
    calls: Any = board._evaluators[512]
    assert calls.calls == [("full+quest:read=0.1", None, "inside"), ("full", None, "inside")]


def test_a_refusal_is_kept_and_listed(board: Board) -> None:
    tova = Entry("tova", "selector")
    assert "larger" in board.cell(Cell(tova, 0.1, "inside", 512))["refused"]
    assert len(board.results.read_text().splitlines()) == 1
    assert refusals(board, [tova, SNAPKV], [0.2, 0.1], [512]) == "- `tova`: 512 tokens at 10%"
    assert row(board, tova, 0.1, 512)[2:6] == ["", "", "", ""]


def test_a_row_has_all_modes_and_the_largest_cost(board: Board) -> None:
    for mode in ("inside", "after"):
        board.cell(Cell(SNAPKV, 0.1, mode, 512))
    halves = ["0.50 (.25-.75)", "0.50 (.25-.75)"]
    assert row(board, SNAPKV, 0.1, 512)[2:6] == [*halves, "", ""]
    assert pictures.points(board, [SNAPKV], [0.1], 512, "held") == []
    board.cell(Cell(SNAPKV, 0.1, "second", 512))
    assert pictures.points(board, [SNAPKV], [0.1], 512, "held") == [pictures.Point(SNAPKV, 0.1, 0.5)]
    assert pictures.points(board, [SNAPKV], [0.1], 512, "moved")[0].cost == 0.05
    assert pictures.points(board, [SNAPKV], [0.1], 512, "time") == []
    board._keep("time snapkv at 0.1", {"ratio": 0.5, "low": 0.4, "high": 0.6})
    rest = ["0.50 (.22-.78)", "0.50 (.34-.66)", "", "0.10", "0.05", "0.50"]
    assert row(board, SNAPKV, 0.1, 512) == ["`snapkv`", "selector", *halves, *rest]


def test_the_best_policies_of_a_budget_hold_no_more_than_it(board: Board) -> None:
    for entry in (FULL, QUEST, SNAPKV, Entry("tova", "selector"), Entry("h2o", "selector")):
        board.cell(Cell(entry, 0.1, "inside", 512))
    board.known[Cell(SNAPKV, 0.2, "after", 512).key(4, "tiny")] = {"right": {"recall": 3}, "docs": 4}
    found = top(board, [FULL, QUEST, SNAPKV, Entry("tova", "selector"), Entry("h2o", "selector")], [0.2, 0.1])
    assert found.splitlines() == [
        "| 512 tokens | question inside | question after |",
        "|---|---|---|",
        "| 20% |  | `snapkv` 0.75 (.30-.95) |",
        "| 10% | `snapkv` 0.50 (.25-.75) |  |",
        "| 10% | `h2o` 0.50 (.25-.75) |  |",
        "",
        "<!-- 6 results -->",
    ]


def test_what_answers_less_than_chance_is_marked(board: Board, tmp_path: Path) -> None:
    """At the same tokens, budget and place of the question, where `random` has a result; nothing else is compared."""
    chance, h2o, tova = (Entry(name, "selector") for name in ("random", "h2o", "tova"))
    inside = {chance: 2, SNAPKV: 1, h2o: 2, QUEST: 0}
    answers = [*((entry, "inside", right) for entry, right in inside.items()), (tova, "after", 0)]
    for entry, mode, right in answers:
        board._keep(Cell(entry, 0.1, mode, 512).key(4, "tiny"), {"right": {"recall": right}, "docs": 4})
    board._keep(Cell(tova, 0.2, "inside", 512).key(4, "tiny"), {"right": {"recall": 0}, "docs": 4})
    listed = [chance, SNAPKV, h2o, tova, QUEST]
    marked = [cell for entry in listed for mode in ("inside", "after") for cell in [Cell(entry, 0.1, mode, 512)]]
    assert [cell.entry for cell in marked if is_below_chance(board, cell)] == [SNAPKV]
    assert not is_below_chance(board, Cell(tova, 0.2, "inside", 512))
    assert row(board, SNAPKV, 0.1, 512)[2].endswith("†") and not row(board, h2o, 0.1, 512)[2].endswith("†")
    text = tables(board, listed, [0.2, 0.1], [512])
    assert text.count("†: fewer right answers than `random`.") == 1 and text.count("†") == 2
    found = top(board, listed, [0.1]).splitlines()
    assert found[4].startswith("| 10% | `snapkv` 0.25 (.05-.70)† |") and MARKED in found
    write_rows(tmp_path / "rows.csv", board, listed, [0.1])
    with (tmp_path / "rows.csv").open(newline="") as file:
        below = {line["policy"]: line["below"] for line in csv.DictReader(file)}
    assert below == dict.fromkeys(("random", "h2o", "tova", "full+quest:read=0.1"), "") | {"snapkv": "inside"}


def test_methods_of_other_libraries_that_are_refused_alike_are_one_row(board: Board) -> None:
    for entry in PEERS[:3]:
        for share in (0.1, 0.05):
            found = {"refused": f"It holds {entry is PEERS[0]}."}
            board.known[Cell(entry, share, "inside", 512).key(4, "tiny")] = found
    assert peer_refusals(board, PEERS, [0.1, 0.05], [512]).splitlines()[2:] == [
        f"| `{PEERS[0].spec}` | 512 tokens at 10%, 5% | It holds True. |",
        f"| `{PEERS[1].spec}`, `{PEERS[2].spec}` | 512 tokens at 10%, 5% | It holds False. |",
    ]


def test_the_page_and_the_file_have_what_the_results_give(tmp_path: Path) -> None:
    """Of the results that were known when they were written: others may be added to the results later."""
    page = ASSETS.parent / "board.md"
    text = text_at(page, "board-top")
    count = int(re.findall(r"<!-- (\d+) results -->", text)[0])
    board = Board(first_lines(ASSETS / "board.jsonl", count, tmp_path), DOCS, "tiny-4k")
    listed = [*entries("tiny-4k"), *PEERS]
    shares = sorted(SHARES, reverse=True)
    assert text == top(board, listed, shares)
    assert order(board, entries("tiny-4k"), shares) in page.read_text(encoding="utf-8")
    write_rows(tmp_path / "board.csv", board, listed, shares)
    assert (tmp_path / "board.csv").read_text(encoding="utf-8") == (ASSETS / "board.csv").read_text(encoding="utf-8")


def test_only_what_is_measured_has_a_table(board: Board) -> None:
    board.cell(Cell(FULL, 0.1, "inside", 512))
    assert tables(board, [FULL, SNAPKV], [0.2, 0.1], [512]) == ""
    board.cell(Cell(SNAPKV, 0.1, "inside", 512))
    text = tables(board, [FULL, SNAPKV], [0.2, 0.1], [512])
    assert text.count("###") == 1
    assert "512 tokens, 10% of the bytes" in text


@pytest.mark.parametrize(("right", "docs"), [(0, 8), (8, 8), (3, 8), (120, 128)])
def test_intervals_are_wilsons(right: int, docs: int) -> None:
    z = 1.959964
    share = right / docs
    center = (share + z**2 / (2 * docs)) / (1 + z**2 / docs)
    half = z / (1 + z**2 / docs) * (share * (1 - share) / docs + z**2 / (4 * docs**2)) ** 0.5
    found = interval(right, docs)
    assert (found.low, found.mean, found.high) == pytest.approx((center - half, share, center + half), abs=1e-6)


def test_nothing_measured_has_no_accuracy() -> None:
    assert accuracy([]) is None
    assert accuracy([{"right": {"recall": 1}, "docs": 2}, {"refused": "no"}]) is None


def test_the_order_of_policies_is_compared_between_lengths(tmp_path: Path) -> None:
    board = Board(tmp_path / "results.jsonl", {1024: 40, 512: 40}, "tiny")
    listed = [Entry(f"p{number}", "selector") for number in range(LEAST)]
    for number, entry in enumerate(listed):
        for length, right in ((512, number), (1024, LEAST - number)):
            for mode in ("inside", "after")[: 1 + (number > 0)]:  # `after`, one policy is missing
                cell = Cell(entry, 0.1, mode, length)
                board.known[cell.key(40, "tiny")] = {"right": {"recall": right}, "docs": 40}
    assert order(board, listed, [0.2, 0.1]).splitlines()[2:] == [f"| 512 and 1,024 | 10% | -1.00 ({LEAST}) |  |  |  |"]


def test_the_full_cache_by_place_of_the_question(board: Board) -> None:
    board.cell(Cell(FULL, 0.1, "inside", 512))
    board.cell(Cell(FULL, 0.1, "second", 512))
    assert full_cache(board, [512]).splitlines()[2:] == ["| 512 | 12/12 |  | 8/8 |"]


def test_the_frontier_equals_a_search_over_all_pairs() -> None:
    given = [pictures.Point(FULL, cost % 7, (cost * 5 % 11) / 11) for cost in range(30)]
    pairs = {(point.cost, point.answers) for point in given}
    best = {one for one in pairs if not any(b != one and b[0] <= one[0] and b[1] >= one[1] for b in pairs)}
    assert {(point.cost, point.answers) for point in pictures.frontier(given)} == best


def test_the_command_fills_a_page(board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_with(tmp_path / "page.md", "board-top", "board-order", "board-refused", "board-peers-refused")
    arguments = ["--results", str(board.results), "--lengths", "512", "--shares", "0.1", "--n", "4", "--model", "tiny"]
    arguments += ["--only", "full", "snapkv", "--fill", str(page), "--pictures", str(tmp_path), "--no-times"]
    main(arguments)
    assert "| `snapkv` | selector | 0.50" in capsys.readouterr().out
    assert "| 10% | `snapkv` 0.50 (.25-.75) | `snapkv` 0.50 (.25-.75) |" in page.read_text()
    filed = csv.DictReader(board.results.with_suffix(".csv").read_text().splitlines())
    shown = [[line[key] for key in ("policy", "inside", "step")] for line in filed]
    assert shown == [["full", "1", ""], ["snapkv", "0.5", ""]]
    assert (tmp_path / "board-512.svg").read_text().startswith("<?xml")
    measured = [json.loads(line)["key"] for line in board.results.read_text().splitlines()]
    assert len(measured) == len(set(measured)) == 7
    main([*arguments, "--page-only"])
    assert len(board.results.read_text().splitlines()) == 7


def test_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy_eval.board.times.LENGTH", 256)
    monkeypatch.setattr("kvpolicy_eval.board.times.LAYERS", 1)
    times = Times()
    for _ in range(2):  # the stock cache is cut to the prompt before each policy
        found = times.measure(SNAPKV, 0.25)
        assert 0 < found["low"] <= found["ratio"] <= found["high"]
    assert times.cache.get_seq_length() < 256 + 8 * 20
    assert "refused" in times.measure(SNAPKV, 0.001)


@pytest.mark.parametrize("model", ["tiny", "tiny-4k"])
def test_every_entry_attaches_to_its_model(model: EmbeddedName) -> None:
    """Above all, every calibration that an entry names is shipped."""
    embedded, _ = kvpolicy.tiny(name=model)
    for entry in entries(model):
        with kvpolicy.attach(embedded, entry.at(0.2), hold=entry.hold):
            kvpolicy.PolicyCache(embedded, f"{entry.at(0.2)}@800KiB" if entry.by_bytes else None, prompt=512, new=4)


def test_the_page_says_how_much_padding_adds_to_a_budget() -> None:
    """Policies answer in padded batches, methods of other libraries one prompt at a time."""
    _, tokenizer = kvpolicy.tiny(name="tiny-4k")
    found: list[float] = []
    tasks: list[float] = []
    for length, docs in DOCS.items():
        sizes = [[len(tokenizer(text).input_ids) for text, _ in each] for each in draw_prompts(docs, length).values()]
        found.append(sum(len(rows) * max(rows) for rows in sizes) / sum(map(sum, sizes)) - 1)
        tasks += [len(rows) * max(rows) / sum(rows) - 1 for rows in sizes]
    page = " ".join((ASSETS.parent / "board.md").read_text(encoding="utf-8").split())
    one, two, three = (f"{share:.0%}".replace("%", " %") for share in found)
    assert f"{one} more than of its tokens alone at 512 tokens, {two} at 1,024 and {three} at 4,096, and up to" in page
    assert f"up to {max(tasks):.0%}".replace("%", " %") + " in one task" in page


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Mine(H2O):
    """A selector of another package."""


def test_listed_parts_have_the_kind_of_their_section() -> None:
    single = [entry for entry in entries() if entry.kind != "combination"]
    other = [entry.spec for entry in single if kind_of(entry.spec) != entry.kind]
    # Codecs that need another selector than `SELECTOR` are known by name.
    assert all(
        spec.partition("+")[0] != SELECTOR and spec.rpartition("+")[2] in {*CODECS.values(), *registry.CODECS}
        for spec in other
    )
    assert len(single) > 70 and len(other) < 8


def test_an_own_selector_is_a_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry._load
    monkeypatch.setattr(
        registry, "_entry_points", lambda: [EntryPoint("mine", f"{__name__}:Mine", "kvpolicy.selectors")]
    )
    monkeypatch.setattr(registry, "_load", lambda name, target: Mine if name == "mine" else known(name, target))
    registry._table.cache_clear()
    try:
        assert kind_of("mine") == "selector"
        assert kind_of("mine+kivi") == kind_of("squeeze+mine") == "combination"
    finally:
        registry._table.cache_clear()


PRESS = PEERS[0]
ADAKV = next(entry for entry in PEERS if "Ada" in entry.spec)
TOVA = Entry("TOVAPress()", "kvpress")
TOKEN_BYTES = 2 * 8 * 4 * 32 * 4
"""Keys and values, layers, KV heads, channels, fp32."""


class Peer:
    """Answers recall alone, holds what it may, or everything as AdaKV, and fails as TOVA."""

    def __init__(self, docs: int, mode: str) -> None:
        _, self.tokenizer = kvpolicy.tiny()
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.compressed: dict[tuple[int, ...], str] = {}
        self.asked: list[dict[str, Any]] = []
        for task, prompts in draw_prompts(docs, 512).items():
            for prompt in prompts:
                if mode == "second" and second_question(prompt) is None:
                    continue
                placed = place(prompt, mode)
                ids = tuple(self.tokenizer(placed.compressed + placed.fed).input_ids)
                self.compressed[ids] = placed.compressed
                if task == "recall":
                    self.answers[ids] = self.tokenizer(placed.answer, add_special_tokens=False).input_ids

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        if do == "load":
            assert (Path(asked["path"]) / "model.safetensors").exists() and asked["dtype"] == "float32"
            return {}
        self.asked.append(asked)
        if asked["method"] == "tova":
            raise Failed("ValueError: too short")
        ids = tuple(asked["ids"][0])
        new = asked["new"]
        full = (len(ids) + new - 1) * TOKEN_BYTES
        return {"ids": self.answers.get(ids, [0] * new), "held": full if "ada" in asked["method"] else asked["limit"]}


@pytest.mark.parametrize("mode", MODES)
def test_a_peer_gets_the_prompts_of_the_board_and_the_bytes(mode: str) -> None:
    peer: Any = Peer(2, mode)
    right, held = PeerEvaluator(peer, 2, 512, "tiny").accuracy(PRESS.spec, 0.1, mode)
    assert right == {task: float(task == "recall") for task in right} and ("passkey" in right) == (mode != "second")
    assert held == pytest.approx(0.1, abs=1e-4)
    for asked in peer.asked:
        ids = asked["ids"][0]
        after = asked["after"]
        assert asked["limit"] == int(0.1 * (len(ids) + asked["new"] - 1) * TOKEN_BYTES)
        assert asked["method"] == METHODS[PRESS.spec]
        text = peer.tokenizer.decode(ids[:-after] if after else ids, skip_special_tokens=True)
        whole = peer.compressed[tuple(ids)]
        # The last token of few_shot's questions is held back, since its answers have a single token.
        assert text == whole if asked["new"] > 1 or mode != "inside" else whole.startswith(text) and after == 1


def test_what_holds_more_or_fails_has_no_row_and_its_reason_is_listed(tmp_path: Path) -> None:
    peer: Any = Peer(1, "inside")
    board = Board(tmp_path / "results.jsonl", {512: 1}, "tiny", peer)
    for entry in (PRESS, ADAKV, TOVA):
        board.cell(Cell(entry, 0.2, "inside", 512))
    assert row(board, PRESS, 0.2, 512)[:3] == [f"`{PRESS.spec}`", "kvpress", "0.17 (.03-.56)"]
    assert row(board, ADAKV, 0.2, 512)[2:6] == row(board, TOVA, 0.2, 512)[2:6] == ["", "", "", ""]
    assert peer_refusals(board, [PRESS, ADAKV, TOVA], [0.2], [512]).splitlines()[2:] == [
        f"| `{ADAKV.spec}` | 512 tokens at 20% | It holds 100.0% of the full cache's bytes. |",
        "| `TOVAPress()` | 512 tokens at 20% | ValueError: too short |",
    ]


def test_without_a_peer_its_cells_are_refused_and_the_command_measures_none(tmp_path: Path) -> None:
    board = Board(tmp_path / "results.jsonl", {512: 1}, "tiny")
    with pytest.raises(ValueError, match="--peers"):
        board.cell(Cell(PRESS, 0.2, "inside", 512))
    main(["--results", str(board.results), "--only", PRESS.spec, "--no-times"])
    assert not board.results.exists()
    with pytest.raises(ValueError, match="no environment of the peers"):
        main(["--results", str(board.results), "--peers", "--env", str(tmp_path / "none"), "--no-times"])


@pytest.mark.parametrize("entry", PEERS)
def test_the_code_of_a_row_is_what_the_peer_makes(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of `theirs` makes the press, or the cache, that the row names."""

    def recorded(name: str) -> Any:
        return lambda *args, compression_ratio=None, **options: (
            f"{name}({', '.join([*args, *(f'{key}={value}' for key, value in options.items())])})"
        )

    fake: Any = ModuleType("kvpress")
    for name in [*theirs.PRESSES.values(), "AdaKVPress"]:
        setattr(fake, name, recorded(name))
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    parts = METHODS[entry.spec].split("+")
    made = [theirs.press_of(parts.pop(0), 0.5)] if entry.kind != "transformers" else []
    for backend, bits in (quant.split("-") for quant in parts):
        made.append(f"QuantizedCache('{backend}', nbits={bits})")
    assert ", ".join(made) == entry.spec

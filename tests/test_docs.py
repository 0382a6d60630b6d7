"""Every example in the docs runs and prints what stands there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
DOCS = Path(__file__).parent.parent / "docs"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SOURCE = re.compile(r'^```python title="half.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
EXAMPLES = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)
PAGES = sorted(page for page in DOCS.rglob("*.md") if ">>> " in page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text(encoding="utf-8")
    examples = EXAMPLES.findall(text)
    assert len(examples) == text.count("```pycon"), "a block of examples is not closed"
    names = {"__name__": "docs"}
    for source in SOURCE.findall(text):  # what the examples of a page on extending use
        exec(source, names)
    test = doctest.DocTestParser().get_doctest("\n".join(examples), names, str(page), str(page), 0)
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test)
    assert result.attempted
    assert not result.failed, capsys.readouterr().out


def test_troubleshooting_quotes_messages_that_exist() -> None:
    packages = [DOCS.parent / "kvpolicy", DOCS.parent / "integrations"]
    paths = sorted(path for package in packages for path in package.rglob("*.py"))
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    source = re.sub(r'"\n\s*f?"', "", source)  # a message may be written in several pieces
    table = (DOCS / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) > 20
    pieces = [piece.strip() for message in messages for piece in message.split("...")]
    assert not [piece for piece in pieces if piece not in source]

"""Fenced blocks of Markdown pages: where they are, and what can be run of them."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.doc_models import HUB, stand_in

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LANGUAGES = {"pycon", "python", "console", "bash", "yaml", "toml", "json", "text", "bibtex"}
PEERS = {"kvpress", "vllm"}
"""Packages that pages speak of and that this environment need not have."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The file it stands in.
        line: Of its first line of text.
        language: The first word of the fence, or nothing.
        title: The file that it shows, where it shows one.
        text: What stands in it, without its indent.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        """File and line, as an editor understands them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def modules(self) -> set[str]:
        """The top names of the modules that a block of Python imports."""
        nodes = list(ast.walk(ast.parse(self.text)))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        return {name.partition(".")[0] for name in names}

    @property
    def runs_here(self) -> bool:
        """Whether a block of Python asks for nothing that is elsewhere: a server, a peer, other ranks.

        A model of the hub is here, if it is loaded by `AutoModelForCausalLM`, which reads `doc_models.stand_in`.
        """
        served = HUB.search(self.text) and "AutoModelForCausalLM.from_pretrained(" not in self.text
        return not (served or self.modules & PEERS or "kvpolicy_deepspeed.ranks(" in self.text)


def pages() -> list[Path]:
    """The README and every page of the site."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    content = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(content):
        indent = found["indent"]
        info = found["info"].strip()
        text = "\n".join(line.removeprefix(indent) for line in found["text"].split("\n"))
        title = _TITLE.search(info)
        line = content.count("\n", 0, found.start()) + 2
        yield Block(page, line, info.split(" ")[0].strip("{}."), title[1] if title else "", text)


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def run_python(page: Path) -> int:
    """Run a page's Python in one namespace, in order; what cannot run here must name what exists.

    Models of the hub are put into the working folder.

    Returns:
        How many blocks there were.

    Raises:
        AssertionError: Where an example prints something else than the page says.
    """
    names: dict[str, Any] = {"__name__": "docs"}
    count = 0
    for block in blocks(page):
        if block.title.startswith("test_"):
            compile(block.text, block.place, "exec")  # `test_extend` runs it
        elif block.language == "pycon":
            names = _examples(block, names)
        elif block.language == "python" and "--8<--" in block.text:  # scripts, which `test_examples` runs
            missing = [
                path for path in re.findall(r"^[\w/.-]+\.py$", block.text, re.MULTILINE) if not (DOCS / path).is_file()
            ]
            assert not missing, f"{block.place} shows {missing}, which is not there"
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
            if block.runs_here:
                stand_in(block.text, Path())
                exec(code, names)
            else:
                resolve(block)
        else:
            continue
        count += 1
    return count


def _examples(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    test = doctest.DocTestParser().get_doctest(block.text, names, block.place, str(block.page), block.line - 1)
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=told.append, clear_globs=False)
    assert result.attempted, f"{block.place} holds no example"
    assert not result.failed, "".join(told)
    return test.globs


def resolve(block: Block) -> None:
    """Import what a block imports, and look up every attribute that it takes from a module.

    Raises:
        AttributeError: Where a module has no such name.
    """
    names: dict[str, Any] = {}
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in PEERS:
                    importlib.import_module(alias.name)
                    top = alias.name if alias.asname else alias.name.partition(".")[0]
                    names[alias.asname or top] = importlib.import_module(top)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in PEERS:
            module = importlib.import_module(node.module or "")
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _look_up(ast.unparse(node).split("."), names)


def _look_up(path: list[str], names: dict[str, Any]) -> None:
    found = names.get(path[0])
    for name in path[1:]:
        if not isinstance(found, ModuleType):
            return
        found = getattr(found, name)

"""What a new method costs: its file, a line of the registry, its page and its slow version; one command does the rest.

Two joke methods are added to a copy of the source tree: the selector and the codec of docs/extend.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.doc_blocks import DOCS, ROOT, blocks

if not DOCS.is_dir():
    pytest.skip("the docs are not installed", allow_module_level=True)

COPIED = ["docs", "eval", "integrations", "kvpolicy", "tests", "README.md", "mkdocs.yml", "pyproject.toml"]


SLOW_FIZZBUZZ = '''
"""Tokens at positions that are divisible by 3 or 5."""

from __future__ import annotations

import math

from ..coding import Config

DEFAULTS: Config = {"fizz": 3, "buzz": 5}


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """1 for a multiple of 3, and 2 for one of 5; the newest token stays."""
    if position == length - 1:
        return math.inf
    return float(position % config["fizz"] == 0) + 2.0 * float(position % config["buzz"] == 0)
'''
SLOW_HALF = '''
"""One signed byte per element, and one scale per token."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..coding import Codec, Config
from ..scalars import Coded, scalars, vector
from ._common import Books, lone


class Head:
    """One KV head, whose tokens do not depend on each other."""

    def fit(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing is fitted."""

    def code(self, key: Tensor, value: Tensor) -> Coded:
        """Codes of a token, and what is read back of its key and value."""
        return {}, self.read(key), self.read(value)

    def read(self, x: Tensor) -> Tensor:
        """What is read back of a vector."""
        numbers = scalars(x)
        scale = np.float32(max(max(abs(number) for number in numbers), np.float32(1e-30)) / np.float32(127))
        return vector([np.round(number / scale) * scale for number in numbers])


def codec(config: Config, calibration: Books) -> Codec:
    """The codec as the engine sees it."""
    return lone({"block_size": 16, "residual_length": 16}, lambda layer, head, dim, given: Head())
'''
PAGE = """
---
{front}
---

# {name}

**A joke.**

![A picture that a command draws](../pictures/{name}.svg)

`python -m kvpolicy_eval.pictures {name}` draws the picture.

## Formula

## Source and differences

## Cost and limits

## Measured

Printed by `python -m kvpolicy_eval.methods {name} --fill docs/methods`.

<!-- table:measured -->
{measured}<!-- /table -->

<!-- table:places -->
{measured}<!-- /table -->

## Citation
"""
REGISTRY = "kvpolicy/registry.py"


class Method(NamedTuple):
    """A method and all that a contributor writes of it: its file, its slow version, the front matter of its page."""

    kind: str
    name: str
    cls: str
    module: str
    slow: str
    front: str

    @property
    def files(self) -> dict[str, str]:
        """The new files by their paths."""
        return {
            f"kvpolicy/{self.kind}s/{self.name}.py": self.module,
            f"tests/reference/{self.kind}s/{self.name}.py": self.slow,
            f"docs/methods/{self.name}.md": PAGE,
        }

    def add(self, tree: Path, measured: str) -> None:
        """Write the files, and the line of the registry; `measured` is what the tables of the page have."""
        for path, text in self.files.items():
            assert not (tree / path).exists()
            if text == PAGE:
                table = f"{measured}\n" if measured else ""
                text = PAGE.format(name=self.name, front=self.front, measured=table)
            (tree / path).write_text(text.lstrip("\n"), encoding="utf-8")
        registry = tree / REGISTRY
        text = registry.read_text(encoding="utf-8")
        start = f"{self.kind.upper()}S = {{\n"
        line = f'    "{self.name}": "kvpolicy.{self.kind}s.{self.name}:{self.cls}",\n'
        assert text.count(start) == 1
        registry.write_text(text.replace(start, start + line), encoding="utf-8")


def shown(kind: str, name: str, summary: str, more: str = "") -> str:
    """The module of a page of docs/extend, whose docstring says more, and what its source is."""
    (block,) = (some for some in blocks(DOCS / "extend" / f"{kind}.md") if some.title == f"kvpolicy_{name}.py")
    assert block.text.count(f'{summary}"""') == 1
    source = f"    Source:\n        docs/extend/{kind}.md.\n"
    return block.text.replace(f'{summary}"""', f'{summary}\n\n{more}{source}    """')


ARGUMENTS = """    Args:
        fizz: Divides the positions of few tokens.
        buzz: Divides those of still fewer, which are worth more.
        decode: `evict` evicts one token for each generated one; `grow` keeps generated tokens beside the budget.

"""
METHODS = [
    Method(
        "selector",
        "fizzbuzz",
        "FizzBuzz",
        shown("selector", "fizzbuzz", "is divisible by `fizz`, `buzz` or, best of all, both.", ARGUMENTS),
        SLOW_FIZZBUZZ,
        "what it keeps: tokens at positions that are divisible by 3 or 5\n"
        "attention used in the prompt: none\n"
        "attention used while decoding: none",
    ),
    Method(
        "codec",
        "half",
        "Half",
        shown("codec", "half", "Store tokens in 8 bits per element."),
        SLOW_HALF,
        "what it does: one byte per element",
    ),
]
GENERATED = {
    "README.md",
    "mkdocs.yml",
    "kvpolicy/__init__.py",
    REGISTRY,  # the first sentences of the docstrings
    "docs/api/index.md",
    "docs/api/selectors.md",
    "docs/api/codecs.md",
    "docs/methods/index.md",
    "docs/pictures/fizzbuzz.svg",
    "docs/pictures/half.svg",
}
"""What the command writes, apart from the measurements on the pages."""

GUARDS = [
    "tests/test_registry.py",
    "tests/test_api_pages.py::test_every_public_name_is_listed[kvpolicy]",
    "tests/test_api_pages.py::test_listed_names_are_there_and_documented",
    "tests/test_api_pages.py::test_methods_name_their_source",
    "tests/test_api_pages.py::test_types_see_the_names_that_are_looked_up[kvpolicy]",
    "tests/test_layout.py::test_every_method_has_a_page",
    "tests/test_docs.py::test_every_page_is_in_the_navigation",
    "tests/eval/catalog/test_catalog.py::test_every_list_is_current",
    "tests/eval/methods/test_methods.py::test_what_is_measured_of_a_method_is_of_this_method",
    "tests/eval/pictures/test_pictures.py::TestPages",
    "tests/eval/pictures/test_pictures_codecs.py::test_every_codec_has_a_picture",
    "tests/eval/pictures/test_pictures_codecs.py::test_pages_show_their_pictures",
]
"""Tests that ask something of all methods together."""

EACH = [
    "tests/conformance/test_layer.py",
    "tests/conformance/test_traits.py",
    "tests/conformance/test_codes.py",
]
"""Tests that have cases of every method."""

SCRIPT = """
import sys
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy_eval.catalog.__main__ import main

assert Path(kvpolicy.__file__).parents[1] == Path.cwd(), kvpolicy.__file__
assert main(["--check"]) == 1
print("command")
assert main(["--n", "1", "--n-codecs", "1"]) == 0
print("checked")
assert main(["--check"]) == 0
print("tested", flush=True)
assert str(kvpolicy.Policy.parse("kvcrush/fizzbuzz+half@0.5")) == "kvcrush/fizzbuzz+half@0.5"
assert kvpolicy.Policy.parse("fizzbuzz+half") == kvpolicy.Policy(selector=kvpolicy.FizzBuzz(), codec=kvpolicy.Half())
options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
for words in sys.argv[1:]:
    assert pytest.main([*options, *words.split("|")]) == 0
"""


LISTS = """
from pathlib import Path

from kvpolicy_eval.catalog.lists import places

for place in places(Path()):
    place.write(Path())
"""
"""The part of the command that takes no time."""


def contents(tree: Path) -> dict[str, bytes]:
    """Every file of a tree but what Python and pytest leave."""
    paths = [path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in paths}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """The files that differ, or are in one tree only."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def python(tree: Path, *words: str) -> str:
    """What a process prints that imports the packages of a tree."""
    folders = [tree, tree / "integrations", tree / "eval"]
    path = os.pathsep.join([*map(str, folders), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            # With what is compiled already; a file beside it that another process still writes is none of it.
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_method_is_four_files_and_a_command(tree: Path) -> None:
    before = contents(tree)
    for method in METHODS:
        method.add(tree, "| policy |")
    written = contents(tree)
    assert changed(before, written) == {path for method in METHODS for path in [*method.files, REGISTRY]}
    assert all(len([*method.files, REGISTRY]) == 4 for method in METHODS)

    printed = python(
        tree, "-c", SCRIPT, "|".join(GUARDS), "|".join([*EACH, "-m", "not full and not gpu", "-k", "fizzbuzz or half"])
    )
    asked, _, rest = printed.partition("command\n")
    assert "docs/methods/index.md: codecs\n" in asked and "fizzbuzz.svg is missing\n" in asked
    assert not rest.partition("checked\n")[2].partition("tested\n")[0], "something is still out of date"
    assert changed(written, contents(tree)) == GENERATED
    passed = [int(count) for count in re.findall(r"^(\d+) passed", printed, re.MULTILINE)]
    assert len(passed) == 2 and min(passed) > 20, printed


@pytest.mark.needs("ruff")
def test_the_lists_that_the_command_writes_are_in_ruffs_order(tree: Path) -> None:
    for method in METHODS:
        method.add(tree, "| policy |")
    python(tree, "-c", LISTS)
    written = ["kvpolicy/__init__.py", REGISTRY]
    assert all("Half" in (tree / path).read_text(encoding="utf-8") for path in written)
    subprocess.run([sys.executable, "-m", "ruff", "check", *written], cwd=tree, check=True)


@pytest.mark.slow
def test_the_command_measures_for_pages_whose_table_is_empty(tree: Path) -> None:
    for method in METHODS:
        method.add(tree, "")
    written = contents(tree)
    printed = python(tree, "-c", SCRIPT)
    assert "docs/methods/fizzbuzz.md: its table is empty\n" in printed
    pages = {f"docs/methods/{method.name}.md" for method in METHODS}
    assert changed(written, contents(tree)) == GENERATED | pages
    for page in pages:
        table, _, by_place = (tree / page).read_text(encoding="utf-8").rpartition("<!-- table:places -->")
        assert f"| `{Path(page).stem}" in table.partition("<!-- table:measured -->")[2]
        assert "| `snapkv` | 0." in by_place, by_place

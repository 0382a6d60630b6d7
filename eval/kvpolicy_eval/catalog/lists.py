"""Every list of methods in the code and in the documentation.

The order is that of the registry. What a table says of a method stands in the front matter of its page, under the names
of the columns; a page of several methods has an entry for each. The source is that of the docstring unless the front
matter names another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

import kvpolicy
from kvpolicy import registry
from kvpolicy.cli.strategy_docs import read
from kvpolicy.engine.state import slot_tensors
from kvpolicy.registry import BUILT_IN, Kind, built_in_classes
from kvpolicy_eval.catalog import features, field
from kvpolicy_eval.catalog.places import Place
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.methods.plan import page_of

MAX_COLUMNS = 120
"""Of lines of code."""

COLUMNS: dict[Kind, list[str]] = {
    "allocator": ["what it does", "input", "memory while prefilling", "source"],
    "head_allocator": ["what it does", "input", "source"],
    "selector": [
        "what it keeps",
        "attention used in the prompt",
        "attention used while decoding",
        "statistics",
        "source",
    ],
    "merger": ["what it does", "when", "score bias", "source"],
    "codec": ["what it does", "source"],
    "reader": ["what a step reads", "what it scores", "source"],
}
"""Columns of the tables of docs/methods/index.md after the name."""

API_PAGES: dict[Kind, str] = {
    "allocator": "allocators",
    "head_allocator": "allocators",
    "selector": "selectors",
    "merger": "codecs",
    "codec": "codecs",
    "reader": "readers",
}
"""Pages of docs/api that list the methods of a kind."""


def places(root: Path) -> list[Place]:
    """All generated places.

    Args:
        root: Folder of the source tree, whose pages of methods are read.
    """
    found = [
        Place(path="kvpolicy/__init__.py", name="imports", text=_imports(vars(kvpolicy)["_LAZY"], indent="    ")),
        Place(path="kvpolicy/registry.py", name="summaries", text=_summaries()),
    ]
    known = field.load()
    for name, text in (
        ("systems", f"\n{field.table_of(known.systems)}\n"),
        ("presses", f"\n{field.table_of(known.presses)}\n"),
        ("kvpress-version", known.version),
    ):
        found.append(Place(path="docs/field.md", name=name, text=text))
    supported = features.load()
    for name, text in (("features", supported.table()), ("feature-tests", supported.tests())):
        found.append(Place(path="docs/guide/supported.md", name=name, text=f"\n{text}\n"))
    for kind, names in BUILT_IN.items():
        kinds = f"{kind}s"
        entries = "".join(f"          - methods/{name}.md\n" for name in names if page_of(name) == name)
        found += [
            Place(path="README.md", name=kinds, text=_in_code(names)),
            Place(path="mkdocs.yml", name=kinds, text=entries),
            Place(path="docs/methods/index.md", name=kinds, text=f"\n{index(root, kind)}\n"),
            Place(path="docs/api/index.md", name=kinds, text=_in_code(built_in_classes(kind))),
            Place(path=f"docs/api/{API_PAGES[kind]}.md", name=kinds, text=_api(built_in_classes(kind))),
        ]
    return found


def index(root: Path, kind: Kind) -> str:
    """The table of all methods of a kind."""
    rows = [[f"[`{name}`]({_address(name)})", *_cells(root, name)] for name in BUILT_IN[kind]]
    return table(["name", *COLUMNS[kind]], rows)


def front_matter(pages: Path, name: str) -> dict[str, str]:
    """The front matter of a method.

    Args:
        pages: Folder of the pages of methods.
        name: The method. On a page of several methods, its entry is looked up.

    Raises:
        ValueError: If it has none.
    """
    page = pages / f"{page_of(name)}.md"
    found = re.match(r"---\n(.*?)^---\n", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"{page} must begin with front matter, see the other pages of methods.")
    said = yaml.load(found[1], Loader=yaml.BaseLoader)  # strings only: `no` is not False
    if page.stem != name:
        if name not in said:
            raise ValueError(f"The front matter of {page} must have an entry for {name!r}.")
        said = said[name]
    return said


def _address(name: str) -> str:
    """Where a method is described, from docs/methods/index.md."""
    page = page_of(name)
    return f"{page}.md" if page == name else f"{page}.md#{name}"


def _cells(root: Path, name: str) -> Iterator[str]:
    """Cells of a method in the table of its kind.

    Raises:
        ValueError: If the front matter lacks a column, or has a key that is none.
    """
    kind, strategy = registry.lookup(name)
    pages = root / "docs" / "methods"
    page = pages / f"{page_of(name)}.md"
    said = front_matter(pages, name)
    if unknown := said.keys() - {*COLUMNS[kind]}:
        raise ValueError(f"The front matter of {page} has no column {min(unknown)!r}; it has {COLUMNS[kind]}.")
    for column in COLUMNS[kind]:
        if column in said:
            yield said[column]
        elif column == "source":
            yield _source(strategy)
        elif column == "statistics":
            yield f"{sum(part.nbytes for part in slot_tensors(strategy().alloc(1, 1, 1, 'cpu')))} bytes"
        else:
            raise ValueError(f"The front matter of {page} must have {column!r}.")


def _source(strategy: type[Any]) -> str:
    """The paper that a docstring cites, with a link."""
    said = read(strategy)
    if not said.arxiv:
        return ""
    return f"{said.source.partition(' (')[0]}, [arXiv:{said.arxiv}](https://arxiv.org/abs/{said.arxiv})"


def _summaries() -> str:
    """The first sentence about each method, as entries of a dictionary."""
    found = {name: read(registry.lookup(name)[1]).summary for names in BUILT_IN.values() for name in names}
    lines = [f"    {json.dumps(name)}: {json.dumps(said, ensure_ascii=False)}," for name, said in found.items()]
    return "".join(f"{line}{'  # noqa: E501' if len(line) > MAX_COLUMNS else ''}\n" for line in lines)


def _imports(modules: dict[str, str], indent: str = "") -> str:
    """Imports that re-export names, in the order of a sorter of imports."""
    pairs = sorted((module, name) for name, module in modules.items())
    return "".join(f"{indent}from {module} import {name} as {name}\n" for module, name in pairs)


def _in_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _api(names: Iterable[str]) -> str:
    return "\n\n" + "".join(f"::: kvpolicy.{name}\n    options:\n      members: false\n\n" for name in names)

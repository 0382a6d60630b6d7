"""Run a notebook in this process, without a kernel: cells share a namespace, and the last expression is displayed.

A kernel for each notebook would import PyTorch again, which takes longer than the notebook itself.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

from kvpolicy.text.formats import replace_file
from kvpolicy_eval.pictures.style import svg

MODULE = "kvpolicy_notebook"
"""The name of the module in which the cells run; dataclasses look for their annotations there."""

Output = dict[str, Any]
"""An output of a cell, as the file of a notebook has it."""


def read(path: Path) -> dict[str, Any]:
    """The content of a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does."""
    replace_file(path, (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode())


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], path: Path) -> list[list[Output]]:
    """Run all cells of code in an empty folder.

    Args:
        notebook: Its content.
        path: Its file, which tracebacks name.

    Returns:
        The outputs of each cell of code: what it prints, and the value of its last expression.
    """
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module
    try:
        with _empty_folder():
            sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
            return [
                _run_cell(source, f"{path.name}[{number}]", vars(module), number)
                for number, source in enumerate(sources, 1)
            ]
    finally:
        del sys.modules[MODULE]


def text_of(outputs: list[Output]) -> list[str]:
    """Outputs that must be the same in every run: text, and that there is a figure, but not how it is drawn."""
    found: list[str] = []
    for output in outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            found.append("a figure")
        else:
            found.append("".join(output.get("text") or data["text/plain"]))
    return found


@contextlib.contextmanager
def _empty_folder() -> Generator[None, None, None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _run_cell(source: str, name: str, names: dict[str, Any], number: int) -> list[Output]:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value: Any = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
        )
    if value is not None:
        outputs.append(
            {"data": _data(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def _data(value: Any) -> dict[str, list[str]]:
    """A value by media type: as text, and as HTML or as a figure if it has such a form."""
    from matplotlib.figure import Figure

    if isinstance(value, Figure):
        return {"image/svg+xml": _lines(svg(lambda: value).decode()), "text/plain": ["<Figure>"]}
    data = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)

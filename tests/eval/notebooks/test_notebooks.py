"""The notebooks of the documentation run, and print what they say; their outputs have no traces of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_eval.notebooks.execution import MODULE, code_cells, read, run, text_of

FOLDER = Path(__file__).parents[3] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def made(*sources: str) -> dict[str, Any]:
    """A notebook of these cells of code."""
    return {"cells": [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]}


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compose", "selector", "tune"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_says(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    for number, (cell, found) in enumerate(zip(cells, run(notebook, path), strict=True), 1):
        assert cell["execution_count"] == number
        assert text_of(cell["outputs"]) == text_of(found), f"{path.name}[{number}]"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_have_no_traces_of_a_machine(path: Path) -> None:
    outputs = json.dumps([cell["outputs"] for cell in code_cells(read(path))])
    assert not re.search(r"/home/|/tmp/|/root/|Traceback|0x[0-9a-f]{6}|\b20\d\d-\d\d-\d\d", outputs)


def test_cells_share_names_and_show_their_last_expression(tmp_path: Path) -> None:
    cells = ("x = 1", "print('printed')\nx + 1", "None", "__name__, open('made here', 'w').close()")
    before = sorted(Path.cwd().iterdir())
    found = [text_of(outputs) for outputs in run(made(*cells), tmp_path / "made.ipynb")]
    assert found == [[], ["printed\n", "2"], [], [f"('{MODULE}', None)"]]
    assert sorted(Path.cwd().iterdir()) == before


def test_an_error_names_its_cell(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(made("1", "1 / 0"), tmp_path / "made.ipynb")
    assert Path(str(caught.traceback[-1].path)).name == "made.ipynb[2]"


@pytest.mark.needs("nbconvert", "mkdocs")
def test_the_page_of_a_notebook_has_its_outputs() -> None:
    from kvpolicy_eval.notebooks.site import page_of

    text, figures = page_of(FOLDER / "compose.ipynb")
    assert text.startswith("# Compose") and "try window=16" in text and "<table>" in text
    assert set(re.findall(r"!\[svg\]\((\S+)\)", text)) == set(figures) and len(figures) == 2
    assert text.rstrip().endswith("(compose.ipynb)")

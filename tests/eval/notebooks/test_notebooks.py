"""The notebooks of the documentation run, and print what they say; their outputs have no traces of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from kvpolicy_eval.notebooks.execution import MODULE, code_cells, read, run, text_of

FOLDER = Path(__file__).parents[3] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def made(*sources: str) -> dict[str, Any]:
    """A notebook of these cells of code."""
    return {"cells": [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the docs are not installed")
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


def test_pages_of_notebooks_have_their_outputs() -> None:
    pytest.importorskip("nbconvert")
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files

    from kvpolicy_eval.notebooks.site import on_files

    config: Any = MkDocsConfig()
    config.load_dict({"site_name": "docs", "docs_dir": str(FOLDER.parent)})
    config.validate()
    source = File("notebooks/compose.ipynb", str(FOLDER.parent), "site", use_directory_urls=True)
    files = on_files(Files([source]), config)
    (page,) = files.documentation_pages()
    assert page.src_uri == "notebooks/compose.md"
    assert "try window=16" in page.content_string and "<td" in page.content_string
    figures = re.findall(r"!\[svg\]\((\S+)\)", page.content_string)
    assert figures and all(files.get_file_from_path(f"notebooks/{figure}") for figure in figures)

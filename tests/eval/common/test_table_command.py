"""The command of a room of tables, the pages that its tables name, and files of results."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from kvpolicy_eval.bench.__main__ import TABLES as BENCH
from kvpolicy_eval.common.markdown import has_place
from kvpolicy_eval.common.results import keep_result, read_results
from kvpolicy_eval.common.table import Table
from kvpolicy_eval.tables.__main__ import TABLES, main
from tests.eval.pages import page_with

ROOT = Path(__file__).parents[3]
MODULES = [*(f"kvpolicy_eval.tables.{name}" for name in TABLES), *(f"kvpolicy_eval.bench.{name}" for name in BENCH)]


def load(module: str) -> Table:
    return import_module(module).TABLE


def test_pages_have_the_places_of_their_tables() -> None:
    for place, pages in [item for module in MODULES for item in load(module).places.items()]:
        for page in pages:
            assert has_place(ROOT / page, place), f"{page} has no place for {place}"


def test_every_module_with_a_table_is_in_the_command() -> None:
    for room, names in (("tables", TABLES), ("bench", BENCH)):
        package = import_module(f"kvpolicy_eval.{room}")
        files = Path(package.__path__[0]).glob("*.py")
        assert {file.stem for file in files if "\nTABLE = Table(" in file.read_text(encoding="utf-8")} == set(names)


def test_the_list_has_every_table_and_its_pages(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(TABLES)
    assert "docs/reproduce/index.md" in lines[TABLES.index("papers")]


def test_a_page_is_filled_with_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [page_with(tmp_path / name, "other", "requantize", "bits") for name in ("one.md", "two.md")]
    before, _, after = pages[0].read_text().partition("<!-- table:requantize -->\n")
    main(["requantize", "--fill", *map(str, pages)])
    printed = capsys.readouterr().out
    for page in pages:
        assert page.read_text() == f"{before}<!-- table:requantize -->\n{printed}{after}"


@pytest.mark.parametrize("name", ["bits", "long_prompt", "memory"])
def test_planned_tables_of_the_pages_are_those_of_today(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured tables have a date; these are computed from configs alone."""
    main([name])
    printed = capsys.readouterr().out
    for place, pages in load(f"kvpolicy_eval.tables.{name}").places.items():
        for page in pages:
            assert f"<!-- table:{place} -->\n{printed}<!-- /table -->" in (ROOT / page).read_text(encoding="utf-8")


def test_without_a_page_those_of_the_documentation_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page_with(tmp_path / "README.md", "long-prompt")
    monkeypatch.chdir(tmp_path)
    main(["long_prompt", "--fill"])
    assert capsys.readouterr().out in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a table is required: acceptance, accuracy"),
        (["no_such_table"], "invalid choice: 'no_such_table'"),
        (["requantize", "--n", "2"], "unrecognized arguments: --n 2"),
        (["requantize", "--fill", "page.md"], "page.md must have a place for requantize, got none"),
        (["requantize", "--fill"], "--fill must name a page"),
        (["requantize", "--fill", "no.md"], "No such file"),
        (["long_prompt", "--fill"], "No such file"),
        (["memory", "--policies", "h20"], "did you mean 'h2o'?"),
    ],
)
def test_wrong_usage_is_said_in_a_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page_with(tmp_path / "page.md", "bits")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tail", ["", '{"key": "b", "x": 0.', "{", '{"k', '{"key": "é'])
def test_a_line_that_was_cut_off_is_measured_again(tail: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    known = read_results(file)
    keep_result(file, known, "a", {"x": 1})
    whole = file.read_bytes()
    file.write_bytes(whole + tail.encode())
    assert read_results(file) == {"a": {"x": 1}}
    keep_result(file, known, "b", {"x": 2})
    assert file.read_bytes() == whole + b'{"key": "b", "x": 2}\n'
    assert read_results(file) == known


def test_a_line_break_that_is_missing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"key": "a", "x": 1}')
    known = read_results(file)
    keep_result(file, known, "b", {"x": 2})
    assert read_results(file) == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize("text", ["mine", "{}", '{"key": "a"\n{"key": "b"}\n', "[1]\n"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match="must be absent, or a file of results"):
        read_results(file)
    assert file.read_text() == text

"""The README's Python runs as written, and its commands ask for extras that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpolicy_eval.common.markdown import row
from kvpolicy_eval.tables.long_prompt import rows
from tests.doc_models import stand_in

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
COMMANDS = (
    'pip install -c constraints.txt -e ".[all]" && '
    "lm_eval --model kvpolicy --model_args policy=squeeze+kvcrush --tasks kvpolicy",
    'pip install -c constraints.txt -e ".[all,test]" && pytest -n auto',
)

if not README.exists():
    pytest.skip("the README is not installed", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")


REPORT = re.compile(r"of the full cache:\nlayer  budget +kept +seen ")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_python_runs_as_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PYTHON.findall(TEXT)
    monkeypatch.chdir(tmp_path)
    exec(compile(first, str(README), "exec"), {"__name__": "readme"})
    said = capsys.readouterr().out
    assert said.startswith("1271\n") and "# 1271" in first
    assert REPORT.search(said)
    stand_in(second, tmp_path)
    names = {"__name__": "readme"}
    exec(compile(second, str(README), "exec"), names)
    assert "42 is 2598." in names["doors"]
    assert REPORT.search(capsys.readouterr().out)


def test_the_front_page_of_the_site_has_the_same_first_example() -> None:
    """Without prompts and output, so that what is copied can be run."""
    assert PYTHON.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")) == PYTHON.findall(TEXT)[:1]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_stand_on_a_line_of_their_own(command: str) -> None:
    assert TEXT.splitlines().count(command) == 1


@pytest.mark.parametrize("name", ["long-prompt", "places", "bench"])
def test_tables_have_a_place(name: str) -> None:
    assert len(re.findall(rf"<!-- table:{name} -->\n.*?<!-- /table -->", TEXT, re.DOTALL)) == 1


def test_the_front_page_of_the_site_repeats_no_table() -> None:
    assert "<!-- table:" not in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_front_page_has_what_plans_give() -> None:
    place = re.compile(r"<!-- table:long-prompt -->\n(.*?)<!-- /table -->", re.DOTALL)
    assert place.findall(TEXT)[0].strip().endswith("\n".join(map(row, rows())))

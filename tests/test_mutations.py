"""The list of defects fits the code; `python tests/mutations.py` tries them, which takes too long for every commit."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import draw_mutations, mutations
from tests.mutants import Mutation, all_mutations, read
from tests.reach import Reach

ROOT = Path(__file__).parent.parent
MUTATIONS = all_mutations()

if not (ROOT / "kvpolicy").is_dir():
    pytest.skip("the tests stand alone, without the source tree", allow_module_level=True)


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(m.name for m in MUTATIONS).items() if count > 1] == []


def test_every_defect_fits_its_file() -> None:
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in {mutation.file for mutation in MUTATIONS}}
    for mutation in MUTATIONS:
        ast.parse(mutation.apply(sources[mutation.file]))
        assert mutation.old.split() != mutation.new.split(), f"{mutation.name} changes nothing"


def test_the_tests_of_defects_exist() -> None:
    """pytest ends with an error where one does not, which would count as a defect that was found."""
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    files = {test.partition("::")[0] for test in named}
    assert [file for file in files if not (ROOT / file).exists()] == []
    for file in files:
        own = [test.split("[")[0].split("::")[1:] for test in named if test.startswith(f"{file}::")]
        source = (ROOT / file).read_text(encoding="utf-8") if own else ""
        functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert [parts[-1] for parts in own if parts[-1] not in functions] == [], file


def test_a_text_that_is_not_unique_is_refused() -> None:
    mutation = Mutation(name="twice", file="", old="a", new="b", tests=())
    with pytest.raises(ValueError, match="2 times"):
        mutation.apply("a a")


SOURCE = """
def first(values, least=2, *, strict=False):
    if values and least < 3:
        check(values, least)
        raise ValueError("no")
    try:
        return values["key"]
    except KeyError:
        return not strict
"""


def test_defects_are_drawn_that_change_one_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_mutations, "ROOT", tmp_path)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "part.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "tests" / "room").mkdir(parents=True)
    drawn = [read(json.dumps(defect)) for defect in draw_mutations.draw(Path("room"), 0, 1)]
    assert [*draw_mutations.draw(Path("room"), 0, 4)] == [*draw_mutations.draw(Path("room"), 0, 4)]
    changed = [mutation.apply(SOURCE) for mutation in drawn]
    assert len({*changed}) == len(drawn) == 8  # as many as lines of code
    assert len({mutation.name for mutation in drawn}) == 8
    assert all(ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE)) for text in changed)
    assert {test for mutation in drawn for test in mutation.tests} == {"tests/room"}
    source = draw_mutations.Source(Path("room/part.py"))
    assert {change.what for _, change in source.changes()} >= {
        *("another default", "another connective", "< becomes <=", "off by one", "arguments are swapped"),
        *("a call is forgotten", "an error is not raised", "a key misspelled", "any error is caught"),
        "a negation left out",
    }


CONTEXTS = {
    2: [""],
    3: ["tests/a.py::test_one|run"],
    4: ["tests/a.py::test_one|run", "tests/a.py::test_two[x|y]|setup"],
    5: ["tests/b.py::test_three|run"],
}
"""What runs the lines of `SOURCE`: the second runs when the module is imported."""


@pytest.mark.parametrize(
    ("old", "new", "tests"),
    [
        ("and least < 3:\n", "or least < 3:\n", {"tests/a.py::test_one"}),
        ("check(values, least)", "pass", {"tests/a.py::test_one", "tests/a.py::test_two[x|y]"}),
        (
            '(values, least)\n        raise ValueError("no")',
            "(values, least)\n        pass",
            {"tests/b.py::test_three"},
        ),
        ("least=2", "least=3", None),
        ("return not strict", "return strict", None),
    ],
)
def test_tests_are_those_that_run_a_changed_line(
    old: str, new: str, tests: set[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []

    def contexts(file: str) -> dict[int, list[str]]:
        files.append(file)
        return CONTEXTS

    data = SimpleNamespace(read=lambda: None, contexts_by_lineno=contexts)
    monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(CoverageData=lambda basename: data))
    reach = Reach(tmp_path / ".coverage")
    assert reach.tests(Mutation(name="", file="part.py", old=old, new=new, tests=()), SOURCE) == tests
    assert files == [str(tmp_path / "part.py")]


TESTS = """
import time

def test_right():
    pass

def test_wrong():
    assert 1 == 2

def test_without_end():
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_worker_says_what_failed_and_ends_what_takes_too_long(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TESTS, encoding="utf-8")
    worker = mutations.Worker(tmp_path)
    try:
        results = [
            worker.run((f"test_one.py::{name}",), limit=limit)
            for name, limit in (("test_right", 60), ("test_wrong", 60), ("test_without_end", 1), ("test_absent", 60))
        ]
        chosen = worker.run(("test_one.py",), only={"test_one.py::test_right"})
    finally:
        worker.close()
    assert [result["verdict"] for result in results] == ["survived", "found", "timed out", "found"]
    assert [result["failed"] for result in results] == [[], ["test_one.py::test_wrong"], [], []]
    assert "assert 1 == 2" in results[1]["output"]
    assert chosen["verdict"] == "survived" and "1 passed, 2 deselected" in chosen["output"]

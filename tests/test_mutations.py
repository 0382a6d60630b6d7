"""The list of defects fits the code; `python tests/mutations.py` tries them, which takes too long for every commit."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import Mutation, all_mutations

ROOT = Path(__file__).parent.parent
MUTATIONS = all_mutations()

if not (ROOT / "kvpolicy").is_dir():
    pytest.skip("the tests stand alone, without the source tree", allow_module_level=True)


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(m.name for m in MUTATIONS).items() if count > 1] == []


def test_every_defect_fits_its_file() -> None:
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in {mutation.file for mutation in MUTATIONS}}
    trees = {file: ast.dump(ast.parse(source)) for file, source in sources.items()}
    for mutation in MUTATIONS:
        changed = ast.dump(ast.parse(mutation.apply(sources[mutation.file])))
        assert changed != trees[mutation.file], f"{mutation.name} changes nothing"


def test_the_tests_of_defects_exist() -> None:
    files = {test.partition("::")[0] for mutation in MUTATIONS for test in mutation.tests}
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_a_text_that_is_not_unique_is_refused() -> None:
    mutation = Mutation(name="twice", file="", old="a", new="b", tests=())
    with pytest.raises(ValueError, match="2 times"):
        mutation.apply("a a")

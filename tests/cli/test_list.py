"""`kvpolicy list`: every registered strategy, with its parameters and paper."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from kvpolicy import registry
from kvpolicy.cli.strategy_docs import read
from kvpolicy.text import grammar
from tests.cli.conftest import Facts, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Bare:
    loud: int = 3


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_every_name_is_listed_under_its_kind(every: int, run: Run, facts: Facts) -> None:
    lines = [line.split()[0] for line in run("list").splitlines() if line.startswith("  ")]
    found = facts("list")["strategies"]
    assert {entry["name"] for entry in found} == set(registry.names())
    for entry in found:
        assert entry["name"] in lines
        assert registry.lookup(entry["name"])[0] == entry["kind"]
        assert entry["summary"].endswith(".") and len(entry["summary"]) < 120
    for entry in found[::every]:
        assert f"  {entry['name']}" in run(f"list {entry['name']}").splitlines()


def test_first_sentences_are_those_of_the_docstrings() -> None:
    """Without a method more or less: `python -m kvpolicy_eval.catalog` writes them."""
    found = {name: read(registry.lookup(name)[1]).summary for table in registry.BUILT_IN.values() for name in table}
    assert found == registry.SUMMARIES


def test_parameters_are_those_of_the_grammar(facts: Facts) -> None:
    for entry in facts("list")["strategies"]:
        if entry["kind"] == "head_allocator":
            entry["name"] = f"uniform/{entry['name']}"
        plain = grammar.parse(entry["name"])
        for parameter in entry["parameters"]:
            assert parameter["meaning"], f"{entry['name']}:{parameter['name']} is not explained"
            if parameter["name"] != "base":
                assert grammar.parse(f"{entry['name']}:{parameter['name']}={parameter['default']}") == plain


def test_papers(facts: Facts) -> None:
    papers = {entry["name"]: entry["arxiv"] for entry in facts("list")["strategies"]}
    wanted = {"squeeze": "2404.04793", "kvcrush": "2503.00022", "kivi": "2402.02750", "csr": "2412.11741", "plain": ""}
    assert wanted.items() <= papers.items()


@pytest.mark.parametrize("kind", ["codec", "codecs", "Codecs"])
def test_one_kind(kind: str, facts: Facts) -> None:
    assert [entry["name"] for entry in facts(f"list {kind}")["strategies"]] == list(registry.names("codec"))


def test_one_name_with_the_meaning_of_its_parameters(run: Run) -> None:
    text = " ".join(run("list kivi").split())
    assert "bits=2 Bits per code: 2, 4 or 8. (2|4|8)" in text
    assert "Source: KIVI (arXiv:2402.02750), Section 3 and Algorithm 1." in text
    assert "snapkv" not in text
    assert "Wraps another selector: kvcrush/NAME, by default kvcrush/snapkv." in " ".join(run("list kvcrush").split())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kivy", "selectors, mergers, codecs, readers or the name of a strategy, got 'kivy'; did you mean 'kivi'?"),
        ("zelectors", "'selectors'"),
        ("@", "got '@'; try kvpolicy list for all names."),
    ],
)
def test_unknown(word: str, message: str, run: Run) -> None:
    assert message in run(f"list {word}", 2)


def test_plug_ins_are_listed_even_if_one_is_broken(plugins: list[EntryPoint], run: Run, facts: Facts) -> None:
    plugins.append(EntryPoint("mine", "kvpolicy.codecs.plain:Plain", "kvpolicy.codecs"))
    plugins.append(EntryPoint("broken", "kvpolicy_nowhere:Codec", "kvpolicy.codecs"))
    registry._table.cache_clear()
    found = {entry["name"]: entry for entry in facts("list codecs")["strategies"]}
    assert found["mine"]["summary"] == found["plain"]["summary"]
    assert "could not be imported" in found["broken"]["error"]
    assert "Cannot be loaded" in run("list codecs") and "kivi" in found
    overview = " ".join(run("list").split())
    assert f"mine {found['plain']['summary']}" in overview and "broken Cannot be loaded: " in overview


def test_a_class_without_documentation() -> None:
    found = read(Bare)
    assert [(p.name, p.kind, p.default, p.meaning) for p in found.parameters] == [("loud", "integer", "3", "")]
    assert (found.source, found.arxiv, found.wraps) == ("", "", False)
    assert read(int).parameters == ()

"""The golden record is repeatable, and notices what it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvpolicy.registry import lookup
from tests.golden import record
from tests.golden.__main__ import main
from tests.golden.cases import all_cases, run_cases

NAMES = ["turns llama fp32 h2o", "turns llama fp32 h2o+kivi", "turns llama fp32 window"]


def _run(*names: str) -> dict[str, Any]:
    known = all_cases(quick=True)
    return run_cases([known[name] for name in names or NAMES])


@pytest.fixture(scope="module")
def first() -> dict[str, Any]:
    """What the first run records."""
    return _run()


def test_another_ranking_is_noticed_and_nothing_else(first: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*first] == NAMES
    _, kind = lookup("h2o")
    priority = kind.priority
    monkeypatch.setattr(kind, "priority", lambda self, state, view: -priority(self, state, view))
    wrong = record.differences(first, _run())
    assert {one.case for one in wrong} == set(NAMES[:2])
    fields = {one.field for one in wrong if one.case == NAMES[0]}
    assert {"prompt.kept.0", "prompt.keys.0", "steps.logits"} <= fields
    assert not fields & {"prompt.nbytes", "prompt.plan", "prompt.length.0"}


def test_the_command_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    only = ["--quick", "--only", "prompt llama bf16 tova"]
    assert main(["record", str(file), *only]) == 0
    assert main(["compare", str(file), *only]) == 0
    capsys.readouterr()
    _, kind = lookup("tova")
    priority = kind.priority
    monkeypatch.setattr(kind, "priority", lambda self, state, view: -priority(self, state, view))
    assert main(["compare", str(file), *only]) == 1
    said = capsys.readouterr().out
    assert "differs: prompt llama bf16 tova: " in said and "end.kept (0 1 2)" in said
    assert main(["compare", str(file), *only, "--allow", "prompt * tova *"]) == 0
    assert "allowed: prompt llama bf16 tova: " in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["compare", str(file), "--quick", "--only", "rows llama fp32 tova"]) == 1, "nothing was compared"


def test_a_refusal_and_an_error_are_told_apart(first: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    window = NAMES[-1]
    _, kind = lookup("window")

    def raises(failure: Exception) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise failure

        return fail

    for failure, said in ((ValueError("no"), "refused, as it was not"), (KeyError("no"), "failed, as it was not")):
        monkeypatch.setattr(kind, "priority", raises(failure))
        wrong = record.describe(record.differences({window: first[window]}, _run(window)))
        assert len(wrong) == 1 and said in wrong[0]

"""The table of tuned policies beside ordinary ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvpolicy
from kvpolicy.tuning.evidence import Score
from kvpolicy.tuning.tune import tune
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_eval.tables import tuned


def scores(correct: list[float], kl: float = 0.1) -> Score:
    values = torch.tensor(correct, dtype=torch.float64)
    return Score(torch.full_like(values, kl), torch.ones_like(values), values, 10.0)


def test_a_task_in_which_tuning_answers_less_is_named() -> None:
    names = ("recall",) * 8 + ("needles",) * 8
    cell = tuned.Cell("inside", 0.1, "h2o", scores([0.0] * 8 + [1.0] * 8), scores([1.0] * 8 + [0.0] * 8), names)
    assert [*cell.worse()] == ["recall"]
    shown = tuned.line(cell)
    assert shown[:5] == ["10%", "inside", "`h2o`", "0.50", "0.50"] and shown[-1] == "recall"
    even = tuned.Cell("after", 0.1, "h2o", scores([1.0] * 16), scores([1.0] * 16), names)
    assert tuned.line(even)[-1] == "none"
    better = tuned.Cell("after", 0.1, "h2o", scores([1.0] * 16), scores([0.0] * 16), names)
    assert "Mean difference of answers: +0.333 at 10%." in tuned.note([cell, even, better], (3, 4))


def test_windows_are_of_all_tasks_and_other_seeds_differ() -> None:
    _, tokenizer = kvpolicy.tiny()
    found, names = tuned.made(tokenizer, "second", 1, tuned.TUNED_ON)
    others, _ = tuned.made(tokenizer, "second", 1, tuned.HELD_OUT)
    assert {*names} == {*tasks(1000)} - {"passkey"} and len(found) == len(names)
    assert all(not torch.equal(a.prompt, b.prompt) for a, b in zip(found, others, strict=True))


def test_both_are_scored_on_held_out_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = kvpolicy.tiny()
    known, _ = tuned.made(tokenizer, "after", 1, tuned.TUNED_ON)
    tune(model, known[:1], tmp_path / "after-joint-1.json", candidates=["window@0.3", "window@0.6"])
    monkeypatch.setattr(tuned, "best_rival", lambda *_, **__: SimpleNamespace(spec="window"))
    (cell,) = tuned.cells(model, tokenizer, "after", [0.5], (1, 1), tmp_path, "joint")
    assert cell.rival == "window" and len(cell.tasks) == len(cell.tuned.kl) == len(tasks(1000))
    assert cell.tuned.nbytes <= 1.01 * cell.ordinary.nbytes
    assert not torch.equal(cell.tuned.kl, cell.ordinary.kl)

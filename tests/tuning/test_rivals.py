"""Ordinary policies: all of them run, the best is found, and what cannot run is told apart from a mistake."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.tuning.evidence import Score, reference_logits, score
from kvpolicy.tuning.ordinary import rivals
from kvpolicy.tuning.rivals import best_rival
from kvpolicy.tuning.windows import Window
from kvpolicy_lm_eval.data.prompts import recall

MODEL, TOKENIZER = kvpolicy.tiny()


def window(seed: int, records: int) -> Window:
    prompt, answer = recall(Random(seed), records)
    return Window(torch.tensor(TOKENIZER.encode(prompt)), torch.tensor(TOKENIZER.encode(answer)[1:]))


def test_all_rivals_are_different_and_run_at_the_same_bytes() -> None:
    specs = rivals()
    assert len({str(kvpolicy.Policy.parse(spec)) for spec in specs}) == len(specs) >= 24
    found = best_rival(MODEL, [window(0, 12)], 0.5)
    assert {rival.spec for rival in found.table} == {*specs}
    assert [(rival.spec, rival.reason) for rival in found.table if rival.score is None] == []
    held = [rival.score.nbytes for rival in found.table if rival.score is not None]
    assert max(held) <= 0.5 * (len(window(0, 12).prompt) + 4) * 8 * 2 * 4 * MODEL.config.head_dim * 4


def test_the_best_has_the_most_right_answers_and_then_the_lowest_divergence() -> None:
    windows = [window(seed, 30) for seed in range(3)]
    reference = reference_logits(MODEL, windows)
    specs = ["window", "snapkv+tokenwise:bits=4", "snapkv", "window+tokenwise:bits=4"]
    found = best_rival(MODEL, windows, 0.25, specs=specs, reference=reference)
    ranked = [
        (-float(rival.score.correct.mean()), float(rival.score.kl.mean()))
        for rival in found.table
        if rival.score is not None
    ]
    assert ranked == sorted(ranked) and len(ranked) == 4 and ranked[0][0] < ranked[-1][0]
    assert found.spec == found.table[0].spec and found.score == found.table[0].score
    again = score(MODEL, windows, found.spec, share=0.25)
    assert all(torch.equal(x, y) for x, y in zip(again[:3], found.score[:3], strict=True))


def test_right_answers_count_before_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    references: list[object] = []

    def made(model: object, windows: object, spec: str, **given: object) -> Score:
        references.append(given["reference"])
        kl, correct = {"window": (0.1, 0.5), "h2o": (0.9, 1.0), "snapkv": (0.3, 1.0), "tova": (0.3, 1.0)}[spec]
        return Score(torch.tensor([kl]), torch.ones(1), torch.tensor([correct]), 1.0)

    monkeypatch.setattr("kvpolicy.tuning.rivals.score", made)
    found = best_rival(MODEL, [window(0, 9)], 0.5, specs=["window", "h2o", "snapkv", "tova"])
    assert [rival.spec for rival in found.table] == ["snapkv", "tova", "h2o", "window"]
    assert references[0] is not None and all(each is references[0] for each in references), "computed once"


def test_a_policy_that_needs_more_bytes_is_left_out() -> None:
    found = best_rival(MODEL, [window(0, 24)], 0.1, specs=["streaming:sinks=64", "window"])
    assert found.spec == "window" and found.table[1].spec == "streaming:sinks=64" and found.table[1].score is None
    assert "budget must be at least" in found.table[1].reason
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must run at 10.0% of .* got none: The budget must be at least"):
        best_rival(MODEL, [window(0, 24)], 0.1, specs=["streaming:sinks=64"])
    kvpolicy.attach(MODEL, "full").detach()


def test_mistakes_are_not_left_out() -> None:
    windows = [window(0, 9)]
    for given, message in (
        ({"specs": ["window", "nothing"]}, "nothing"),
        ({"specs": []}, "got none: none was given"),
        ({"share": 2.0}, r"must be in \(0, 1\], got 2.0"),
        ({"reference": []}, "reference must be of the same windows"),
        ({"windows": []}, "must be windows"),
    ):
        arguments: dict[str, Any] = {"windows": windows, "share": 0.5, "specs": ["window"], **given}
        with pytest.raises(kvpolicy.KVPolicyError, match=message):
            best_rival(MODEL, **arguments)


def test_of_many_policies_the_best_on_some_windows_are_scored_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int]] = {}

    def made(model: object, some: list[Window], spec: str, **given: list[object]) -> Score:
        assert len(given["reference"]) == len(some)
        seen.setdefault(spec, []).append(len(some))
        worth = float(spec.partition("=")[2])
        return Score(torch.full((len(some),), worth), torch.ones(len(some)), torch.ones(len(some)), 1.0)

    monkeypatch.setattr("kvpolicy.tuning.rivals.score", made)
    windows = [window(seed, 9) for seed in range(16)]
    specs = [f"streaming:sinks={count}" for count in range(12, 0, -1)]
    found = best_rival(MODEL, windows, 0.5, specs=specs)
    assert found.spec == "streaming:sinks=1" and len(found.table) == 12
    assert seen == {spec: [4, 16] if int(spec.partition("=")[2]) <= 8 else [4] for spec in specs}
    assert best_rival(MODEL, windows, 0.5, specs=specs[:8]).spec == "streaming:sinks=5"


def test_windows_of_the_first_round_have_their_own_references(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [window(seed, 9) for seed in range(16)]
    reference = [torch.full((1 + len(one.follow), 1), number) for number, one in enumerate(windows)]
    rounds: list[list[int]] = []

    def made(model: object, some: list[Window], spec: str, **given: list[torch.Tensor]) -> Score:
        numbers = [next(number for number, one in enumerate(windows) if one is each) for each in some]
        assert [int(logits[0]) for logits in given["reference"]] == numbers
        rounds.append(numbers)
        worth = torch.ones(len(some))
        return Score(worth, worth, worth, 1.0)

    monkeypatch.setattr("kvpolicy.tuning.rivals.score", made)
    best_rival(MODEL, windows, 0.5, specs=[f"streaming:sinks={n}" for n in range(12)], reference=reference)
    assert rounds == [[*range(0, 16, 4)]] * 12 + [[*range(16)]] * 8

"""Comparisons of policies: the paired bootstrap, verdicts in words, and the best of the ordinary policies."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.tuning.comparison import Comparison, Difference, compare, verdict_line
from kvpolicy.tuning.evidence import Score
from kvpolicy.tuning.ordinary import rivals
from kvpolicy.tuning.rivals import best_rival
from kvpolicy.tuning.windows import Window
from kvpolicy_lm_eval.data.prompts import recall


def scores(kl: Tensor, correct: Tensor | None = None, top1: Tensor | None = None) -> Score:
    nothing = torch.zeros_like(kl)
    return Score(kl, nothing if top1 is None else top1, nothing if correct is None else correct, 1.0)


def noise(seed: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_intervals_are_those_of_drawing_windows_one_by_one() -> None:
    a = scores(noise(0, 9), noise(1, 9), noise(2, 9))
    b = scores(noise(3, 9), noise(4, 9), noise(5, 9))
    found = compare(a, b, seed=6, draws=50)
    drawn = torch.randint(9, (50, 9), generator=torch.Generator().manual_seed(6)).tolist()
    for name in ("kl", "top1", "correct"):
        pairs = [*zip(getattr(a, name).tolist(), getattr(b, name).tolist(), strict=True)]
        means = sorted(sum(pairs[i][0] - pairs[i][1] for i in row) / 9 for row in drawn)
        # 2.5 % of the way along 49 gaps is 1.225 from either end.
        low = means[1] + 0.225 * (means[2] - means[1])
        high = means[-2] - 0.225 * (means[-2] - means[-3])
        mean = sum(x - y for x, y in pairs) / 9
        assert getattr(found, name) == pytest.approx(Difference(mean, low, high))
    assert found.windows == 9 and compare(a, b, seed=7) != compare(a, b, seed=6) == compare(a, b, seed=6)


UP = Difference(0.2, 0.1, 0.3)
DOWN = Difference(-0.2, -0.3, -0.1)
UNSURE = Difference(0.1, -0.1, 0.3)
SLIGHT = Difference(0.002, 0.001, 0.003)
GAIN = Difference(0.05, -0.005, 0.1)
ZERO = Difference(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("correct", "kl", "verdict", "words"),
    [
        (
            UP,
            DOWN,
            "better",
            "is better than the best ordinary one on 24 texts, by more than the margin of 0.01: right",
        ),
        (UP, UNSURE, "better", "[+10.0, +30.0], KL +0.1000 nats [-0.1000, +0.3000]."),
        (UNSURE, DOWN, "better", "KL -0.2000 nats [-0.3000, -0.1000]."),
        (DOWN, UNSURE, "worse", "is worse than the best ordinary one on 24 texts, by more than the margin of 0.01"),
        (UNSURE, UP, "worse", "KL +0.2000"),
        (DOWN, UP, "worse", "worse"),
        (UP, UP, "mixed", "better than the best ordinary one in one respect and worse in another on 24 texts"),
        (DOWN, DOWN, "mixed", "mixed"),
        (
            UNSURE,
            UNSURE,
            "unclear",
            "It is unclear on 24 texts whether the tuned policy is better or worse than",
        ),
        (
            GAIN,
            ZERO,
            "no worse",
            "is no worse than the best ordinary one on 24 texts, but shows no gain beyond the marg",
        ),
        (ZERO, SLIGHT, "as good", "is as good as the best ordinary one on 24 texts, within the margin of 0.01: right"),
        (SLIGHT, ZERO, "as good", "right answers +0.2 points [+0.1, +0.3], KL +0.0000 nats [+0.0000, +0.0000]."),
        (ZERO, ZERO, "as good", "right answers +0.0 points [+0.0, +0.0], KL +0.0000"),
    ],
)
def test_a_verdict_says_what_the_intervals_show(correct: Difference, kl: Difference, verdict: str, words: str) -> None:
    # `top1` decides nothing.
    comparison = Comparison(kl, DOWN, correct, 24)
    assert comparison.verdict == verdict
    line = verdict_line(comparison)
    assert line[0].isupper() and (words in line or words == verdict)
    few = comparison._replace(windows=19)
    assert few.verdict == "too few" and comparison._replace(windows=20).verdict == verdict
    assert verdict_line(few, "X", "Y").startswith("19 texts are too few to compare X with Y, at least 20 would do: ")
    assert comparison._replace(margin=0.5).verdict == "as good"


def test_a_codec_that_changes_next_to_nothing_is_not_worse() -> None:
    """99.7 % equal tokens and a KL of 0.0001, with an interval that excludes zero, were worse than the full cache."""
    codec = scores(0.0001 + 0.00005 * noise(0, 64).abs(), top1=torch.full((64,), 0.997))
    full = scores(torch.zeros(64, dtype=torch.float64), top1=torch.ones(64))
    found = compare(codec, full)
    assert found.kl.sign == 1 and found.verdict == "as good"
    assert "snapkv@0.2 is as good as full" in verdict_line(found, "snapkv@0.2", "full")
    assert compare(codec, full, margin=0.00001).verdict == "worse"
    assert compare(codec, codec) == Comparison(ZERO, ZERO, ZERO, 64)
    assert compare(codec, codec, margin=0).verdict == "as good"


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_a_margin_that_is_none_is_refused(margin: float) -> None:
    some = scores(noise(0, 22))
    with pytest.raises(kvpolicy.KVPolicyError, match="margin must be a number from 0, got"):
        _ = compare(some, some, margin=margin).verdict


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="must be of the same windows, got 3 and 4"):
        compare(scores(torch.zeros(3)), scores(torch.zeros(4)))
    with pytest.raises(kvpolicy.KVPolicyError, match="must be at least two windows to compare policies on, got 1"):
        compare(scores(torch.zeros(1)), scores(torch.zeros(1)))
    with pytest.raises(kvpolicy.KVPolicyError, match="draws must be between 1"):
        compare(scores(torch.zeros(3)), scores(torch.zeros(3)), draws=0)


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
    """With the references of their own windows in each round."""
    windows = [window(seed, 9) for seed in range(16)]
    reference = [torch.full((1 + len(one.follow), 1), number) for number, one in enumerate(windows)]
    seen: dict[str, list[list[int]]] = {}

    def made(model: object, some: list[Window], spec: str, **given: list[torch.Tensor]) -> Score:
        numbers = [next(number for number, one in enumerate(windows) if one is each) for each in some]
        assert [int(logits[0]) for logits in given["reference"]] == numbers
        seen.setdefault(spec, []).append(numbers)
        worth = float(spec.partition("=")[2])
        return Score(torch.full((len(some),), worth), torch.ones(len(some)), torch.ones(len(some)), 1.0)

    monkeypatch.setattr("kvpolicy.tuning.rivals.score", made)
    specs = [f"streaming:sinks={count}" for count in range(12, 0, -1)]
    found = best_rival(MODEL, windows, 0.5, specs=specs, reference=reference)
    assert found.spec == "streaming:sinks=1" and len(found.table) == 12
    rounds = [[*range(0, 16, 4)], [*range(16)]]
    assert seen == {spec: rounds if int(spec.partition("=")[2]) <= 8 else rounds[:1] for spec in specs}
    assert best_rival(MODEL, windows, 0.5, specs=specs[:8], reference=reference).spec == "streaming:sinks=5"

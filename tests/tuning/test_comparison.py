"""Comparisons of policies: the paired bootstrap on made-up scores, and verdicts in words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.tuning.comparison import Comparison, Difference, compare, verdict_line
from kvpolicy.tuning.evidence import Score


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


def test_windows_are_drawn_with_their_pairs() -> None:
    """What makes a window hard for both policies cancels."""
    hard = 100 * noise(0, 30)
    found = compare(scores(hard + 1), scores(hard))
    assert found.kl == pytest.approx(Difference(1, 1, 1))
    shuffled = compare(scores(hard + 1), scores(hard.flip(0)))
    assert shuffled.kl.low < 0 < shuffled.kl.high


def test_intervals_have_their_coverage() -> None:
    """Of 200 samples of 40 windows about 95 % have the true difference inside."""
    hits = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.rand(2, 40, generator=generator) < torch.tensor([[0.6], [0.3]])
        found = compare(scores(a.double(), a.double()), scores(b.double(), b.double()), draws=500)
        hits += found.correct.low <= 0.3 <= found.correct.high
    assert 180 <= hits <= 198


UP = Difference(0.2, 0.1, 0.3)
DOWN = Difference(-0.2, -0.3, -0.1)
NONE = Difference(0.1, -0.1, 0.3)


@pytest.mark.parametrize(
    ("correct", "kl", "verdict", "words"),
    [
        (UP, DOWN, "better", "is better than the best ordinary one on 24 windows: right answers +20.0 points"),
        (UP, NONE, "better", "[+10.0, +30.0], KL +0.1000 nats [-0.1000, +0.3000]."),
        (NONE, DOWN, "better", "KL -0.2000 nats [-0.3000, -0.1000]."),
        (DOWN, NONE, "worse", "is worse than the best ordinary one on 24 windows: right answers -20.0 points"),
        (NONE, UP, "worse", "KL +0.2000"),
        (DOWN, UP, "worse", "worse"),
        (UP, UP, "mixed", "better than the best ordinary one in one respect and worse in another"),
        (DOWN, DOWN, "mixed", "mixed"),
        (NONE, NONE, "no worse", "is no worse than the best ordinary one, but 24 windows show no gain: right answers"),
        (Difference(0, 0, 0), Difference(0, 0, 0), "no worse", "right answers +0.0 points [+0.0, +0.0], KL +0.0000"),
    ],
)
def test_a_verdict_says_what_the_intervals_show(correct: Difference, kl: Difference, verdict: str, words: str) -> None:
    # `top1` decides nothing.
    comparison = Comparison(kl, DOWN, correct, 24)
    assert comparison.verdict == verdict
    line = verdict_line(comparison)
    assert line.startswith("The tuned policy is ") and (words in line or words == verdict)
    assert verdict_line(comparison, "X", "Y").startswith("X is ")


def test_a_policy_compared_with_itself_gains_nothing() -> None:
    some = scores(noise(0, 12), noise(1, 12))
    nothing = Difference(0.0, 0.0, 0.0)
    assert compare(some, some) == Comparison(nothing, nothing, nothing, 12)
    assert "12 windows show no gain" in verdict_line(compare(some, some))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="must be of the same windows, got 3 and 4"):
        compare(scores(torch.zeros(3)), scores(torch.zeros(4)))
    with pytest.raises(kvpolicy.KVPolicyError, match="must be at least two windows to compare policies on, got 1"):
        compare(scores(torch.zeros(1)), scores(torch.zeros(1)))
    with pytest.raises(kvpolicy.KVPolicyError, match="draws must be between 1"):
        compare(scores(torch.zeros(3)), scores(torch.zeros(3)), draws=0)

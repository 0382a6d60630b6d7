"""Whether one policy is better than another one on the same windows, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_size
from kvpolicy.tuning.evidence import Score
from kvpolicy.tuning.verdict import FEWEST, MARGIN, Verdict, decide

LEVEL = 0.95
"""Probability of the intervals."""


class Difference(NamedTuple):
    """A mean difference between two policies, with its interval.

    Attributes:
        mean: Mean over the windows.
        low: Lower end of the 95 % interval.
        high: Upper end.
    """

    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 if the whole interval is above zero, -1 if it is below, 0 if zero is inside."""
        return (self.low > 0) - (self.high < 0)


class Comparison(NamedTuple):
    """One policy minus another one; see `Score` for what is compared.

    Attributes:
        kl: Difference of the divergence from the full cache, where less is better.
        top1: Difference of the share of predictions that are the full cache's, where more is better.
        correct: Difference of the share of right answers, where more is better.
        windows: How many windows were compared.
        margin: The least difference that matters: in the share of right answers, and in nats.
    """

    kl: Difference
    top1: Difference
    correct: Difference
    windows: int
    margin: float = MARGIN

    @property
    def verdict(self) -> Verdict:
        """The verdict by right answers and divergence, see `decide`."""
        intervals = [(self.correct.low, self.correct.high), (-self.kl.high, -self.kl.low)]
        return decide(intervals, self.windows, self.margin)


def compare(a: Score, b: Score, *, margin: float = MARGIN, seed: int = 0, draws: int = 2000) -> Comparison:
    """Compare two policies by the bootstrap over windows, on which both were scored.

    Windows are drawn with replacement, each with its pair of scores, so that what makes a window hard for both cancels.
    Below 20 windows the intervals are too narrow, so that there is no verdict.

    Args:
        a: The policy in question.
        b: The policy that it is compared with.
        margin: The least difference that matters: in the share of right answers, and in nats.
        seed: Seed of the draws.
        draws: How many times the windows are drawn.

    Raises:
        KVPolicyError: If there are fewer than two windows, or the scores are of different numbers of them.

    Examples:
        >>> x = torch.arange(40) / 64
        >>> a, b = Score(x, x, x, 9.0), Score(x + 0.5, x, x, 9.0)
        >>> compare(a, b).kl, compare(a, b).verdict
        (Difference(mean=-0.5, low=-0.5, high=-0.5), 'better')
    """
    count = len(a.kl)
    if len(b.kl) != count:
        raise KVPolicyError(
            f"Both scores must be of the same windows, got {count} and {len(b.kl)}; try to score both on all."
        )
    if count < 2:
        raise KVPolicyError(f"There must be at least two windows to compare policies on, got {count}; try more.")
    draws = check_size("draws", draws, 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (draws, count), generator=generator, device="cpu")
    kl, top1, correct = (_difference(x.double() - y.double(), drawn) for x, y in zip(a[:3], b[:3], strict=True))
    return Comparison(kl, top1, correct, count, margin)


def verdict_line(comparison: Comparison, name: str = "the tuned policy", other: str = "the best ordinary one") -> str:
    """The verdict in one sentence with its numbers.

    Args:
        comparison: The result of `compare`.
        name: Name of the policy in question.
        other: Name of the other policy.

    Examples:
        >>> none = Difference(0.0, -0.1, 0.1)
        >>> verdict_line(Comparison(none, none, none, 24)).split(":")[0]
        'It is unclear on 24 texts whether the tuned policy is better or worse than the best ordinary one'
    """
    correct = comparison.correct
    kl = comparison.kl
    numbers = (
        f"right answers {100 * correct.mean:+.1f} points [{100 * correct.low:+.1f}, {100 * correct.high:+.1f}], "
        f"KL {kl.mean:+.4f} nats [{kl.low:+.4f}, {kl.high:+.4f}]"
    )
    texts = f"{comparison.windows} texts"
    margin = f"the margin of {comparison.margin:g}"
    words = {
        "better": f"{name} is better than {other} on {texts}, by more than {margin}",
        "worse": f"{name} is worse than {other} on {texts}, by more than {margin}",
        "mixed": f"{name} is better than {other} in one respect and worse in another on {texts}",
        "as good": f"{name} is as good as {other} on {texts}, within {margin}",
        "no worse": f"{name} is no worse than {other} on {texts}, but shows no gain beyond {margin}",
        "unclear": f"it is unclear on {texts} whether {name} is better or worse than {other}",
        "too few": f"{texts} are too few to compare {name} with {other}, at least {FEWEST} would do",
    }
    said = words[comparison.verdict]
    if said.startswith(("the ", "it ")):  # not a spec
        said = said[0].upper() + said[1:]
    return f"{said}: {numbers}."


def _difference(values: Tensor, drawn: Tensor) -> Difference:
    """The mean of differences [W], and its interval over draws of their indices [draws, W]."""
    means = values[drawn].mean(1)
    low, high = means.quantile(
        torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64, device="cpu")
    ).tolist()
    return Difference(float(values.mean()), low, high)

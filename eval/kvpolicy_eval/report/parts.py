"""What one part of a policy changes: two policies that differ in it alone, on the same examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy import Plain, Policy, Uniform
from kvpolicy_eval.report.gather import Findings, Score, drawn
from kvpolicy_eval.sweep import bootstrap

FEW = 10
"""With fewer examples of a task, intervals leave zero out too often: half the time with one, one in eight with two."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What one part of a policy changes, all else equal.

    Attributes:
        model: Name of the model.
        policy: With the part.
        base: Without it.
        part: `layer budgets`, `representatives` or `codec`.
        score: Mean accuracy with it less that without it, resampled in pairs.
        fewest: Examples of the task that has the fewest.
    """

    model: str
    policy: str
    base: str
    part: str
    score: Score
    fewest: int

    @property
    def verdict(self) -> str:
        """What is shown at 95 %, in a word or two."""
        if self.fewest < FEW:
            return "too few examples"
        if np.isnan(self.score.low):
            return "no interval"
        return "better" if self.score.low > 0 else "worse" if self.score.high < 0 else "no difference shown"


def differences(findings: Findings) -> list[Difference]:
    """Every policy against the one that lacks one of its parts, where both were measured at the same budget."""
    known = {(point.model, _canonical(point.method), point.budget): point for point in findings.points}
    found: list[Difference] = []
    for point in findings.points:
        for part, base in _without(point.method):
            other = known.get((point.model, base, point.budget)) or known.get((point.model, base, ""))
            if other is None or other is point or point.mean is None or other.mean is None:
                continue
            mine, its = (drawn(one, findings.averaged) for one in (point, other))
            low, high = (float("nan"),) * 2 if mine is None or its is None else bootstrap.interval(mine - its)
            gap = Score(point.mean.value - other.mean.value, low, high, point.mean.examples)
            fewest = min(one.tasks[task].examples for one in (point, other) for task in findings.averaged)
            found.append(Difference(point.model, point.policy, other.policy, part, gap, fewest))
    return found


def _canonical(method: str) -> str:
    return str(Policy.parse(method)).partition("@")[0]


def _without(method: str) -> Iterator[tuple[str, str]]:
    """The words of the policies that lack one part of this one."""
    policy = Policy.parse(method)
    changes: list[tuple[str, str, Any]] = [("layer budgets", "allocator", Uniform()), ("codec", "codec", Plain())]
    base = getattr(policy.selector, "base", None)
    if base is not None:
        changes.append(("representatives", "selector", base))
    for part, name, other in changes:
        if getattr(policy, name) != other:
            try:
                yield part, str(dataclasses.replace(policy, **{name: other})).partition("@")[0]
            except ValueError:  # such as a codec that keeps all in place of one that cannot be taken away
                continue

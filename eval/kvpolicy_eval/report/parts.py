"""Effect of one part of a policy: two policies that differ in it alone, on the same examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy import Drop, Plain, Policy, Uniform
from kvpolicy.policy import TunedPolicy
from kvpolicy.tuning.verdict import MARGIN, decide
from kvpolicy_eval.report.gather import NAN, Findings, Score, mean_draws
from kvpolicy_eval.sweep import bootstrap

FEW = 10
"""Number of examples of a task below which no verdict is given.

Intervals then exclude zero too often: half the time with one example, one time in eight with two.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Effect of one part of a policy, all else equal.

    Attributes:
        model: Name of the model.
        policy: Spec with the part.
        base: Spec without it.
        part: `layer budgets`, `representatives`, `merger` or `codec`.
        score: Mean accuracy with the part minus mean accuracy without it, resampled in pairs.
        fewest: Number of examples of the task with the fewest.
    """

    model: str
    policy: str
    base: str
    part: str
    score: Score
    fewest: int

    @property
    def verdict(self) -> str:
        """The verdict at 95 %, by more than `MARGIN`."""
        if self.fewest < FEW:
            return "too few examples"
        if np.isnan(self.score.low):
            return "no interval"
        found = decide([(self.score.low, self.score.high)], self.fewest, MARGIN, FEW)
        return found if found in ("better", "worse") else "no difference shown"


def differences(findings: Findings) -> list[Difference]:
    """Each policy against the policies that lack one of its parts and were measured at the same budget."""
    known = {(point.model, _canonical(point.method), point.budget): point for point in findings.points}
    result: list[Difference] = []
    for point in findings.points:
        for part, method in _without_a_part(point.method):
            base = known.get((point.model, method, point.budget)) or known.get((point.model, method, ""))
            if base is None or base is point or point.mean is None or base.mean is None:
                continue
            draws, base_draws = (mean_draws(one, findings.averaged) for one in (point, base))
            paired = None if draws is None or base_draws is None else draws - base_draws
            low, high = (NAN, NAN) if paired is None else bootstrap.interval(paired)
            score = Score(point.mean.value - base.mean.value, low, high, point.mean.examples)
            fewest = min(one.tasks[task].examples for one in (point, base) for task in findings.averaged)
            result.append(Difference(point.model, point.policy, base.policy, part, score, fewest))
    return result


def _canonical(method: str) -> str:
    return str(Policy.parse(method)).partition("@")[0]


def _without_a_part(method: str) -> Iterator[tuple[str, str]]:
    """Name of a part, and spec of the policy that lacks it, for each part of a policy."""
    policy = Policy.parse(method)
    if isinstance(policy, TunedPolicy):  # whose parts are those of its layers
        return
    defaults: list[tuple[str, str, Any]] = [
        ("layer budgets", "allocator", Uniform()),
        ("merger", "merger", Drop()),
        ("codec", "codec", Plain()),
    ]
    base = getattr(policy.selector, "base", None)
    if base is not None:
        defaults.append(("representatives", "selector", base))
    for part, field, default in defaults:
        if getattr(policy, field) != default:
            try:
                yield part, str(dataclasses.replace(policy, **{field: default})).partition("@")[0]
            except ValueError:  # the remaining parts are no valid policy
                continue

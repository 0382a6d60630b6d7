"""Accuracy of the embedded model by policy and budget.

The first table has means over the tasks, the second one every task at one budget. See `kvpolicy_eval.common.accuracy`
for what is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

from kvpolicy_eval.common.accuracy import TaskEvaluator, mean
from kvpolicy_eval.common.table import Grid, Option, Section, Table, prompts

SELECTORS = ["window", "streaming", "h2o", "snapkv", "tova", "kvcrush/snapkv"]
ALLOCATORS = ["", "squeeze+"]
BUDGETS = [0.3, 0.2, 0.1]
TASK_BUDGET = 0.2
"""Budget of the table of every task."""


def policies() -> Iterable[tuple[str, list[str]]]:
    """Each allocator with each selector, and the policy at every budget."""
    for selector in SELECTORS:
        for allocator in ALLOCATORS:
            yield f"{allocator}{selector}", [f"{allocator}{selector}@{budget}" for budget in BUDGETS]


def grids(evaluator: TaskEvaluator) -> tuple[Grid, Grid]:
    """The table of means over tasks by budget, and the table of every task at one budget."""
    accuracy, byte_share = evaluator.accuracy("full")
    means = [["`full`", *[f"{mean(accuracy):.2f}"] * len(BUDGETS), f"{byte_share:.2f}"]]
    by_task = [_task_row("full", accuracy)]
    for name, at_budgets in policies():
        cells: list[str] = []
        for budget, policy in zip(BUDGETS, at_budgets, strict=True):
            accuracy, byte_share = evaluator.accuracy(policy)
            cells.append(f"{mean(accuracy):.2f}")
            if budget == TASK_BUDGET:
                by_task.append(_task_row(policy, accuracy))
            print(f"{policy}: {cells[-1]}, {byte_share:.2f} of the bytes", file=sys.stderr, flush=True)
        means.append([f"`{name}`", *cells, f"{byte_share:.2f}"])
    budgets = [f"budget {budget:.0%}" for budget in BUDGETS]
    names = ["policy", *budgets, f"bytes at {BUDGETS[-1]:.0%}, of the full cache"]
    return Grid(names, means), Grid(["policy", *evaluator.prompts], by_task)


def _task_row(policy: str, accuracy: dict[str, float]) -> list[str]:
    return [f"`{policy}`", *(f"{value:.2f}" for value in accuracy.values())]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """Both tables."""
    evaluator = TaskEvaluator(args.n, args.length)
    means, by_task = grids(evaluator)
    tasks = ", ".join(evaluator.prompts)
    yield Section(
        "embedded", [means], f"Mean exact match over {tasks}; {args.n} prompts of about {args.length} tokens."
    )
    yield Section("tasks", [by_task])


TABLE = Table(
    measure=measure,
    places={"embedded": ["docs/model-card.md"], "tasks": ["docs/model-card.md"]},
    options=[
        prompts(32),
        Option("--length", type=int, default=512, choices=[512, 1024], help="rough prompt length in tokens"),
    ],
    needs="the embedded model",
)

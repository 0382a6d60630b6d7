"""Answers at equal bytes, by the place of the question.

Selectors, the same with budgets by head, mergers, and readers on the embedded model. The question is inside the prompt
that is compressed, or is fed to the compressed cache, or is a second one: see `kvpolicy_eval.data.modes`. Selectors and
mergers get the same fraction of the full cache's bytes, with everything counted; readers hold every token. The last
token of what is asked is fed by itself to readers, and of few_shot's question inside, so that a step answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

import kvpolicy
from kvpolicy.policy import TunedPolicy
from kvpolicy_eval.common.accuracy import mean
from kvpolicy_eval.common.measure import Bench
from kvpolicy_eval.common.results import Result
from kvpolicy_eval.common.table import Grid, Option, Section, Table, byte_shares, only, prompts, results_folder
from kvpolicy_lm_eval.data.modes import MODES

BASES = ["snapkv", "h2o", "kvzip"]
MERGERS = ["merge", "regress", "d2o", "compensate", "blend", "elastic", "zsmerge", "kvmerger", "keepkv"]
READERS = ["exact", "quest", "quest:dense=0", "labels", "labels:dense=0", "reuse/quest"]
READS = [0.1, 0.05]
"""Fractions of the slots that readers read."""
BYTE_SHARES = [0.2, 0.5]
"""Budgets, as fractions of the full cache's bytes."""
TASKS = ["recall", "multi_query", "needles", "few_shot", "hot_keys"]
"""Tasks with a second question."""
SHOWN = ["recall", "needles"]
"""Tasks with columns of their own."""
LENGTH = 512
"""Rough prompt length in tokens, of the tasks and of the plan of the bytes that a step moves."""


def selections() -> list[str]:
    """Policies that keep a part, without a budget.

    >>> selections()[:3]
    ['snapkv', 'uniform/adakv+snapkv', 'h2o']
    """
    heads = [policy for base in BASES for policy in (base, f"uniform/adakv+{base}")]
    return [*heads, *(f"snapkv+{merger}" for merger in MERGERS)]


def readings() -> list[str]:
    """Policies that keep everything, and read a part.

    >>> readings()[:2]
    ['full+exact:read=0.1', 'full+exact:read=0.05']
    """
    return [f"full+{reader}:read={read}" for reader in READERS for read in READS]


def line(
    bench: Bench, policy: str, byte_share: float | None, tasks: Sequence[str], shown: Sequence[str] = SHOWN
) -> list[str]:
    """The row of a policy.

    Args:
        bench: Measures it.
        policy: Spec without a budget.
        byte_share: Budget as a fraction of the full cache's bytes; None for a policy that keeps everything.
        tasks: Names of the tasks.
        shown: Tasks with columns of their own.

    Raises:
        ValueError: If the smallest layout of the policy exceeds the bytes.
    """
    given = {} if byte_share is None else {"byte_share": byte_share}
    only = {"only": tuple(tasks)}
    results: list[Result] = [
        bench.result(policy, **given, **only, **({} if mode == "inside" else {"mode": mode})) for mode in MODES
    ]
    columns = [[result["tasks"][task] for result in results] for task in shown if task in tasks]
    columns.append([mean(result["tasks"]) for result in results])
    held = [result["share"] for result in results]
    return [
        f"`{policy}`",
        *(f"{answers:.2f}" for column in columns for answers in column),
        f"{max(held):.2f}",
        f"{_moved(policy, byte_share):.2f}",
    ]


def _moved(policy: str, byte_share: float | None) -> float:
    """Bytes that a step reads, over those of the full cache."""
    full = kvpolicy.plan("tiny", "full", prompt=LENGTH)
    sized = policy if byte_share is None else f"{policy}@{int(byte_share * full.full_nbytes)}B"
    return kvpolicy.plan("tiny", sized, prompt=LENGTH).moved / full.moved


def answers(
    bench: Bench, policies: Sequence[str], byte_share: float | None, tasks: Sequence[str], shown: Sequence[str] = SHOWN
) -> Grid:
    """A table of policies, after the full cache.

    Args:
        bench: Measures them.
        policies: Specs without a budget.
        byte_share: Budget as a fraction of the full cache's bytes; None for policies that keep everything.
        tasks: Names of the tasks.
        shown: Tasks with columns of their own.
    """
    title = "every token kept" if byte_share is None else f"{byte_share:.0%} of the bytes"
    columns = [*(task for task in shown if task in tasks), "all"]
    names = [title, *(f"{task}, {mode}" for task in columns for mode in MODES), "cache", "read"]
    lines = [line(bench, "full", None, tasks, shown)]
    for policy in policies:
        try:
            lines.append(line(bench, policy, byte_share, tasks, shown))
        except ValueError as error:
            print(f"{policy} at {title}: {error}", file=sys.stderr)
    return Grid(names, lines)


def _reads_part(spec: str) -> bool:
    """Whether a policy has a reader; one from a file is compared at equal bytes, whatever its layers read."""
    policy = kvpolicy.Policy.parse(spec)
    return not isinstance(policy, TunedPolicy) and policy.reads_part


def note(bench: Bench, tasks: Sequence[str]) -> str:
    """How the numbers were measured."""
    files = "Every compressed cache is saved to a file, and the loaded cache answers. " if bench.saved else ""
    return (
        f"{files}"
        f"Fraction of correct answers to {bench.docs} prompts of about {LENGTH} tokens a task; all: the mean of "
        f"{', '.join(tasks)}. Cache: bytes of the largest of the three; read: bytes that a step reads, as planned; "
        f"both relative to the full cache. {str(bench.dtype).removeprefix('torch.')}."
    )


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """A table for each budget, and one of readers."""
    bench = Bench(args.n, torch.float32, args.cache, saved=args.saved)
    readers = [spec for spec in args.only if _reads_part(spec)]
    others = [policy for policy in args.only if policy not in readers]
    shown = [] if args.means else SHOWN
    grids = [answers(bench, others, share, args.tasks, shown) for share in args.shares if others]
    grids += [answers(bench, readers, None, args.tasks, shown)] if readers else []
    yield Section("answers-saved" if args.saved else "answers", grids, note(bench, args.tasks))


TABLE = Table(
    measure=measure,
    places={"answers": ["docs/model-card.md"], "answers-saved": ["docs/guide/files.md"]},
    options=[
        prompts(32),
        only("POLICY", [*selections(), *readings()]),
        Option("--tasks", nargs="+", default=TASKS, choices=TASKS, help="tasks; all by default"),
        byte_shares(BYTE_SHARES),
        results_folder(),
        Option("--means", action="store_true", help="leave out the columns of single tasks"),
        Option("--saved", action="store_true", help="save every compressed cache, and let the file answer"),
    ],
    needs="the embedded model",
)

"""The tables on the page of a method."""

from __future__ import annotations

from collections.abc import Sequence

import kvpolicy
from kvpolicy_eval.common.accuracy import mean
from kvpolicy_eval.common.codecs import short_options, with_ranking
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.common.measure import Bench
from kvpolicy_eval.common.results import Result
from kvpolicy_eval.methods.plan import (
    BUDGETS,
    CODEC_BUDGET,
    READS,
    CodecRow,
    at_read,
    codec_rows,
    codec_selector,
    reader_policies,
    selection_policies,
)

TASK_BUDGET = 0.2
"""Budget of the table by task."""


def budget_tables(bench: Bench, name: str, by_task: bool = False) -> str:
    """Table of a method that is no codec: accuracy by budget with bytes; and by task at one budget, on request."""
    results = {policy: [bench.result(at(policy, budget)) for budget in BUDGETS] for policy in selection_policies(name)}
    names = ["policy", *(f"answers at {budget:.0%}" for budget in BUDGETS), f"bytes at {BUDGETS[-1]:.0%}"]
    rows = [
        [f"`{policy}`", *(f"{mean(one['tasks']):.2f}" for one in by_budget), f"{by_budget[-1]['share']:.2f}"]
        for policy, by_budget in results.items()
    ]
    parts = [table(names, rows)]
    if by_task:
        at_one = {policy: by_budget[BUDGETS.index(TASK_BUDGET)] for policy, by_budget in results.items()}
        parts.append(task_table(at_one))
    return "\n\n".join([*parts, note(bench, name)])


def task_table(results: dict[str, Result]) -> str:
    """Accuracy by task."""
    tasks = list(next(iter(results.values()))["tasks"])
    rows = [[f"`{policy}`", *(f"{result['tasks'][task]:.2f}" for task in tasks)] for policy, result in results.items()]
    return table([f"by task, at {TASK_BUDGET:.0%}", *tasks], rows)


def codec_table(bench: Bench, name: str, also: Sequence[str] = ()) -> str:
    """Table of a codec, and `also` of further specs: errors, then accuracy, bytes and perplexity by budget."""
    lines = codec_rows(name, also)
    evicting = [f"{name} at {CODEC_BUDGET:.0%}" for name in _MEASURED]
    names = ["codec", "error K", "error V", *_MEASURED, *evicting]
    rows: list[list[str]] = []
    for line in lines:
        result = bench.result(line.policy)
        errors = ["" if result[side] is None else f"{result[side]:.3f}" for side in ("keys", "values")]
        under_eviction = [""] * len(_MEASURED) if line.evicting is None else _measured(bench.result(line.evicting))
        rows.append([f"`{line.codec}`", *errors, *_measured(result), *under_eviction])
    return f"{table(names, rows)}\n\n{note(bench, name)} {_codec_note(name, lines)}"


_MEASURED = ("answers", "bytes", "perplexity")


def _measured(result: Result) -> list[str]:
    return [f"{mean(result['tasks']):.2f}", f"{result['share']:.2f}", f"{result['perplexity']:.2f}"]


def _codec_note(name: str, lines: Sequence[CodecRow]) -> str:
    """Options that the rows of a codec's table leave out."""
    codecs = [line.codec for line in lines if line.policy != "full"]
    notes = [f"At {CODEC_BUDGET:.0%}: with `{codec_selector(name)}`"]
    if any(line.evicting is None for line in lines):
        notes.append("Empty: the codec cannot be combined with it")
    if ranked := {with_ranking(codec).split("+")[0] for codec in codecs if with_ranking(codec) != codec}:
        notes.append(f"With every token, `{ranked.pop()}` ranks them")
    if added := dict.fromkeys(filter(None, map(short_options, codecs))):
        notes.append(f"Prompts are short, so every codec has {' or '.join(f'`{options}`' for options in added)}")
    return " ".join(f"{one}." for one in notes)


def reader_table(bench: Bench, name: str) -> str:
    """Table of a reader: accuracy by the fraction of slots that is read, and bytes of a step and of the cache."""
    last = READS[-1]
    names = ["policy", *(f"answers at {read:.0%} read" for read in READS), f"bytes read at {last:.0%}", "cache"]
    rows: list[list[str]] = []
    for policy in reader_policies(name):
        by_read = [bench.result(at_read(policy, read)) for read in READS]
        answers = [f"{mean(result['tasks']):.2f}" for result in by_read]
        rows.append([f"`{policy}`", *answers, f"{_moved(at_read(policy, last)):.2f}", f"{by_read[-1]['share']:.2f}"])
    return f"{table(names, rows)}\n\n{note(bench, name)} Bytes read: those of a step, relative to the full cache."


def _moved(policy: str) -> float:
    planned = kvpolicy.plan("tiny", policy, prompt=512)
    return planned.moved / kvpolicy.plan("tiny", "full", prompt=512).moved


def note(bench: Bench, name: str) -> str:
    """How the numbers on the page of a method were measured."""
    dtype = str(bench.dtype).removeprefix("torch.")
    answers = f"mean of six tasks, {bench.docs} prompts of 512 tokens, one answer is {1 / (6 * bench.docs):.3f}"
    return f"`python -m kvpolicy_eval.methods {name}`, on the [embedded model](../model-card.md): {answers}; {dtype}."


def at(policy: str, budget: float) -> str:
    """A policy at a budget; `full` has none.

    >>> at("h2o", 0.1), at("full", 0.1)
    ('h2o@0.1', 'full')
    """
    return policy if policy == "full" else f"{policy}@{budget}"

"""The tables on the page of a method."""

from __future__ import annotations

from collections.abc import Sequence

import kvpolicy
from kvpolicy_eval.common.accuracy import mean
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.common.measure import Bench, Result
from kvpolicy_eval.methods.plan import BUDGETS, READS, at_read, codec_policies, reader_policies, selection_policies

TASK_BUDGET = 0.2
"""Budget of the table by task."""


def budget_tables(bench: Bench, name: str) -> str:
    """Tables of a method that is no codec: accuracy by budget with bytes, and accuracy by task at one budget."""
    results = {policy: [bench.result(at(policy, budget)) for budget in BUDGETS] for policy in selection_policies(name)}
    names = ["policy", *(f"answers at {budget:.0%}" for budget in BUDGETS), f"bytes at {BUDGETS[-1]:.0%}"]
    rows = [
        [f"`{policy}`", *(f"{mean(one['tasks']):.2f}" for one in by_budget), f"{by_budget[-1]['share']:.2f}"]
        for policy, by_budget in results.items()
    ]
    by_task = {policy: by_budget[BUDGETS.index(TASK_BUDGET)] for policy, by_budget in results.items()}
    return f"{table(names, rows)}\n\n{task_table(by_task)}\n\n{note(bench)}"


def task_table(results: dict[str, Result]) -> str:
    """Accuracy by task."""
    tasks = list(next(iter(results.values()))["tasks"])
    rows = [[f"`{policy}`", *(f"{result['tasks'][task]:.2f}" for task in tasks)] for policy, result in results.items()]
    return table([f"by task, at {TASK_BUDGET:.0%}", *tasks], rows)


def codec_table(bench: Bench, name: str, also: Sequence[str] = ()) -> str:
    """Table of a codec, and `also` of further specs: accuracy, bytes, errors and perplexity, with and without it."""
    names = ["policy", "answers", "bytes", "error K", "error V", "perplexity"]
    rows: list[list[str]] = []
    for policy in codec_policies(name, also):
        result = bench.result(policy)
        evicts = "@" in policy  # the error of an encoded token does not depend on which tokens are kept
        errors = ["" if evicts or result[side] is None else f"{result[side]:.3f}" for side in ("keys", "values")]
        accuracy = f"{mean(result['tasks']):.2f}"
        rows.append([f"`{policy}`", accuracy, f"{result['share']:.2f}", *errors, f"{result['perplexity']:.2f}"])
    return f"{table(names, rows)}\n\n{note(bench)}"


def reader_table(bench: Bench, name: str) -> str:
    """Table of a reader: accuracy by the fraction of slots that is read, and bytes of a step and of the cache."""
    last = READS[-1]
    names = ["policy", *(f"answers at {read:.0%} read" for read in READS), f"moved at {last:.0%}", "held"]
    rows: list[list[str]] = []
    for policy in reader_policies(name):
        by_read = [bench.result(at_read(policy, read)) for read in READS]
        answers = [f"{mean(result['tasks']):.2f}" for result in by_read]
        rows.append([f"`{policy}`", *answers, f"{_moved(at_read(policy, last)):.2f}", f"{by_read[-1]['share']:.2f}"])
    return f"{table(names, rows)}\n\n{reader_note(bench)}"


def reader_note(bench: Bench) -> str:
    """How the numbers of a reader were measured."""
    return (
        f"Answers: fraction of correct ones, mean of six tasks, {bench.docs} prompts of about 512 tokens each; one "
        f"answer changes it by {1 / (6 * bench.docs):.3f}. The last token of every prompt is fed after the others, so "
        "that all tokens of an answer come from steps that read a part. Moved: bytes that a step reads of a cache with "
        "512 tokens, of those that reading everything would. Held: bytes after the prompt, of the full cache's, in "
        f"{str(bench.dtype).removeprefix('torch.')}."
    )


def _moved(policy: str) -> float:
    planned = kvpolicy.plan("tiny", policy, prompt=512)
    return planned.moved / kvpolicy.plan("tiny", "full", prompt=512).moved


def note(bench: Bench) -> str:
    """How the numbers were measured."""
    text = (
        f"Answers: fraction of correct ones, mean of six tasks, {bench.docs} prompts of about 512 tokens each; one "
        f"answer changes it by {1 / (6 * bench.docs):.3f}. Bytes: held after the prompt, of the full cache's, in "
        f"{str(bench.dtype).removeprefix('torch.')}."
    )
    if bench.text:
        text += " Error: squared, divided by the squared norm, of encoded tokens of held-out text."
        text += " Full-precision buffers are set to a few tokens, since the prompts are short."
    return text


def at(policy: str, budget: float) -> str:
    """A policy at a budget; `full` has none.

    >>> at("h2o", 0.1), at("full", 0.1)
    ('h2o@0.1', 'full')
    """
    return policy if policy == "full" else f"{policy}@{budget}"

"""The tables of a method's page."""

from __future__ import annotations

from kvpolicy_eval.markdown import table
from kvpolicy_eval.methods.measure import Bench, Result, mean
from kvpolicy_eval.methods.plan import BUDGETS, chosen, coded

MIDDLE = 0.2
"""The budget of the table by task."""


def budget_tables(bench: Bench, name: str) -> str:
    """Of an allocator or a selector: answers by budget and bytes, then answers by task at one budget."""
    rows = {policy: [bench.result(at(policy, budget)) for budget in BUDGETS] for policy in chosen(name)}
    head = ["policy", *(f"answers at {budget:.0%}" for budget in BUDGETS), f"bytes at {BUDGETS[-1]:.0%}"]
    means = [
        [f"`{policy}`", *(f"{mean(one):.2f}" for one in row), f"{row[-1]['share']:.2f}"] for policy, row in rows.items()
    ]
    middle = {policy: row[BUDGETS.index(MIDDLE)] for policy, row in rows.items()}
    return f"{table(head, means)}\n\n{task_table(middle)}\n\n{note(bench)}"


def task_table(results: dict[str, Result]) -> str:
    """Right answers of each task."""
    names = list(next(iter(results.values()))["tasks"])
    rows = [[f"`{policy}`", *(f"{result['tasks'][name]:.2f}" for name in names)] for policy, result in results.items()]
    return table([f"by task, at {MIDDLE:.0%}", *names], rows)


def codec_table(bench: Bench, name: str) -> str:
    """Of a codec: answers, bytes, errors and perplexity, beside exact tokens."""
    head = ["policy", "answers", "bytes", "error K", "error V", "perplexity"]
    rows: list[list[str]] = []
    for policy in coded(name):
        one, evicts = bench.result(policy), "@" in policy  # what is kept changes nothing of a coded token's error
        errors = ["" if evicts or one[side] is None else f"{one[side]:.3f}" for side in ("keys", "values")]
        rows.append([f"`{policy}`", f"{mean(one):.2f}", f"{one['share']:.2f}", *errors, f"{one['perplexity']:.2f}"])
    return f"{table(head, rows)}\n\n{note(bench)}"


def note(bench: Bench) -> str:
    """What the numbers are."""
    text = (
        f"Answers: share of right ones, mean of six tasks, {bench.docs} prompts of about 512 tokens each; one is "
        f"{1 / (6 * bench.docs):.3f}. Bytes: held after the prompt, of the full cache's, in "
        f"{str(bench.dtype).removeprefix('torch.')}."
    )
    if bench.text:
        text += " Error: squared, over the squared norm, of coded tokens of held-out text."
        text += " Exact parts are shortened, as prompts are short."
    return text


def at(policy: str, budget: float) -> str:
    """A policy at a budget; `full` has none.

    >>> at("h2o", 0.1), at("full", 0.1)
    ('h2o@0.1', 'full')
    """
    return policy if policy == "full" else f"{policy}@{budget}"

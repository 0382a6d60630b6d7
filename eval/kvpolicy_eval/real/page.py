"""The table of policies on real weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpolicy_eval.common.intervals import interval
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.real.measure import PLACES, RealModel, Result
from kvpolicy_eval.real.prompts import ALL, GENERATED, PROSE, SIZED, TASKS

GENERATED_NAME = "divergence, generated"
NUMBERS = (
    ("bits per byte", PROSE, "bits", ".2f"),
    ("divergence", PROSE, "divergence", ".4f"),
    (GENERATED_NAME, GENERATED, "divergence", ".4f"),
    ("error of keys", PROSE, "keys", ".4f"),
    ("of values", PROSE, "values", ".4f"),
)
"""Columns of text that is predicted: heading, text, name in its result, format."""


def rows(model: RealModel, policies: Sequence[str], tasks: Collection[str] = ALL) -> str:
    """The table of what is known: a row for each policy and a column for each task with a result.

    Args:
        model: The model.
        policies: Specs.
        tasks: Names of the tasks, and of the texts that are predicted.
    """
    answered = [(task, place) for task in TASKS if task in tasks for place in PLACES]
    numbers = [number for number in NUMBERS if number[1] in tasks]
    names = ["policy", "held", *(f"{task}, {place}" for task, place in answered), *(name for name, *_ in numbers)]
    body = [_row(model, policy, answered, numbers) for policy in policies]
    body = [row for row in body if any(row[1:])]
    kept = [0, *(column for column in range(1, len(names)) if any(row[column] for row in body))]
    lines = table([names[column] for column in kept], [[row[column] for column in kept] for row in body])
    return f'<div class="sortable" markdown>\n\n{lines}\n\n</div>\n\n{_note(model, [names[at] for at in kept])}'


def _note(model: RealModel, names: Sequence[str]) -> str:
    """What the columns with these headings contain."""
    tasks = {name.split(",")[0] for name in names} & set(TASKS)
    fixed = [task for task in TASKS if task in tasks and task not in SIZED]
    length = f", of about {model.tokens:,} tokens" if tasks & set(SIZED) else ""
    length += f" except in {', '.join(fixed)}" if length and fixed else ""
    weights = ", weights dequantized from the GGUF file" if model.gguf else ""
    said = [
        f"fraction of right answers with an interval of 95 %, up to {model.docs} prompts a task{length}",
        "bits per byte of English prose" if "bits per byte" in names else "",
        "divergence: of predictions from the full cache's, in nats"
        if {"divergence", GENERATED_NAME} & set(names)
        else "",
        "relative squared error of keys and values in the layers without a sliding window"
        if "of values" in names
        else "",
    ]
    return (
        f"`{model.title}`{weights}: {'; '.join(filter(None, said))}. Held: bytes relative to the full cache, in the "
        "first task. The last token of a prompt is fed after its compression."
    )


def _row(
    model: RealModel, policy: str, answered: Sequence[tuple[str, str]], numbers: Sequence[tuple[str, str, str, str]]
) -> list[str]:
    answers = [model.answers(policy, task, place) for task, place in answered]
    held = next((f"{found['held']:.2f}" for found in answers if "held" in found), "")
    found = [_number(model.text(policy, text), name, form) for _, text, name, form in numbers]
    return [f"`{policy}`", held, *map(_fraction, answers), *found]


def _fraction(found: Result) -> str:
    return str(interval(found["right"], found["of"])) if "right" in found else ""


def _number(found: Result, name: str, form: str) -> str:
    return "" if found.get(name) is None else format(found[name], form)

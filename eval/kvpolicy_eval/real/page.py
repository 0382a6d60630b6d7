"""The table of policies on real weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvpolicy_eval.common.intervals import interval
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.real.measure import PLACES, RealModel, Result
from kvpolicy_eval.real.prompts import PROSE, TASKS


def rows(model: RealModel, policies: Sequence[str], *, measured: Collection[str]) -> str:
    """The table, a row for each policy with a result.

    Args:
        model: The model.
        policies: Specs.
        measured: Tasks whose unknown results are measured now.
    """
    names = ["policy", "held", *(f"{task}, {place}" for task in TASKS for place in PLACES)]
    body = [_row(model, policy, measured) for policy in policies]
    note = (
        f"`{model.title}`: fraction of right answers with an interval of 95 %, up to {model.docs} prompts a "
        "task; bits per byte of English prose; relative squared error of keys and values in the layers "
        "without a sliding window. Held: bytes relative to the full cache, in the first task. The last token of a "
        "prompt is fed after its compression."
    )
    lines = table([*names, "bits per byte", "error of keys", "of values"], [row for row in body if any(row[1:])])
    return f'<div class="sortable" markdown>\n\n{lines}\n\n</div>\n\n{note}'


def _row(model: RealModel, policy: str, measured: Collection[str]) -> list[str]:
    answers = [model.answers(policy, task, place, measure=task in measured) for task in TASKS for place in PLACES]
    prose = model.prose(policy, measure=PROSE in measured)
    held = next((f"{found['held']:.2f}" for found in answers if "held" in found), "")
    numbers = [_number(prose, "bits", ".2f"), _number(prose, "keys", ".4f"), _number(prose, "values", ".4f")]
    return [f"`{policy}`", held, *map(_fraction, answers), *numbers]


def _fraction(found: Result) -> str:
    return str(interval(found["right"], found["of"])) if "right" in found else ""


def _number(found: Result, name: str, form: str) -> str:
    return "" if found.get(name) is None else format(found[name], form)

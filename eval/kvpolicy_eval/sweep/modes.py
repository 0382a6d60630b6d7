"""Places of the question in a sweep: variants of tasks, by the ending of their names.

A task without such an ending has its question inside the compressed prompt. Its variants end with the place:
`kvpolicy_recall_512_after`, `kvpolicy_recall_512_second`.
"""

from __future__ import annotations

from kvpolicy_lm_eval.data.modes import MODES

INSIDE = MODES[0]


def variant(task: str, mode: str) -> str:
    """Name of the variant of a task.

    >>> variant("kvpolicy_hot", "inside"), variant("kvpolicy_hot", "after")
    ('kvpolicy_hot', 'kvpolicy_hot_after')
    """
    return task if mode == INSIDE else f"{task}_{mode}"


def split_task(task: str) -> tuple[str, str]:
    """A task without its ending, and its place of the question.

    >>> split_task("kvpolicy_hot_second"), split_task("gsm8k")
    (('kvpolicy_hot', 'second'), ('gsm8k', 'inside'))
    """
    base, _, ending = task.rpartition("_")
    return (base, ending) if base and ending in MODES and ending != INSIDE else (task, INSIDE)

r"""Prompts whose answers are many lines, each of which takes the one before: sums of a list of numbers, one at a time.

The model writes every line itself, so that what a policy evicts of its own lines, or of the numbers, ends the sums.

>>> from random import Random
>>> prompt = sums(Random(0), 3, 1)
>>> print(prompt.text)
Add the numbers of the list one at a time.
<BLANKLINE>
List: 7 7 1
0 + 7 = 7
7 + 7 = 14
14 + 1 = 15
<BLANKLINE>
List: 5 9 8
0 +
>>> prompt.lines
['0 + 5 = 5', '5 + 9 = 14', '14 + 8 = 22']
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

_TASK = "Add the numbers of the list one at a time."


class Steps(NamedTuple):
    """A prompt, and the lines that answer it.

    Attributes:
        text: The prompt; it ends within the first line.
        lines: The lines of the right answer.
    """

    text: str
    lines: list[str]


def sums(rng: Random, steps: int, shots: int) -> Steps:
    """Ask for the sums of a list of digits, after lists whose sums are shown.

    Args:
        rng: Source of randomness.
        steps: Numbers of a list, and lines of its answer.
        shots: Lists that are shown with their answer.
    """
    lists = [[rng.randint(1, 9) for _ in range(steps)] for _ in range(shots + 1)]
    shown = ["\n".join([_head(numbers), *_lines(numbers)]) for numbers in lists[:-1]]
    asked = lists[-1]
    return Steps("\n\n".join([_TASK, *shown, f"{_head(asked)}\n0 +"]), _lines(asked))


def right_steps(lines: Sequence[str], answer: str) -> float:
    r"""The fraction of the lines that an answer has before its first mistake.

    >>> right_steps(["0 + 5 = 5", "5 + 9 = 14"], " 5 = 5\n5 + 9 = 15")
    0.5
    """
    said = f"0 +{answer}".splitlines()
    right = [line.strip() == one for line, one in zip(said, lines, strict=False)]
    return (right.index(False) if False in right else len(right)) / len(lines)


def _head(numbers: Sequence[int]) -> str:
    return f"List: {' '.join(map(str, numbers))}"


def _lines(numbers: Sequence[int]) -> list[str]:
    totals = [0, *accumulate(numbers)]
    return [
        f"{before} + {number} = {after}" for before, number, after in zip(totals, numbers, totals[1:], strict=False)
    ]

r"""The place of the question: what of a prompt is compressed, and what is fed to the compressed cache afterwards.

| mode | compressed | fed afterwards | asked for |
|---|---|---|---|
| `inside` | document and question | nothing | the answer |
| `after` | document | question | the answer |
| `beyond` | document | question, added whole beyond the budget | the answer |
| `second` | document and question | answer, and a second question | the second answer |

>>> prompt = ("tiger=4821\nlime=1207\n?tiger=", "4821")
>>> place(prompt, "after")
Placed(compressed='tiger=4821\nlime=1207\n', fed='?tiger=', answer='4821')
>>> place(prompt, "second")
Placed(compressed='tiger=4821\nlime=1207\n?tiger=', fed='4821\n?lime=', answer='1207')
"""

from __future__ import annotations

import re
from random import Random
from typing import Literal, NamedTuple

from kvpolicy_lm_eval.data.prompts import Prompt, split
from kvpolicy_lm_eval.data.words import CATEGORIES, WORDS

Mode = Literal["inside", "after", "beyond", "second"]
MODES: tuple[Mode, ...] = ("inside", "after", "second")
"""The places of the question."""
BEYOND: Mode = "beyond"
"""The place `after` once more, for caches that keep the question beside what is compressed."""

_RECORD = re.compile(r"^#?([a-z]+) ?= ?(\d+)$", re.MULTILINE)
_LABELED = re.compile(r"^([a-z]+):([A-Z])$", re.MULTILINE)


class Placed(NamedTuple):
    """A prompt whose question has a place.

    Attributes:
        compressed: The text that is prefilled and compressed.
        fed: The text that is fed to the compressed cache; empty with the mode `inside`.
        answer: What comes next.
    """

    compressed: str
    fed: str
    answer: str


def place(prompt: Prompt, mode: str) -> Placed:
    """Divide a prompt at the place of the question.

    Args:
        prompt: A prompt with its answer.
        mode: `inside`, `after`, `beyond` or `second`.

    Raises:
        ValueError: If there is no such mode, or the prompt has no second question.
    """
    text, answer = prompt
    if mode == "inside":
        return Placed(text, "", answer)
    if mode in ("after", BEYOND):
        return Placed(*split(text), answer)
    if mode != "second":
        raise ValueError(f"mode must be one of {', '.join([*MODES, BEYOND])}, got {mode!r}; try after.")
    following = second_question(prompt)
    if following is None:
        raise ValueError(
            "The prompt of mode=second must have something else to ask for, got one with a single record; try "
            "mode=after."
        )
    question, second_answer = following
    return Placed(text, f"{answer}\n{question}", second_answer)


def second_question(prompt: Prompt) -> Prompt | None:
    """A question about another record, or another word, with its answer; None if there is no other.

    The other record was asked for as often as the first one, so that both are hot keys, or neither is. The other word
    has another label, and is not among the examples. Which one is drawn depends on the prompt alone.
    """
    document, question = split(prompt[0])
    if question.endswith(":"):
        found = _other_words(document, question[1:-1])
    else:
        found = _other_records(document, question[1:-1])
    return Random(prompt[0]).choice(found) if found else None


def _other_records(document: str, asked: str) -> list[Prompt]:
    records = [(key, value) for key, value in _RECORD.findall(document) if key in WORDS]
    times = document.count(f"?{asked}=")
    return [(f"?{key}=", value) for key, value in records if key != asked and document.count(f"?{key}=") == times]


def _other_words(document: str, asked: str) -> list[Prompt]:
    shown = dict(_LABELED.findall(document))
    return [
        (f"?{word}:", labels.pop())
        for members in CATEGORIES.values()
        for word in members
        if asked not in members and word not in shown and (labels := {shown[one] for one in members if one in shown})
    ]

"""Prompts of SCBench (arXiv:2412.10319): the templates of its subsets, which are a part of the benchmark's definition.

They are those of `scbench/eval_utils.py` in github.com/microsoft/MInference, at commit fb56c91. A template is filled
with the fields of a turn: its `input`, the `target` of a question of `mf`, and the options `A` to `D` of `choice_eng`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_TURNS = 5
"""The most turns of a row that the benchmark asks, the default of its command."""

_TARGET = re.compile(r"The .+ is")
_LETTERS = "ABCD"
_CHOICE = "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"


class Subset(NamedTuple):
    """A subset of the dataset, and its prompts.

    Attributes:
        new_tokens: The most tokens of an answer.
        about: What stands in front of the context; empty for nothing.
        question: What a turn asks.
        conversation_about: In place of `about` in a conversation.
        first: In place of `question` in the first turn of a conversation.
        later_plain: In place of `question` in later turns of a conversation without a chat template.
        context: The column of the context.
        turn: The keys of a turn that are read.
    """

    new_tokens: int
    about: str = ""
    question: str = "{input}"
    conversation_about: str | None = None
    first: str | None = None
    later_plain: str | None = None
    context: str = "context"
    turn: tuple[str, ...] = ("input", "answer")

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of the dataset that are read."""
        return self.context, "multi_turns"

    def shared_text(self, row: Mapping[str, Any]) -> str:
        """What all requests of a row begin with: its instruction and its context."""
        return self._with_context(self.about, row)

    def ask(self, turn: Mapping[str, Any]) -> str:
        """The question of a request, which stands right behind the shared text."""
        return _fill(self.question, turn)

    def opening(self, row: Mapping[str, Any]) -> str:
        """The begin of a conversation: its instruction, its context and the question of its first turn."""
        about = self.about if self.conversation_about is None else self.conversation_about
        question = self.question if self.first is None else self.first
        return f"{self._with_context(about, row)}\n\n{_fill(question, row['multi_turns'][0])}"

    def ask_later(self, turn: Mapping[str, Any], chat: bool) -> str:
        """The question of a later turn of a conversation."""
        return _fill(self.question if chat or self.later_plain is None else self.later_plain, turn)

    def _with_context(self, about: str, row: Mapping[str, Any]) -> str:
        # The numbers of `mf` are a list, which the benchmark writes as Python does.
        context = str(row[self.context])
        return f"{_fill(about, row['multi_turns'][0])}\n\n{context}" if about else context


SUBSETS = {
    "kv": Subset(150, "Extract the value corresponding to the specified key in the JSON object below."),
    "prefix_suffix": Subset(150),
    "vt": Subset(30, context="input"),
    "qa_eng": Subset(
        40,
        "Read the book and answer the question. Be very concise in your answer.",
        "Question: {input}\nAnswer:",
    ),
    "choice_eng": Subset(
        40,
        "Read the book and answer the question.",
        f"{_CHOICE}The the correct answer is",
        later_plain=f"{_CHOICE}The letter of the correct answer is",
        turn=("input", "answer", "options"),
    ),
    "many_shot": Subset(10),
    "mf": Subset(
        5,
        "{input}",
        "What is {target}?\n\n{input}",
        conversation_about="What is {target}?",
        first="{input}",
    ),
}
"""The subsets whose scores need neither another model nor another package, by their names without `scbench_`."""


def answers_of(turn: Mapping[str, Any]) -> list[str]:
    """What is right in a turn: one text, several that are all asked for, or an option and its letter."""
    answer = turn["answer"]
    if options := turn.get("options"):
        return [answer, _LETTERS[options.index(answer)]]
    return list(map(str, answer)) if isinstance(answer, list) else [str(answer)]


def _fill(template: str, turn: Mapping[str, Any]) -> str:
    target = _TARGET.search(turn["input"])
    fields = {"target": target[0].lower().removesuffix(" is")} if target else {}
    options = zip(_LETTERS, turn.get("options") or (), strict=False)
    return template.format(input=turn["input"], **fields, **dict(options))

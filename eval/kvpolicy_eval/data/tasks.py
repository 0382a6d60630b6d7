"""The six tasks of the embedded model, as generators of prompts of a given length."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.data.words import WORDS

LENGTHS = (512, 1024, 4096)
"""Prompt lengths of the tasks, in tokens. Beyond 1,024 the model must be `tiny-4k`."""

_CHARS_OF_RECORD = 13
"""Characters of source text that take the tokens of a record."""


def tasks(length: int) -> dict[str, Callable[[Random], prompts.Prompt]]:
    """Prompt generators that fill about `length` tokens.

    The counts below were chosen for 512 tokens and scale linearly; `few_shot` keeps its examples and grows only the
    source text between them and the question. There are keys for 256 records: source text replaces what a longer
    prompt has room for.

    Args:
        length: Rough prompt length in tokens, one of `LENGTHS` or between them.

    Returns:
        Task name to a function that draws a prompt and its answer.
    """
    k = length / 512

    def fit(records: int, others: int = 0) -> tuple[int, int]:
        """How many of `records` have a key when `others` have one, and characters in place of the rest."""
        kept = min(records, len(WORDS) - others)
        return kept, (records - kept) * _CHARS_OF_RECORD

    records, chars = fit(int(70 * k))
    listed, listed_chars = fit(int(50 * k))
    fresh, fresh_chars = fit(int(28 * k), int(10 * k))
    return {
        "recall": lambda rng: prompts.recall(rng, records, chars=chars),
        "multi_query": lambda rng: prompts.multi_query(rng, listed, int(16 * k), chars=listed_chars),
        "passkey": lambda rng: prompts.passkey(rng, int(900 * k)),
        "needles": lambda rng: prompts.needles(rng, int(850 * k), int(4 * k)),
        "few_shot": lambda rng: prompts.few_shot(rng, 4, 3, int(850 * k)),
        "hot_keys": lambda rng: prompts.hot_keys(rng, int(10 * k), 3, int(27 * k), fresh, chars=fresh_chars),
    }


def draw_prompts(docs: int, length: int) -> dict[str, list[prompts.Prompt]]:
    """The first prompts of every task.

    Args:
        docs: Prompts per task.
        length: Rough prompt length in tokens, see `tasks`.
    """
    return {name: [draw(Random(1_000 * length + doc)) for doc in range(docs)] for name, draw in tasks(length).items()}

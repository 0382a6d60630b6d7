"""The six tasks of the embedded model, as generators of prompts of a given length."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvpolicy_eval.data import prompts


def tasks(length: int) -> dict[str, Callable[[Random], prompts.Prompt]]:
    """Prompt generators that fill about `length` tokens.

    The counts below were chosen for 512 tokens and scale linearly; `few_shot` keeps its examples and grows only the
    source text between them and the question.

    Args:
        length: Rough prompt length in tokens, 512 or 1,024.

    Returns:
        Task name to a function that draws a prompt and its answer.
    """
    k = length / 512
    return {
        "recall": lambda rng: prompts.recall(rng, int(70 * k)),
        "multi_query": lambda rng: prompts.multi_query(rng, int(50 * k), int(16 * k)),
        "passkey": lambda rng: prompts.passkey(rng, int(900 * k)),
        "needles": lambda rng: prompts.needles(rng, int(850 * k), int(4 * k)),
        "few_shot": lambda rng: prompts.few_shot(rng, 4, 3, int(850 * k)),
        "hot_keys": lambda rng: prompts.hot_keys(rng, int(10 * k), 3, int(27 * k), int(28 * k)),
    }

"""The end of a prompt that is fed after the rest has been compressed, such as a question that was not known before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError


class HeldBack(NamedTuple):
    """The end of a prompt that is fed after the rest of it has been compressed.

    Attributes:
        tokens: The number of its tokens.
        beyond: Whether they are kept in addition to the budget.
    """

    tokens: int
    beyond: bool


NOTHING_HELD = HeldBack(0, beyond=False)
"""Of a prompt that is compressed as a whole."""


def find_held_back(kind: str, request: Any, encode: Callable[[str], list[int]]) -> HeldBack:
    """What the document of a request holds back at the end of its prompt, by its keys `held_back` and `beyond`.

    Args:
        kind: The type of the request.
        request: The request of lm-eval, with its document.
        encode: Encodes a text as tokens.

    Raises:
        KVPolicyError: If the text that is held back does not stand in the prompt.
    """
    document: Any = getattr(request, "doc", None)
    text = document.get("held_back") if isinstance(document, dict) else None
    if not text or kind == "loglikelihood_rolling":
        return NOTHING_HELD
    # lm-eval scores the white space at the end of a context with the answer. A chat template ends the prompt.
    prompt = request.args[0].rstrip() if kind == "loglikelihood" else request.args[0]
    start = prompt.rfind(text.rstrip())
    if start < 0:
        raise KVPolicyError(
            f"held_back must be the end of the prompt, got {text!r} and a prompt without it; try to end the "
            "prompt with it."
        )
    tokens = encode(prompt)
    # A token at the border may contain the end of the context and the begin of the text. It is held back.
    pairs = zip(tokens, encode(prompt[:start]), strict=False)
    compressed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if kind == "generate_until":  # something is read first, whatever the other prompts of the batch
        compressed = max(compressed, 1)
    return HeldBack(len(tokens) - compressed, bool(document.get("beyond")))

"""The tokens that may come next in an answer with a format, by llguidance (the extra `grammar`)."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from kvpolicy.serving.formats import AnswerFormat
from kvpolicy.text.errors import KVPolicyError

MOST_COMPILED = 32
"""The most grammars that are kept for further requests: many ask for the same one."""


class Matcher:
    """The tokens that may come next in one answer.

    Args:
        state: The `LLMatcher` of llguidance, which is changed.
        source: The field of the request, for messages.
    """

    def __init__(self, state: Any, source: str) -> None:
        """The answer is empty."""
        self._state = state
        self._source = source

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._state.is_stopped()

    def restrict(self, scores: Tensor) -> Tensor:
        """Scores [V], with minus infinity for tokens that cannot come next.

        Raises:
            KVPolicyError: If the grammar needs more work than llguidance allows.
        """
        allowed = torch.frombuffer(bytearray(self._state.compute_logit_bias()), dtype=torch.uint8)
        self._check()
        known = min(len(allowed), len(scores))  # a model may have more tokens than its tokenizer
        is_out = torch.ones(len(scores), dtype=torch.bool, device="cpu")
        is_out[:known] = allowed[:known] == 0
        return scores.masked_fill(is_out.to(scores.device), -torch.inf)

    def take(self, token: int) -> None:
        """Take the token that was chosen.

        Raises:
            KVPolicyError: If it was not allowed, since the model's own options exclude those that are.
        """
        self._state.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise _refusal(self._source, self._state.get_error())


class Grammars:
    """Compiles the formats of requests. Used by one thread."""

    def __init__(self) -> None:
        """Nothing is compiled; llguidance is imported for the first request that needs it."""
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, asked: AnswerFormat, tokenizer: Any, ends: Collection[int]) -> Matcher:
        """The tokens that may come next in an answer that is empty.

        Args:
            asked: The format.
            tokenizer: The tokenizer, the same in every call.
            ends: The tokens that end an answer, the same in every call.

        Raises:
            KVPolicyError: If llguidance is missing, or cannot follow the format or the tokenizer.
        """
        try:
            library: Any = importlib.import_module("llguidance")
            reader: Any = importlib.import_module("llguidance.hf")
        except ImportError as error:
            raise KVPolicyError(
                f"{asked.source} must have the package llguidance on the server, got none; try pip install "
                "'kvpolicy[grammar]'."
            ) from error
        if self._tokenizer is None:
            self._tokenizer = _read(reader, tokenizer, ends, asked.source)
        state = self._compiled.get(asked.grammar)
        if state is None:
            limits = library.LLParserLimits(verbose_errors=False)
            state = library.LLMatcher(self._tokenizer, asked.grammar, log_level=0, limits=limits)
            if state.is_error():
                raise _refusal(asked.source, state.get_error())
            self._compiled[asked.grammar] = state
        self._compiled.move_to_end(asked.grammar)
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return Matcher(state.deep_copy(), asked.source)


def _read(reader: Any, tokenizer: Any, ends: Collection[int], source: str) -> Any:
    try:
        return reader.from_tokenizer(tokenizer, eos_token=sorted(ends) or None)
    except Exception as error:  # of several classes, one of which is no ValueError
        raise KVPolicyError(
            f"{source} must have a tokenizer that llguidance reads, got an error: {error}; try it without {source}."
        ) from error


def _refusal(source: str, error: str) -> KVPolicyError:
    said = " ".join(error.split())
    said = said if len(said) <= 200 else f"{said[:200]}..."
    return KVPolicyError(f"{source} must have a schema that llguidance can follow, got an error: {said}; try another.")

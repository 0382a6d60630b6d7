"""Texts to tune a policy on: a prompt, and the answer that a cache must still support."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Window(NamedTuple):
    """A text in two parts, tokenized.

    Attributes:
        prompt: Token ids that are in the cache when it is compressed, [N] int64 on the CPU.
        answer: Token ids that follow, [M] int64 on the CPU; a question at their start belongs to them.
    """

    prompt: Tensor
    answer: Tensor

"""A prompt, and how its answers are generated."""

from __future__ import annotations

from typing import Any


class Prompt:
    """A prompt, and how its answers are generated.

    Args:
        ids: Token ids.
        config: The generation config of transformers.

    Attributes:
        ids: Token ids.
        config: The generation config.
        ends: Tokens that end an answer.
        processors: The logits processors; None until the prompt was read.
    """

    def __init__(self, ids: list[int], config: Any) -> None:
        """A prompt that was not read."""
        self.ids = ids
        self.config = config
        self.ends = ends_of(config)
        self.processors: list[Any] | None = None


def ends_of(config: Any) -> set[int]:
    """The tokens that end an answer, by a generation config."""
    ends = getattr(config, "eos_token_id", None)
    return {ends} if isinstance(ends, int) else set(ends or ())

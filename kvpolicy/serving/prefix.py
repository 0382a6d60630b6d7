"""A saved cache that every request starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpolicy.spec.errors import KVPolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """A saved cache that every request starts from.

    Attributes:
        ids: The tokens that the cache has seen.
        cache: The cache, which is copied for each request.
    """

    ids: tuple[int, ...]
    cache: Any

    def check(self, prompt: list[int]) -> None:
        """Refuse a prompt that is not the prefix with something behind it.

        Raises:
            KVPolicyError: Saying where the prompt differs.
        """
        same = next((i for i, (a, b) in enumerate(zip(prompt, self.ids, strict=False)) if a != b), None)
        if same is None and len(prompt) > len(self.ids):
            return
        got = f"only {len(prompt):,} tokens" if same is None else f"another token at position {same:,}"
        raise KVPolicyError(
            f"The prompt must be the {len(self.ids):,} tokens of --prefix and at least one more, got {got}; try the "
            "text that the file was made of with a question behind it."
        )

"""How something is done to a cache."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvpolicy import KVPolicyError, PolicyCache
from tests.walks.life import Life, changes, check_sentence, state_of


class Acting:
    """Does operations in random modes, and notes them.

    Attributes:
        dice: What draws.
        modes: The modes, of which one is drawn for each operation.
    """

    def __init__(self, dice: Random, notes: list[str]) -> None:
        self.dice = dice
        self.modes: list[Callable[[], Any]] = [torch.no_grad, torch.no_grad, torch.inference_mode]
        self._notes = notes

    def note(self, words: str) -> None:
        """Note what was done, in a line."""
        self._notes.append(words)

    def tokens(self, rows: int, count: int) -> Tensor:
        """Random ids, [rows, count]."""
        return torch.tensor([[self.dice.randint(3, 40) for _ in range(count)] for _ in range(rows)]).view(rows, count)

    def attempt(self, life: Life, words: str, operation: Callable[[PolicyCache], Any]) -> tuple[bool, Any]:
        """Do an operation; one that is refused changes nothing.

        Returns:
            Whether it was done, and what it returned.
        """
        before = state_of(life.cache)
        self.note(f"{life.name}: {words}")
        mode = self.dice.choice(self.modes)()
        try:
            with mode:
                return True, operation(life.cache)
        except KVPolicyError as error:
            check_sentence(error)
            self.note(f"    refused: {error}")
        if life.cache.forward.runs:  # in the middle of a forward
            life.broken = True
        else:
            assert changes(before, state_of(life.cache)) == [], f"refused {words}, which changed the cache"
        return False, None

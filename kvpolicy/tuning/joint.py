"""What policies do to a model's predictions together: all layers compressed at once, and one of them changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import Past
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.tuning.answers import Answer, Attention, Changes, over
from kvpolicy.tuning.compression import Compressor, LayerPrompt, prompt_of, whole
from kvpolicy.tuning.tap import Tap
from kvpolicy.tuning.windows import Window

Assignment = Sequence[int]
"""The number of the policy in each layer."""


class JointWindow:
    """A window whose layers are compressed in any combination.

    Queries, keys and values of the prompt are held for all layers, and what each base keeps.
    """

    def __init__(self, tap: Tap, compressor: Compressor, window: Window) -> None:
        """Run the window with a full cache.

        Args:
            tap: The model.
            compressor: The policies that layers may have.
            window: The window; a question is a part of what follows the prompt.
        """
        self._compressor = compressor
        self._facts = compressor.facts(window)
        self._prompts: list[LayerPrompt] = []
        self._seen: list[dict[Any, PendingPrompt]] = [{} for _ in tap.layers]
        length = len(window.prompt)
        cache = tap.run(
            window.prompt, length, lambda call: self._prompts.append(prompt_of(call, length)), compressor.pins
        )
        full = {prompt.layer_idx: whole(prompt.keys, prompt.values) for prompt in self._prompts}
        self._answer = Answer(tap.model, cache, full, window.follow)

    def usable(self, number: int) -> bool:
        """Whether the budget of a policy is enough for the prompt."""
        return self._facts.tokens[number] is not None

    def kls(self, assignments: Sequence[Assignment]) -> list[float]:
        """KL(full || all layers compressed) in nats, mean over scored predictions; NaN where a budget is too small."""
        found = [math.nan] * len(assignments)

        def rows() -> Iterator[tuple[int, Changes]]:
            for number, assignment in enumerate(assignments):
                if all(map(self.usable, assignment)):
                    yield number, self._changes(assignment)

        for number, kl in self._answer.kls(rows()):
            found[number] = kl
        return found

    def exchanges(self, base: Assignment, numbers: Sequence[int]) -> Tensor:
        """The same of an assignment in which one layer has another policy.

        Args:
            base: The policies of the other layers.
            numbers: The policies that each layer gets in turn.

        Returns:
            [L, len(numbers)] fp64; NaN where a budget is too small.
        """
        found = torch.full((len(self._prompts), len(numbers)), math.nan, dtype=torch.float64)
        if not all(map(self.usable, base)):
            return found
        common = self._changes(base)

        def rows() -> Iterator[tuple[int, Changes]]:
            for layer in range(len(self._prompts)):
                for column, number in enumerate(numbers):
                    if self.usable(number):
                        yield layer * len(numbers) + column, {**common, **self._changes_of(layer, number)}

        for at, kl in self._answer.kls(rows()):
            found[at // len(numbers), at % len(numbers)] = kl
        return found

    def _changes(self, assignment: Assignment) -> Mapping[int, Attention]:
        changes: dict[int, Attention] = {}
        for layer, number in enumerate(assignment):
            changes |= self._changes_of(layer, number)
        return changes

    def _changes_of(self, layer: int, number: int) -> dict[int, Attention]:
        prompt = self._prompts[layer]
        past: Past = self._compressor.past(prompt, self._facts, number, self._seen[layer])
        return {prompt.layer_idx: over(past)}

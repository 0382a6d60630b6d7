"""The metric of each layer and row: sums of the prompt that runs, and what is known of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvpolicy.engine.hidden_stats import CosineSum


class Measured:
    """The metric of the layers of a cache.

    Attributes:
        known: The metric of each row and layer, or shares of the budget; None before a prompt was measured. Lists, not
            a tensor, so that no tensor outlives a forward uncounted.
        sums: Cosines of the prompt that runs, by layer; empty if layers are measured otherwise, or not at all.
    """

    def __init__(self) -> None:
        """Nothing was measured."""
        self.known: list[list[float]] | None = None
        self.sums: dict[int, CosineSum] = {}

    def add(self, layer_idx: int, new: CosineSum) -> None:
        """Add the cosines of a tile, or of a chunk of a prompt that is held, to those before."""
        self.sums[layer_idx] = self.sums[layer_idx].plus(new) if layer_idx in self.sums else new

    def means(self, layers: Iterable[int]) -> list[Tensor]:
        """The mean cosine of layers in the prompt that runs, [B] each, on the host."""
        return [self.sums[layer_idx].mean.cpu() for layer_idx in layers]

    def of_rows(self, layers: Iterable[int], unbegun: Tensor | None) -> Tensor:
        """The metric of all `layers`, [B, L]: that of its first prompt for every row.

        Args:
            layers: Indices of the layers.
            unbegun: Rows whose first prompt runs, [B] bool; None if all are measured anew.
        """
        held = self._held()
        if not self.sums:
            assert held is not None, "no prompt was measured"
            return held
        return self._replaced(torch.stack(self.means(layers), -1), held, unbegun)

    def note(self, metrics: Tensor, unbegun: Tensor | None) -> None:
        """Note the metric [B, L] of rows in their first prompt: slots are made by it, and stay with their layers."""
        held = self._held()
        self.known = self._replaced(metrics, held, unbegun).tolist()

    def end_prompt(self, layers: Iterable[int], unbegun: Tensor | None) -> None:
        """Keep the metric of the prompt that ran."""
        if self.sums:
            self.known = self.of_rows(layers, unbegun).tolist()
        self.sums = {}

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        held = self._held()
        self.known = None if held is None else fn(held).tolist()
        self.sums = {layer: CosineSum(*map(fn, sums)) for layer, sums in self.sums.items()}  # of held chunks

    def _held(self) -> Tensor | None:
        """The metric of rows whose first prompt ended, [B, L] fp32."""
        return None if self.known is None else torch.tensor(self.known, dtype=torch.float32, device="cpu")

    @staticmethod
    def _replaced(new: Tensor, held: Tensor | None, unbegun: Tensor | None) -> Tensor:
        return new if held is None or unbegun is None else torch.where(unbegun.cpu()[:, None], new, held)

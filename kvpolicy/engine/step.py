"""A decode step of a layer that was attended to, and what its selector is to see of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import View


class Step(NamedTuple):
    """A token of each row that has its slot.

    Attributes:
        vectors: Its queries [B, Hq, 1, D], keys and values [B, H, 1, D].
        position: Its position, [B, 1] int32.
        valid: Which rows have a token, [B, 1] bool; None if all have.
        view: The slots.
        weights: Attention of the token, [B, H, G, S] fp32; None if the selector does not look at it.
    """

    vectors: tuple[Tensor, Tensor, Tensor]
    position: Tensor
    valid: Tensor | None
    view: View
    weights: Tensor | None

    def beside(self, weights: Tensor | None) -> Step:
        """The same with the weights [B, H, G', S] of a layer that reads the same keys; its queries are not taken.

        A selector may hold queries of each query head of the layer.
        """
        both = None if self.weights is None or weights is None else torch.cat([self.weights, weights], 2)
        return self._replace(weights=both)

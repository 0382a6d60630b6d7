"""Muon: momentum with orthogonalized matrix updates, batched over all layers of one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the published Newton-Schulz iteration


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each tall matrix of `x`, [N, rows, columns], towards 1."""
    a, b, c = _QUINTIC
    x = (x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-9)).bfloat16()
    for _ in range(steps):
        gram = x.transpose(1, 2) @ x
        x = a * x + x @ (b * gram + c * (gram @ gram))
    return x.float()


class Muon:
    """Step stacked weight matrices [L, rows, columns] along their orthogonalized momentum.

    Source: Keller Jordan's Muon. The update is scaled by 0.2 sqrt(longer side),
    so that it shares its learning rate with AdamW.

    Args:
        weights: Stacked matrices, all of which have a gradient at every step.
        momentum: Decay of the running gradient (Nesterov form).
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
    """

    def __init__(self, weights: Sequence[Tensor], momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        """Initialize the momentum with zeros."""
        self.weights = list(weights)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.buffers = [torch.zeros_like(w) for w in self.weights]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every weight with the learning rate `lr`, and clear its gradient."""
        groups: dict[torch.Size, list[tuple[Tensor, Tensor, bool]]] = {}
        for weight, buffer in zip(self.weights, self.buffers, strict=True):
            assert weight.grad is not None
            buffer.mul_(self.momentum).add_(weight.grad)
            update = weight.grad + self.momentum * buffer
            wide = update.shape[1] < update.shape[2]
            update = update.transpose(1, 2) if wide else update
            groups.setdefault(update.shape[1:], []).append((weight, update, wide))
            weight.grad = None
        for members in groups.values():
            self._apply(members, lr)

    def _apply(self, members: list[tuple[Tensor, Tensor, bool]], lr: float) -> None:
        joined = torch.cat([update for _, update, _ in members])
        updates = orthogonal(joined) * 0.2 * math.sqrt(max(joined.shape[1:]))
        parts = updates.split([len(update) for _, update, _ in members])
        for (weight, _, wide), part in zip(members, parts, strict=True):
            weight.mul_(1 - lr * self.weight_decay).add_(part.transpose(1, 2) if wide else part, alpha=-lr)

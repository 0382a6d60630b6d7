"""Prompts in which tokens of a picture see each other, also later ones (Gemma 3): the model's own mask says which.

The output of such a prompt is that of the stock function under this mask. Statistics that rank tokens are of causal
attention, as of every other prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.engine.attention import attend
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError

Stock = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attends under the model's own mask: queries, keys and values [B, H, P, D] to an output [B, P, Hq, D]."""


def check_blocks(policy_cache: Any, module: nn.Module, mask: Tensor, new: int) -> None:
    """Refuse a mask of more than padding where tokens stand before the new ones, or layers take tiles.

    Args:
        policy_cache: What attends for the module.
        module: The attention module.
        mask: Its mask, [B, 1, P, N].
        new: P.

    Raises:
        KVPolicyError: Naming what stands before.
    """
    layers = getattr(policy_cache, "layers", None)
    layer: Any = None if layers is None else layers[module.layer_idx]  # pyright: ignore[reportArgumentType]
    stands = getattr(layer, "holds_tokens", True) or policy_cache.tile is not None
    if stands or mask.dim() != 4 or mask.shape[-1] != new:
        raise KVPolicyError(
            f"The attention mask must be 2-D under a policy, got {mask.dim()} dimensions, as for image tokens that "
            "attend to later ones, of which a whole picture must be in the first forward; try pictures in one prompt "
            "without tile, or text alone."
        )


def is_token(mask: Tensor) -> Tensor:
    """Which of P tokens are not padding, [B, P] bool, by a mask [B, 1, P, P] of bool or of numbers that are added."""
    diagonal = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return diagonal if diagonal.dtype == torch.bool else diagonal == 0


def under_mask(stock: Stock) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Attention as `LayerStore.attend_new` takes it, whose output is that of the stock function."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform, past: None, valid: Tensor, sums: bool, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        out = stock(q, k, v).transpose(1, 2).masked_fill(~valid[:, None, :, None], 0)
        return out, attend(q, k, v, transform, past, valid, True)[1] if sums else None

    return attention

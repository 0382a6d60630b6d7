"""Transcript of a prompt that is to be replayed: its tokens as the model was given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.rotary import one_part
from kvpolicy.text.errors import KVPolicyError


class Transcript(NamedTuple):
    """The tokens of a prompt so far, as the model was given them.

    Attributes:
        ids: Token ids of each chunk, [B, P], or embeddings [B, P, hidden].
        valid: Which tokens are not padding, [B, N] bool, over all chunks.
        columns: Columns that the cache had seen before them, padding included.
        next_position: The position behind each row's last token, [B] int64.
        positioned: Whether positions were given, and not counted by the model.
        by_layer: What layers were given of each chunk beside embeddings, [B, P, layers, size]; none in most models.
    """

    ids: tuple[Tensor, ...]
    valid: Tensor
    columns: int
    next_position: Tensor
    positioned: bool
    by_layer: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(t.nbytes for t in (*self.ids, *self.by_layer, self.valid, self.next_position))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> Transcript:
        """The same with `fn` of every tensor, which selects or repeats rows."""
        own = {"ids": tuple(map(fn, self.ids)), "by_layer": tuple(map(fn, self.by_layer))}
        return self._replace(**own, valid=fn(self.valid), next_position=fn(self.next_position))


def extended(
    earlier: Transcript | None,
    tokens: Tensor,
    valid: Tensor | None,
    position_ids: Tensor | None,
    columns: int,
    by_layer: Tensor | None = None,
) -> Transcript:
    """A transcript with one more chunk.

    Args:
        earlier: The chunks before, or None.
        tokens: Ids [B, P] or embeddings [B, P, hidden] of the chunk.
        valid: Which of them are not padding, [B, P] bool; None if all are.
        position_ids: The positions that the model was given, [B or 1, P], or None.
        columns: Columns that the cache has seen before the chunk.
        by_layer: What layers are given of the chunk beside its embeddings, or None.

    Raises:
        KVPolicyError: If a token has several positions.
    """
    position_ids = one_part(position_ids)
    if position_ids is not None and position_ids.dim() != 2:
        raise KVPolicyError(
            "The positions of a prompt that is replayed must be one number per token, got parts that "
            "differ (M-RoPE), as behind a picture; try a "
            "selector without a replay, such as snapkv."
        )
    rows, new = tokens.shape[:2]
    flags = torch.ones(rows, new, dtype=torch.bool, device=tokens.device) if valid is None else valid.clone()
    at = torch.arange(columns, columns + new, device=flags.device) if position_ids is None else position_ids
    last = new - 1 - flags.flip(1).to(torch.uint8).argmax(1, keepdim=True)  # of the row's own tokens
    after = at.expand(rows, -1).gather(1, last)[:, 0].to(torch.int64) + 1
    # Copied, as the flags are: what the caller does with its tensors later must not change the replay.
    ids = tokens.detach().clone()
    more = () if by_layer is None else (by_layer.detach().clone(),)
    if earlier is None:
        return Transcript((ids,), flags, columns, after, position_ids is not None, more)
    after = torch.where(flags.any(1), after, earlier.next_position)
    positioned = earlier.positioned or position_ids is not None
    flags = torch.cat([earlier.valid, flags], 1)
    return Transcript((*earlier.ids, ids), flags, earlier.columns, after, positioned, (*earlier.by_layer, *more))

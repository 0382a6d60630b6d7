"""In-place writes to single slots of large buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


def write_slots(target: Tensor, slots: Tensor, data: Tensor, index: Tensor | None = None) -> None:
    """Write vectors to slots of each head, in place.

    A scatter along the slots does the same in one operation, but inductor (torch 2.13) turns one of one token into a
    copy of the whole buffer; `index_copy_` on the flat view writes only the given slots, and takes vectors.

    Args:
        target: [B, H, S, ...], contiguous.
        slots: [B, H, n] int64, distinct within a head, or with equal data where they are not.
        data: [B, H, n, ...].
        index: `flat_slots` of the slots, if it is known: tensors with equally many slots share it.

    Examples:
        >>> buffer = torch.zeros(1, 2, 3, 1)
        >>> write_slots(buffer, torch.tensor([[[2], [0]]]), torch.ones(1, 2, 1, 1))
        >>> buffer.flatten().tolist()
        [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    """
    if index is None and needs_no_index(target, slots):
        target.scatter_(2, slots.reshape(*slots.shape, *[1] * (target.dim() - 3)).expand(data.shape), data)
        return
    batch, heads, size, *vector = target.shape
    flat = target.view(batch * heads * size, *vector)  # -1 would be ambiguous for vectors of no elements
    flat.index_copy_(0, flat_slots(slots, size) if index is None else index, data.flatten(0, 2))


def needs_no_index(target: Tensor, slots: Tensor) -> bool:
    """Whether `write_slots` has no use for `flat_slots`: eager code scatters numbers, and a vector of each head."""
    return (target.dim() == 3 or slots.shape[2] == 1) and not torch.compiler.is_compiling()


def flat_slots(slots: Tensor, size: int, once: Callable[..., Tensor] | None = None) -> Tensor:
    """Slots [B, H, n] of heads with `size` slots each, as indices into the flat view [B * H * size, ...].

    Where heads begin is known to `once`, if it is given; see `kvpolicy.protocols.StepMemo`.
    """
    heads = slots.shape[0] * slots.shape[1]
    if heads == 1:
        return slots.flatten()
    arange = torch.arange if once is None else partial(once, torch.arange)
    first = arange(0, heads * size, size, device=slots.device)
    return (first[:, None] + slots.reshape(heads, -1)).flatten()


def gather_slots(t: Tensor, slots: Tensor) -> Tensor:
    """Read slots [B, H, n] of each head of `t` [B, H, S, ...], [B, H, n, ...]."""
    index = slots.reshape(*slots.shape, *[1] * (t.dim() - 3))
    return t.gather(2, index.expand(*slots.shape, *t.shape[3:]))


def put(target: Tensor, data: Tensor, slots: Tensor, write_mask: Tensor) -> None:
    """Write tokens into slots, in place; tokens outside `write_mask` are not written, wherever their slots are.

    Args:
        target: The tensor to write to, [B, H, S, ...], contiguous.
        data: The tokens, [B, H, n, ...], in the dtype of `target`.
        slots: The slot of each token, [B, H, n] int64.
        write_mask: Which tokens are written, [B, H, n] bool.
    """
    if data.shape[2]:
        Writes.of(slots, write_mask).put(target, data)


class Writes(NamedTuple):
    """Where tokens are written, found once for several tensors: `put` finds it for one.

    Attributes:
        token: The token that is written in place of each, [B, H, n] int64.
        slots: Its slot, [B, H, n] int64.
        is_written: Heads in which a token is written, [B, H] bool.
    """

    token: Tensor
    slots: Tensor
    is_written: Tensor

    @classmethod
    def of(cls, slots: Tensor, write_mask: Tensor) -> Writes:
        """Find where at least one token of each head is written; the arguments are those of `put`."""
        # A write cannot skip a token, and a masked token may point to a slot in use. So a masked token repeats the
        # write of the first token of its head that is written. In a head without any, all write back what they read.
        first = write_mask.int().argmax(-1, keepdim=True)
        token = torch.where(write_mask, torch.arange(write_mask.shape[-1], device=write_mask.device), first)
        return cls(token, slots.gather(-1, token), write_mask.any(-1))

    def put(self, target: Tensor, data: Tensor) -> None:
        """Write tokens [B, H, n, ...] to a tensor [B, H, S, ...], in place."""
        is_written = self.is_written.reshape(*self.slots.shape[:2], *[1] * (data.dim() - 2))
        new = torch.where(is_written, gather_slots(data, self.token), gather_slots(target, self.slots))
        write_slots(target, self.slots, new)

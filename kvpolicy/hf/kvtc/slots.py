"""Slots of a layer in a file: which tokens they hold, and which of them KVTC encodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError


class Slots(NamedTuple):
    """The slots of a layer in which keys and values lie in full precision, S of all rows and heads together.

    Attributes:
        shape: Their dimensions: rows, heads and slots, or rows, pages and slots of a page.
        heads: The KV head of each, [S] int64.
        positions: The position of its token, [S] int64; -1 for none.
        coded: Whether KVTC encodes it, [S] bool.
        kept: Whether it is stored as it is, [S] bool. A slot that is neither is empty.
        paged: Whether each head has a budget.
    """

    shape: tuple[int, int, int]
    heads: Tensor
    positions: Tensor
    coded: Tensor
    kept: Tensor
    paged: bool

    def of_rows(self) -> Tensor:
        """`coded` by row, slot and head, [B, E, H]; not of pages."""
        return self.coded.view(self.shape).transpose(1, 2)


def find_slots(
    layer: Mapping[str, Any], tensors: Mapping[str, Tensor], sinks: int, window: int, what: str
) -> Slots | None:
    """The slots of a layer in full precision.

    Args:
        layer: What the header says of the layer.
        tensors: The tensors of the layer by name.
        sinks: The first tokens of a row that are stored as they are.
        window: The newest tokens of a row that are.
        what: The name of the file, for messages.

    Returns:
        None for a layer that has a budget for each head and a codec: its buffers hold the newest tokens only.

    Raises:
        KVPolicyError: If the tensors are not those of a layer.
    """
    owner = tensors.get("owner")
    if owner is not None and any(name.startswith("codes.") for name in tensors):
        return None
    rows, heads, _ = layer["shape"]
    buffer: int = layer["layout"][0]
    positions = _tensor(tensors, "positions", torch.int32, 3, what)
    length = _tensor(tensors, "length", torch.int64, 1, what)
    if len(positions) != rows or len(length) != rows:
        raise damaged(f"{rows} rows, got others", what)
    if owner is None:
        if positions.shape[1] != heads or positions.shape[2] < buffer:
            raise damaged(f"slots of {heads} heads, got {list(positions.shape)}", what)
        positions = positions[..., :buffer]
        head = torch.arange(heads, device=positions.device)[None, :, None]
    else:
        if owner.shape != positions.shape[:2] or owner.dtype != torch.int64:
            raise damaged(f"an owner of each page, got {list(owner.shape)}", what)
        positions = torch.where((owner < heads)[..., None], positions, -1)
        head = owner[..., None]
    at = positions.long()
    coded = (at >= sinks) & (at < length[:, None, None] - window)
    # Codes may refer to a slot of a dictionary whose own token was evicted, and do so exactly.
    fixed = torch.arange(positions.shape[2], device=at.device) < (0 if owner is not None else layer["reserved"])
    coded = coded & ~fixed
    kept = ((at >= 0) | fixed) & ~coded
    shape = positions.shape[0], positions.shape[1], positions.shape[2]
    flat = (head.expand(shape).reshape(-1), at.reshape(-1), coded.reshape(-1), kept.reshape(-1))
    return Slots(shape, *flat, paged=owner is not None)


def share_tokens(layers: Sequence[Slots | None]) -> bool:
    """Whether all heads of some layers hold the same tokens in the same slots, so that these are encoded together."""
    first = layers[0]
    if first is None or first.paged:
        return False
    for own in layers:
        if own is None or own.paged or own.shape != first.shape:
            return False
        for each, other in ((own.positions, first.positions), (own.coded, first.coded)):
            by_head = each.view(own.shape)
            if not torch.equal(by_head, other.view(own.shape)[:, :1].expand_as(by_head)):
                return False
    return True


def damaged(must: str, what: str) -> KVPolicyError:
    """The error for a file whose tensors do not belong together."""
    return KVPolicyError(f"The content of the cache file {what!r} must have {must}; save the cache again.")


def _tensor(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, dims: int, what: str) -> Tensor:
    found = tensors.get(name)
    if found is None or found.dtype != dtype or found.dim() != dims:
        got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
        raise damaged(f"{name} of a layer as {dtype} of {dims} dimension(s), got {got}", what)
    return found

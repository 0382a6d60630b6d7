"""What codecs share: the ordinary layout, writing and reading slots, and attention on a chunk of slots at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicy.kernels.products import products
from kvpolicy.protocols import At, Layout, RotaryView, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError

CHUNK, CHUNKS = 1024, 16
"""Attention on codes decodes at least so many slots at a time, and does so at most so many times: few enough for a
compiled step to unroll, and a small part of what a dense copy would take."""


def ordinary_layout(traits: Traits, tokens: int) -> Layout:
    """Room for pinned tokens, the residual and one block exact, and for all else coded, in one stage.

    Args:
        traits: Of the codec.
        tokens: The most tokens of a row.
    """
    exact = traits.pinned + traits.residual + traits.block
    if tokens < exact:  # too few to ever fill a block
        return Layout(tokens)
    frozen = traits.pins == "newest"  # such slots hold nothing else, even when their tokens are evicted
    coded = tokens - traits.residual - (0 if frozen else traits.pinned)
    return Layout(exact, (-(-coded // traits.group_size) * traits.group_size,))


def check_least(codec: object, **fields: tuple[int, int]) -> None:
    """Raise KVPolicyError where a field of a codec is below its least; each field has its least and an example."""
    for field, (least, example) in fields.items():
        if getattr(codec, field) < least:
            raise KVPolicyError(
                f"{type(codec).__name__}'s {field} is {getattr(codec, field)}: give at least {least}, "
                f"such as {example}."
            )


def is_fresh(write_mask: Tensor, occupied: Tensor) -> Tensor:
    """Heads that hold nothing and are given something, [B, H, 1, 1] bool: there a sequence's parameters are fitted."""
    return (write_mask.any(-1) & ~occupied.any(-1))[..., None, None]


def put(target: Tensor, data: Tensor, slots: Tensor, write_mask: Tensor) -> None:
    """Write tokens into slots, in place, and leave those alone that are not write_mask.

    Args:
        target: [B, H, C, ...], what is written to.
        data: [B, H, n, ...], in the dtype of `target`.
        slots: [B, H, n] int64, where each token goes.
        write_mask: [B, H, n] bool, whether it is written.

    A scatter cannot skip a token, and an inactive one may point to a slot that is in use. So an inactive token
    repeats the write of its head's first write_mask one; in a head without any, all rewrite what is there.
    """
    if not data.shape[2]:
        return
    first = write_mask.int().argmax(-1, keepdim=True)
    token = torch.where(write_mask, torch.arange(write_mask.shape[-1], device=write_mask.device), first)
    data = take(data, token)
    index = _widen(slots.gather(-1, token), data)
    some = _widen(write_mask.any(-1, keepdim=True).expand_as(token), data)
    target.scatter_(2, index, torch.where(some, data, target.gather(2, index)))


def take(t: Tensor, at: At) -> Tensor:
    """Read slots.

    Args:
        t: [B, H, C, ...].
        at: A range of slots, or each head's own, [B, H, n] int64.

    Returns:
        [B, H, n, ...].
    """
    if isinstance(at, slice):
        return t[:, :, at]
    index = at.reshape(*at.shape, *[1] * (t.dim() - 3))
    return t.gather(2, index.expand(*at.shape, *t.shape[3:]))


def coarse(at: At, size: int) -> At:
    """The groups of `size` slots that slots belong to: a range of groups, or for each slot its group."""
    if isinstance(at, slice):
        return slice(at.start // size, -(-at.stop // size))
    return at.div(size, rounding_mode="floor")


def chunks(slots: int, group_size: int = 1) -> list[slice]:
    """Ranges of slots that together are all of them."""
    size = -(-max(CHUNK, -(-slots // CHUNKS)) // group_size) * group_size
    return [slice(start, min(start + size, slots)) for start in range(0, slots, size)]


def score_by_chunks(
    keys: Callable[[StageStore, At], Tensor],
    store: StageStore,
    queries: Tensor,
    rope: RotaryView | None,
    slots: int,
    group_size: int = 1,
) -> Tensor:
    """Multiply queries with the keys of all slots, of which one chunk at a time is decoded.

    Args:
        keys: Reads keys of some slots back, [B, H, n, D].
        store: What it reads from.
        queries: [B, H, G, D].
        rope: The rotary embedding, where keys are coded without it; else None.
        slots: How many slots there are, C.
        group_size: How many slots share parameters; a chunk is a multiple of it.

    Returns:
        [B, H, G, C] fp32.
    """
    scores: list[Tensor] = []
    for at in chunks(slots, group_size):
        some = keys(store, at)
        some = some if rope is None else rope.keys(some, at)
        scores.append(products(queries, some.to(queries.dtype)))
    return scores[0] if len(scores) == 1 else torch.cat(scores, -1)


def mix_by_chunks(
    values: Callable[[StageStore, At], Tensor], store: StageStore, weights: Tensor, group_size: int = 1
) -> Tensor:
    """Weight the values of all slots and sum them; one chunk at a time is decoded.

    Args:
        values: Reads values of some slots back, [B, H, n, D].
        store: What it reads from.
        weights: The weights, [B, H, G, C].
        group_size: How many slots share parameters; a chunk is a multiple of it.

    Returns:
        [B, H, G, D] fp32.
    """
    parts = [weights[..., at] @ values(store, at).to(weights.dtype) for at in chunks(weights.shape[-1], group_size)]
    return sum(parts[1:], parts[0]).float()


def _widen(index: Tensor, like: Tensor) -> Tensor:
    return index.reshape(*index.shape, *[1] * (like.dim() - 3)).expand(*index.shape, *like.shape[3:])

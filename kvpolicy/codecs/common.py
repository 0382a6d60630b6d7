"""Helpers shared by codecs: the ordinary layout, access to slots, and attention over encoded slots in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.kernels.fused_read import whole_blocks
from kvpolicy.kernels.products import matmul, products
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.kernels.slot_writes import put as put
from kvpolicy.protocols import At, Codec, Layout, RotaryView, Stage, StageStore, Traits, traits_for

CHUNK_SLOTS = 1024
"""Attention decodes at least this many slots at a time: a small part of what a dense copy would take."""

ENCODED_AT_ONCE = 4096
"""Tokens of a head that a codec encodes at a time, if it does so in ranges: what passes through fp32 stays small."""

MAX_CHUNKS = 16
"""The maximum number of chunks: few enough for a compiled step to unroll the loop."""


def ordinary_layout(traits: Traits, tokens: int) -> Layout:
    """The layout of a codec with one stage.

    The full-precision buffer has slots for the pinned tokens, the residual and one block; everything else is encoded.

    Args:
        traits: The traits of the codec.
        tokens: The maximum number of tokens of a row.
    """
    exact = traits.pinned + traits.residual + traits.block
    if tokens < exact:  # too few tokens to ever fill a block
        return Layout(tokens)
    # Dictionary slots hold no other token, even after theirs was evicted, so all other tokens need coded slots.
    has_dictionary_slots = traits.pins == "newest"
    # A demotion empties the slots of the block, so they do not reduce the number of coded slots.
    coded = tokens - traits.residual - (0 if has_dictionary_slots else traits.pinned)
    return Layout(exact, (-(-coded // traits.group_size) * traits.group_size,))


class SingleStage(Codec, Stage, Protocol):
    """A codec of one stage, which is the codec itself.

    A subclass has `traits` (and `traits_for` if they depend on the tokens of a row), `alloc`, `write`, `keys`,
    `values`, `score` and `mix`.
    """

    __slots__ = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The codec itself."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Full-precision slots for pinned tokens, the residual and one block; everything else is encoded."""
        return ordinary_layout(traits_for(self, tokens), tokens)


@runtime_checkable
class TwoSides(SingleStage, Protocol):
    """A codec of one stage whose keys and values are encoded apart, so that another codec can wrap it.

    The wrapper may give it keys of fewer channels than values. So the fields of its codes with `value` in their name
    belong to values and all others to keys, and what reads or writes one side uses tensors of the other side for their
    widths only. It has no calibrated tensors. A subclass has `write_keys` and `write_values` instead of `write`.
    """

    __slots__ = ()

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        self.write_keys(store, keys, slots, write_mask, occupied)
        self.write_values(store, values, slots, write_mask, occupied)

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        """Encode the keys of tokens; see `Stage.write`."""
        ...

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode the values of tokens; see `Stage.write`."""
        ...


def is_empty_head(write_mask: Tensor, occupied: Tensor) -> Tensor:
    """Heads without an occupied slot that are given a token, [B, H, 1, 1] bool.

    In these heads, parameters per sequence are fitted again.
    """
    return (write_mask.any(-1) & ~occupied.any(-1))[..., None, None]


def token_ranges(tokens: int) -> list[slice]:
    """Ranges of tokens, in order, each of which is encoded at once."""
    return [slice(start, min(start + ENCODED_AT_ONCE, tokens)) for start in range(0, tokens, ENCODED_AT_ONCE)]


def sum_tokens(x: Tensor, write_mask: Tensor, term: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum a term of each token that is written, [B, H, 1, D] fp64.

    Args:
        x: [B, H, n, D].
        write_mask: Which of the n tokens are written, [B, H, n] bool.
        term: Of tokens [B, H, m, D] fp32, a term of the same shape.
    """
    # In fp64, so that the order of the sum does not matter: a row must have the same codes with more padding.
    sums = [
        term(x[:, :, at].float()).masked_fill(~write_mask[:, :, at, None], 0).sum(2, keepdim=True, dtype=torch.float64)
        for at in token_ranges(x.shape[2])
    ]
    return sum(sums[1:], sums[0])


def take(t: Tensor, at: At) -> Tensor:
    """Read slots.

    Args:
        t: [B, H, C, ...].
        at: A range of slots, or slots per head, [B, H, n] int64.

    Returns:
        [B, H, n, ...].
    """
    if isinstance(at, slice):
        return t[:, :, at]
    return gather_slots(t, at)


def to_groups(at: At, size: int) -> At:
    """The groups of `size` slots that slots belong to: a range of groups, or the group of each slot."""
    if isinstance(at, slice):
        return slice(at.start // size, -(-at.stop // size))
    return at.div(size, rounding_mode="floor")


def chunks(slots: int, group_size: int = 1, each: int = 0) -> list[slice]:
    """Ranges that cover all slots in order, at most `MAX_CHUNKS` of them.

    Args:
        slots: The number of slots, which is a symbol in a compiled step; or of pages.
        group_size: What the slots of a range are a multiple of.
        each: Slots of a range, unless there would be too many ranges; `CHUNK_SLOTS` if 0.
    """
    # Compared and not computed with `max` and `min`, and not `range(0, slots, size)`: a compiled step fixes only the
    # number of ranges, and expressions of a symbol take long to simplify.
    each = each or CHUNK_SLOTS
    if slots > each * MAX_CHUNKS:
        each = -(-slots // MAX_CHUNKS)
    size = -(-each // group_size) * group_size
    number = -(-slots // size)
    whole = [slice(index * size, index * size + size) for index in range(number - 1)]
    return [*whole, slice((number - 1) * size, slots)] if number > 0 else []


def score_by_chunks(
    keys: Callable[[StageStore, At], Tensor],
    store: StageStore,
    queries: Tensor,
    rope: RotaryView | None,
    slots: int,
    group_size: int = 1,
) -> Tensor:
    """Multiply queries with the keys of all slots, decoding one chunk of slots at a time.

    Args:
        keys: Decodes the keys of some slots, [B, H, n, D].
        store: The store that `keys` reads from.
        queries: [B, H, G, D].
        rope: The rotary embedding if the decoded keys are unrotated, else None.
        slots: The number of slots, C.
        group_size: Slots that share parameters; a chunk is a multiple of it.

    Returns:
        [B, H, G, C] fp32.
    """
    scores: list[Tensor] = []
    for at in chunks(slots, group_size):
        decoded = keys(store, at)
        rotated = decoded if rope is None else rope.keys(decoded, at)
        scores.append(products(queries, rotated.to(queries.dtype)))
    return scores[0] if len(scores) == 1 else torch.cat(scores, -1)


def mix_by_chunks(
    values: Callable[[StageStore, At], Tensor], store: StageStore, weights: Tensor, group_size: int = 1
) -> Tensor:
    """Compute the weighted sum of the values of all slots, decoding one chunk of slots at a time.

    Args:
        values: Decodes the values of some slots, [B, H, n, D].
        store: The store that `values` reads from.
        weights: Attention weights, [B, H, G, C].
        group_size: Slots that share parameters; a chunk is a multiple of it.

    Returns:
        [B, H, G, D] fp32.
    """
    ranges = chunks(weights.shape[-1], group_size)
    # Added in fp32: in half precision, chunks of little weight would be lost beside one of much weight.
    sums = [matmul(weights[..., at], values(store, at).to(weights.dtype)).float() for at in ranges]
    return sum(sums[1:], sums[0])


def add_rest(mixed: Tensor, values: Callable[[slice], Tensor], weights: Tensor) -> Tensor:
    """The weighted sum of all values, of which those behind the last whole block of slots are few and decoded.

    Args:
        mixed: The weighted sum of the values in whole blocks, [B, H, G, D] fp32.
        values: Decodes the values of a range of slots, [B, H, n, D].
        weights: Attention weights of all slots, [B, H, G, C].

    Returns:
        [B, H, G, D] fp32.
    """
    slots = weights.shape[-1]
    whole = whole_blocks(weights, 3)
    if whole == slots:
        return mixed
    return mixed + matmul(weights[..., whole:], values(slice(whole, slots)).to(weights.dtype)).float()

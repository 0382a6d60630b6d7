"""The size of a codec's full-precision buffer where a policy leaves it open."""

from __future__ import annotations

from typing import NamedTuple

from kvpolicy.text.validation import AutoInt

TOKENS_PER_SLOT = 32
"""An automatic buffer has one slot for every 32 tokens, so that it takes a small part of the bytes of any budget."""


class BufferSizes(NamedTuple):
    """Sizes of a full-precision buffer, in tokens.

    Attributes:
        residual: The newest tokens that always stay in full precision.
        block: Tokens that are demoted at a time, at least 1.
    """

    residual: int
    block: int


def buffer_sizes(
    tokens: int | None,
    *,
    residual: AutoInt,
    block: AutoInt,
    largest_residual: int = 32,
    largest_block: int = 32,
    tokens_per_slot: int = TOKENS_PER_SLOT,
) -> BufferSizes:
    """Sizes for rows of `tokens` tokens, where those that are not `auto` stay.

    One slot for every 32 tokens becomes the block first, since a larger block is demoted less often, and what is left
    becomes the residual. A block that is given, such as a group of tokens, leaves all of them to the residual.

    Args:
        tokens: The most tokens of a row; None for the largest sizes.
        residual: The parameter of the codec.
        block: The parameter of the codec.
        largest_residual: The largest automatic residual.
        largest_block: The largest automatic block.
        tokens_per_slot: Tokens of the row for each slot of the buffer.

    Examples:
        >>> buffer_sizes(500, residual="auto", block="auto")
        BufferSizes(residual=0, block=15)
        >>> buffer_sizes(5000, residual="auto", block="auto")
        BufferSizes(residual=32, block=32)
        >>> buffer_sizes(500, residual="auto", block=64)
        BufferSizes(residual=15, block=64)
    """
    left = largest_residual + largest_block if tokens is None else tokens // tokens_per_slot
    if block == "auto":
        block = min(max(left, 1), largest_block)
        left -= block
    if residual == "auto":
        residual = min(max(left, 0), largest_residual)
    return BufferSizes(residual, block)

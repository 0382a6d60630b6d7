"""Sizes of the pages in which a layer stores its tokens if its heads have budgets of their own."""

from __future__ import annotations

SMALLEST_PAGE = 4
LARGEST_PAGE = 64
PAGES_PER_HEAD = 8
"""Pages that a head should have on average, so that its budget can come close to what the allocator wants."""


def page_size(tokens: int) -> int:
    """Slots of a page in a row with `tokens` tokens in an average head.

    Examples:
        >>> [page_size(tokens) for tokens in (3, 40, 100, 500, 10_000)]
        [4, 4, 8, 32, 64]
    """
    size = LARGEST_PAGE
    while size > SMALLEST_PAGE and tokens // size < PAGES_PER_HEAD:
        size //= 2
    return size


def fewest_tokens(tokens: int) -> int:
    """The smallest budget of a layer that gives an average head at least `tokens` tokens in whole pages.

    Examples:
        >>> [fewest_tokens(tokens) for tokens in (1, 5, 65)]
        [4, 8, 72]
    """
    while tokens % page_size(tokens):
        tokens += 1
    return max(tokens, SMALLEST_PAGE)

"""How a layer's pages are divided among its heads, for one row: each head allocator stands in the file of its name.

A file has `wishes`, which takes the allocator's parameters, what the tokens of each head are worth, in the order of
their positions, and the tokens of the layer; it returns the tokens that each head should have. Or it has `pages`, which
takes the parameters, how many tokens of a head are always kept, the pages of the layer, the size of a page, and the
most pages of a head, and returns the pages of each head.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from ..allocators import waterfill
from ..coding import Config
from ..versions import version


class Room(NamedTuple):
    """What a row may hold: pages of `size` tokens, and `average` tokens in an average head."""

    size: int
    pages: int
    average: int
    most: int


def page_size(tokens: int) -> int:
    """The largest page of 4 to 64 slots of which a head has eight or more."""
    return max([4, *(size for size in (4, 8, 16, 32, 64) if size * 8 <= tokens)])


def room(keep: int, last: int, heads: int) -> Room:
    """The pages of a row of which `keep` of at most `last` tokens are kept in an average head."""
    size = page_size(min(keep, last))
    pages = heads * math.ceil(last / size) if keep >= last else keep * heads // size
    average = pages // heads * size
    return Room(size, pages, average, max(math.ceil(last / size), pages // heads))


def divide(name: str, config: Config, worths: list[list[float]], given: Room) -> list[int]:
    """Pages of each head."""
    heads = len(worths)
    protected = max(sum(worth == math.inf for worth in head) for head in worths)
    slow = version("head_allocator", name)
    if hasattr(slow, "pages"):
        return slow.pages(config, protected, given.pages, given.size, given.most)
    wished = slow.wishes(config, worths, given.pages * given.size)
    if name == "even":
        protected = 0
    floor = min(max(1, math.ceil(protected / given.size)), given.pages // heads)
    ceiling = max(given.most, math.ceil(given.pages / heads))
    whole = sum(wished) or 1
    return waterfill([Fraction(given.pages * wish, whole) for wish in wished], given.pages, floor, ceiling)

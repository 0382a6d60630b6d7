"""Which attention heads, rows and columns a rank holds."""

from __future__ import annotations

from typing import NamedTuple


def even(total: int, rank: int, size: int) -> range:
    """A rank's shard of `total` items; the first ranks hold one more where `size` does not divide `total`.

    Examples:
        >>> [even(5, rank, 2) for rank in range(2)]
        [range(0, 3), range(3, 5)]
    """
    each, more = divmod(total, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def aligned(total: int, rank: int, size: int) -> range:
    """A rank's shard of an expert's intermediate size, in multiples of 8 or 4.

    Grouped matrix products require rows that are aligned to 16 bytes.
    """
    unit = next((unit for unit in (8, 4) if total % unit == 0 and total // unit >= size), 1)
    units = even(total // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


class Heads(NamedTuple):
    """A model's attention heads, and which of them one rank holds.

    Attributes:
        all_queries: Query heads of the model.
        all_keys: KV heads of the model.
        dim: Head dimension.
        queries: The query heads of this rank.
        keys: The KV heads of this rank.
        replicas: How many ranks hold each KV head.
    """

    all_queries: int
    all_keys: int
    dim: int
    queries: range
    keys: range
    replicas: int

    @classmethod
    def shard(cls, queries: int, keys: int, dim: int, *, rank: int, size: int) -> Heads:
        """Shard a model's heads: every KV head stays with its query heads.

        A model with fewer KV heads than ranks has each of them replicated on several ranks.

        Args:
            queries: Query heads of the model.
            keys: KV heads of the model.
            dim: Head dimension.
            rank: Which rank.
            size: The tensor parallel size.

        Examples:
            >>> Heads.shard(8, 2, 64, rank=1, size=2)[3:]
            (range(4, 8), range(1, 2), 1)
            >>> Heads.shard(8, 2, 64, rank=1, size=4)[3:]
            (range(2, 4), range(0, 1), 2)
        """
        if keys < size and size % keys == 0 and queries % size == 0:
            replicas = size // keys
            first = rank // replicas
            return cls(queries, keys, dim, even(queries, rank, size), range(first, first + 1), replicas)
        # A KV head is never split: with fewer heads than ranks that do not replicate evenly, some ranks hold none.
        own = even(keys, rank, size)
        group = queries // keys
        return cls(queries, keys, dim, range(own.start * group, own.stop * group), own, 1)

    @property
    def group(self) -> int:
        """Query heads per KV head, in the whole model."""
        return self.all_queries // self.all_keys

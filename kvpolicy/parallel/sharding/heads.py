"""Which heads, rows and columns a rank holds."""

from __future__ import annotations

from typing import Any, NamedTuple


def even(total: int, rank: int, size: int) -> range:
    """A rank's part of `total` things, the first ranks having one more where they do not divide."""
    each, more = divmod(total, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def aligned(total: int, rank: int, size: int) -> range:
    """A rank's part of an expert's inner size, in units of 8 or 4: a grouped product wants rows of 16 bytes."""
    unit = next((unit for unit in (8, 4) if total % unit == 0 and total // unit >= size), 1)
    units = even(total // unit, rank, size)
    return range(units.start * unit, units.stop * unit)


class Heads(NamedTuple):
    """A model's attention heads, and which of them one rank holds.

    Attributes:
        all_queries: Query heads of the model.
        all_keys: KV heads of the model.
        dim: Size of a head.
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
    def of(cls, config: Any, rank: int, size: int) -> Heads:
        """Divide a model's heads: each KV head goes with its queries, or to several ranks where there are fewer."""
        from kvpolicy.hf.model_spec import describe

        shape = describe(config).shape
        queries, keys = int(config.num_attention_heads), shape.heads
        if keys < size and size % keys == 0 and queries % size == 0:
            replicas = size // keys
            first = rank // replicas
            return cls(queries, keys, shape.head_dim, even(queries, rank, size), range(first, first + 1), replicas)
        own, group = even(keys, rank, size), queries // keys
        return cls(queries, keys, shape.head_dim, range(own.start * group, own.stop * group), own, 1)

    @property
    def group(self) -> int:
        """Query heads of each KV head, in the whole model."""
        return self.all_queries // self.all_keys

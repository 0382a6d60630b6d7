"""The weights of one rank, in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Bytes of weights on the rank that holds the most; `kvpolicy.weights_per_rank` counts them.

    Attributes:
        backend: Backend that shards the model, `deepspeed` or `hf`.
        tp: The tensor parallel size.
        replicated: Bytes of parameters that every rank holds whole.
        sharded: Bytes of this rank's shards.

    Examples:
        >>> Weights(backend="hf", tp=2, replicated=640, sharded=4177920).nbytes
        4178560
    """

    backend: str
    tp: int
    replicated: int
    sharded: int

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.replicated + self.sharded

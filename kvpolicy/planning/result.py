"""What a plan says: tokens and bytes of each layer, of the whole cache, and of the weights beside it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.hf.weights import Weights
from kvpolicy.policy import Policy
from kvpolicy.protocols import Layout
from kvpolicy.reporting import rich_repr as notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer of a plan.

    Attributes:
        layer_idx: Which layer of the model.
        tokens: The most tokens of any row.
        layout: Its slots.
        nbytes: Bytes by kind: exact, codes, scales, positions, statistics, counters.
    """

    layer_idx: int
    tokens: int
    layout: Layout
    nbytes: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """Tokens and bytes of a cache, per rank.

    Attributes:
        policy: Whose plan it is.
        batch: Rows.
        layers: The layers under the policy.
        left_alone: Bytes of layers that the policy leaves as they are (sliding windows), by layer.
        full_nbytes: Bytes of the stock cache beside it.
        measured: False where the allocator has yet to measure a prompt, so that layers are shown alike.
        note: What was decided otherwise than the policy may lead to expect, or nothing.
        resident_nbytes: Bytes of calibrated tensors that belong to the model: in no budget, and not in `nbytes`.
        tp: Ranks of tensor parallelism; all bytes are those of the fullest rank.
        weights: The model's weights on that rank, where the plan was asked to count them.
    """

    policy: Policy
    batch: int
    layers: tuple[LayerPlan, ...]
    left_alone: dict[int, int]
    full_nbytes: int
    measured: bool
    note: str = ""
    resident_nbytes: int = 0
    tp: int = 1
    weights: Weights | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Bytes of the whole cache by kind."""
        kinds: dict[str, int] = {}
        for layer in self.layers:
            for kind, size in layer.nbytes.items():
                kinds[kind] = kinds.get(kind, 0) + size
        return kinds | ({"left alone": sum(self.left_alone.values())} if self.left_alone else {})

    def largest_batch(self, memory: int) -> int:
        """The most rows like these whose cache fits into `memory` bytes of a rank.

        Where the plan has counted weights, they and the calibrated tensors take their place first. Activations, and a
        prompt's own cache before it is compressed, are not counted. Under a budget in bytes, rows are one row's.
        """
        beside = self.weights.nbytes + self.resident_nbytes if self.weights else 0
        return _rows(memory - beside, self.nbytes, self.batch)

    def full_largest_batch(self, memory: int) -> int:
        """The same for the stock cache, which keeps everything."""
        return _rows(memory - (self.weights.nbytes if self.weights else 0), self.full_nbytes, self.batch)

    def __repr__(self) -> str:
        """One line: policy, layers and bytes."""
        return notebook.sizes_words(self)

    def _repr_html_(self) -> str:
        return notebook.plan_html(self)

    def __str__(self) -> str:
        """A table of tokens and bytes per layer."""
        lines = [f"{self.policy}: {self.nbytes:,} bytes, the full cache {self.full_nbytes:,}"]
        for layer in self.layers:
            kinds = ", ".join(f"{kind} {size:,}" for kind, size in layer.nbytes.items() if size)
            lines.append(f"layer {layer.layer_idx}: {layer.tokens} tokens: {kinds}")
        lines += [f"layer {index}: left alone, {size:,} bytes" for index, size in self.left_alone.items()]
        if not self.measured:
            lines.append(notebook.NOT_MEASURED)
        if self.resident_nbytes:
            lines.append(f"beside the cache, calibrated and the model's own: {self.resident_nbytes:,} bytes")
        if self.weights:
            lines.append(
                f"weights on each of {self.tp} rank(s) by {self.weights.backend}: {self.weights.nbytes:,} bytes"
            )
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def _rows(memory: int, nbytes: int, batch: int) -> int:
    """How many rows fit where `batch` of them take `nbytes`."""
    return max(memory, 0) * batch // nbytes

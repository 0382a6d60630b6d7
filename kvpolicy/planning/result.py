"""What a plan says: tokens and bytes of each layer, of the whole cache, and of the weights beside it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from kvpolicy.parallel.weights import Weights
from kvpolicy.policy import Policy
from kvpolicy.protocols import Layout
from kvpolicy.spec.tables import byte_cells, count, format_bytes, layer_table, resident_note, section, size_summary

NOT_MEASURED = (
    "layers are shown alike: the allocator measures them in the prompt; a row's tokens add up to the same, but bytes "
    "may differ with a codec, and be more with several rows, since a layer has slots for the row with the most"
)
"""The note of a plan whose allocator has yet to measure."""


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
        layers = count(len(self.layers), "layer")
        return f"CachePlan({self.policy}, {layers}, {size_summary(self.nbytes, self.full_nbytes)})"

    def _repr_html_(self) -> str:
        return plan_html(self)

    def __str__(self) -> str:
        """A table of tokens and bytes per layer."""
        lines = [f"{self.policy}: {self.nbytes:,} bytes, the full cache {self.full_nbytes:,}"]
        for layer in self.layers:
            kinds = ", ".join(f"{kind} {size:,}" for kind, size in layer.nbytes.items() if size)
            lines.append(f"layer {layer.layer_idx}: {layer.tokens} tokens: {kinds}")
        lines += [f"layer {index}: left alone, {size:,} bytes" for index, size in self.left_alone.items()]
        if not self.measured:
            lines.append(NOT_MEASURED)
        if self.resident_nbytes:
            lines.append(resident_note(f"{self.resident_nbytes:,} bytes"))
        if self.weights:
            lines.append(
                f"weights on each of {self.tp} rank(s) by {self.weights.backend}: {self.weights.nbytes:,} bytes"
            )
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def plan_html(plan: CachePlan) -> str:
    """An HTML table of a plan by layer: tokens, bytes by kind, and their share of the full cache's."""
    by_kind = plan.by_kind()
    kinds = [kind for kind, size in by_kind.items() if size]
    full = (plan.full_nbytes - sum(plan.left_alone.values())) // max(1, len(plan.layers))
    rows = [(layer.layer_idx, (f"{layer.tokens:,}", *byte_cells(layer.nbytes, kinds, full))) for layer in plan.layers]
    for index, size in plan.left_alone.items():
        rows.append((index, ("left alone", *byte_cells({"left alone": size}, kinds, 0))))
    head = ("layer", "budget", *kinds, "total", "of full")
    last = ("all", "", *byte_cells(by_kind, kinds, plan.full_nbytes))
    notes = [] if plan.measured else [NOT_MEASURED]
    if plan.resident_nbytes:
        notes.append(resident_note(format_bytes(plan.resident_nbytes)))
    if plan.note:
        notes.append(escape(plan.note))
    title = f"<code>{escape(str(plan.policy))}</code>, {count(plan.batch, 'row')}: "
    title += size_summary(plan.nbytes, plan.full_nbytes)
    if plan.tp > 1:
        title += f" on each of {plan.tp} ranks"
    return section(title, layer_table(head, sorted(rows), last), *notes)


def _rows(memory: int, nbytes: int, batch: int) -> int:
    """How many rows fit where `batch` of them take `nbytes`."""
    return max(memory, 0) * batch // nbytes

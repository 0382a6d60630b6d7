"""A plan: tokens and bytes of each layer and of the whole cache, and optionally the weights of the model.

Plans become plain data for files, and are made of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from kvpolicy.engine.pages import Pages
from kvpolicy.engine.state import HOST
from kvpolicy.parallel.runtime import Weights
from kvpolicy.planning.activations import Prefill
from kvpolicy.planning.tokens import largest
from kvpolicy.policy import Policy
from kvpolicy.protocols import Layout
from kvpolicy.text import tables
from kvpolicy.text.budget import bytes_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import MAX_BYTES
from kvpolicy.text.validation import check_size

NOT_MEASURED = (
    "layers are shown with equal budgets, since the allocator measures them in the prompt; a row's tokens add up to "
    "the same number, but bytes may differ with a codec or several rows, since a layer has slots for the row that "
    "keeps the most"
)
"""The note of a plan before the allocator has measured a prompt."""

SHARED = "shared prefix"
"""The kind of the bytes of slots that rows share, which a cache counts once."""

READ_KINDS = ("exact", HOST, "codes", "scales", "positions")
"""The kinds of bytes that a decode step reads where it reads everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One layer of a plan.

    Attributes:
        layer_idx: Index of the layer in the model.
        tokens: The most tokens of any row.
        layout: Its slots.
        nbytes: Bytes by kind: exact, codes, scales, positions, statistics, index, counters, counts, host.
        moved: Bytes that a decode step reads of the layer, once all its slots are in use.
        loaded: Those of them that it copies from host memory.
        stored: Bytes that it copies to host memory.
        pages: Its pages, if its heads have budgets of their own.
    """

    layer_idx: int
    tokens: int
    layout: Layout
    nbytes: dict[str, int]
    moved: int = 0
    loaded: int = 0
    stored: int = 0
    pages: Pages | None = None

    @property
    def all_moved(self) -> int:
        """Bytes that a decode step would read of the layer if it read everything that is kept."""
        return sum(self.nbytes.get(kind, 0) for kind in READ_KINDS)

    @property
    def device_nbytes(self) -> int:
        """Bytes that are not in host memory."""
        return device_bytes(self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """Tokens and bytes of a cache, per rank.

    Attributes:
        policy: The policy.
        batch: Number of rows.
        layers: The layers under the policy.
        unmanaged: Bytes that no policy manages, of sliding windows and of states, by layer.
        full_nbytes: Bytes of the stock cache for the same tokens.
        measured: False if the allocator has not measured a prompt yet, so that all layers have the same budget.
        note: Where the effective behavior differs from the spec; empty if it does not.
        resident_nbytes: Bytes of calibration tensors, which belong to the model: they count in no budget, and not in
            `nbytes`.
        tp: The tensor parallel size; all bytes are those of the rank that holds the most.
        weights: The weights of the model on that rank, if they were counted.
        peak_nbytes: The most bytes of keys and values, and of what the cache holds besides, while the prompt is
            prefilled: those of the whole prompt in all layers if these wait for a measurement or a replay, else in one.
        prefill: Sizes that determine the activations of the prefill; None if they are unknown, and count as nothing.
        full_peak_nbytes: Bytes of the stock cache at the end of the prefill.
    """

    policy: Policy
    batch: int
    layers: tuple[LayerPlan, ...]
    unmanaged: dict[int, int]
    full_nbytes: int
    measured: bool
    note: str = ""
    resident_nbytes: int = 0
    tp: int = 1
    weights: Weights | None = None
    peak_nbytes: int = 0
    prefill: Prefill | None = None
    full_peak_nbytes: int = 0

    @property
    def activation_nbytes(self) -> int:
        """The most bytes that a forward of the prefill holds besides weights and cache: its largest activations."""
        return 0 if self.prefill is None else self.prefill.activation_bytes(self.batch)

    @property
    def prefill_nbytes(self) -> int:
        """The most bytes in use while the prompt is prefilled: weights, if counted, the cache, and activations."""
        return self._needed(self.batch, prefill=True)

    @property
    def full_prefill_nbytes(self) -> int:
        """The same with the stock cache, which keeps every token."""
        return self._full_needed(self.batch, prefill=True)

    @property
    def moved(self) -> int:
        """Bytes that a decode step reads of the layers under the policy."""
        return sum(layer.moved for layer in self.layers)

    @property
    def loaded(self) -> int:
        """Bytes of `moved` that a decode step copies from host memory."""
        return sum(layer.loaded for layer in self.layers)

    @property
    def stored(self) -> int:
        """Bytes that a decode step copies to host memory."""
        return sum(layer.stored for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(self.by_kind().values())

    @property
    def host_nbytes(self) -> int:
        """Bytes of the cache in host memory."""
        return self.by_kind().get(HOST, 0)

    @property
    def device_nbytes(self) -> int:
        """Bytes of the cache on the device, which are those that a budget in bytes bounds."""
        return self.nbytes - self.host_nbytes

    def by_kind(self) -> dict[str, int]:
        """Bytes of the whole cache by kind."""
        kinds: dict[str, int] = {}
        for layer in self.layers:
            for kind, size in layer.nbytes.items():
                kinds[kind] = kinds.get(kind, 0) + size
        return kinds | ({"unmanaged": sum(self.unmanaged.values())} if self.unmanaged else {})

    def largest_batch(self, memory: int | str) -> int:
        """The most rows like these that fit into the memory of a rank, while their prompts are prefilled and after.

        If the plan has counted weights (`plan(..., backend="hf")`), they and the calibration tensors are subtracted
        from the memory first. With a budget in bytes, every row is assumed to take as much as a row of this plan. What
        lies in host memory takes none of it.

        Args:
            memory: Bytes, as a number or as a text such as `24GiB`, without what the context of the device and its
                libraries take, for which the command `plan` leaves 1 GiB.

        Raises:
            KVPolicyError: If it is not an amount of bytes.
        """
        return self._rows(memory, self._needed, self.device_nbytes)

    def full_largest_batch(self, memory: int | str) -> int:
        """The most such rows with the stock cache, which keeps every token."""
        return self._rows(memory, self._full_needed, self.full_nbytes)

    def _rows(self, memory: int | str, needed: Callable[..., int], nbytes: int) -> int:
        memory = _bytes(memory) if isinstance(memory, str) else check_size("memory", memory, 0, MAX_BYTES)
        most = memory * self.batch // max(nbytes, 1)
        return largest(lambda rows: max(needed(rows, prefill=True), needed(rows, prefill=False)) <= memory, 0, most)

    def _needed(self, rows: int, *, prefill: bool) -> int:
        """Bytes in use with so many rows, during the prefill or while they are generated."""
        used = self.weights.nbytes + self.resident_nbytes if self.weights else 0
        if rows == 0:
            return used
        held = self.peak_nbytes if prefill else self.device_nbytes
        if self.prefill is not None:
            used += self.prefill.activation_bytes(rows) if prefill else self.prefill.step_bytes(rows)
        return used + -(-held * rows // self.batch)

    def _full_needed(self, rows: int, *, prefill: bool) -> int:
        """The same with the stock cache."""
        used = self.weights.nbytes if self.weights else 0
        if rows == 0:
            return used
        held = self.full_peak_nbytes if prefill else self.full_nbytes
        if self.prefill is not None:
            used += self.prefill.stock_activation_bytes(rows) if prefill else self.prefill.step_bytes(rows)
        return used + -(-held * rows // self.batch)

    def __repr__(self) -> str:
        """One line: policy, layers and bytes."""
        layers = tables.count(len(self.layers), "layer")
        return f"CachePlan({self.policy}, {layers}, {tables.size_summary(self.nbytes, self.full_nbytes)})"

    def _repr_html_(self) -> str:
        return plan_html(self)

    def __str__(self) -> str:
        """A table of tokens and bytes by layer, in which equal layers share a line, and the notes."""
        head, rows, last = _layers(self, tables.main_kinds(self.by_kind()))
        title = f"{_title(self, str(self.policy))}:"
        managed = {layer.layer_idx: sum(layer.nbytes.values()) for layer in self.layers}
        nbytes = tables.sum_by_kind([managed, self.unmanaged])
        return "\n".join([title, tables.text_layer_table(head, rows, last, nbytes), *_notes(self)])


def device_bytes(kinds: Mapping[str, int]) -> int:
    """The sum of bytes by kind, those in host memory left out."""
    return sum(kinds.values()) - kinds.get(HOST, 0)


def moved_note(moved: int, every: int) -> str:
    """The line of a plan or a report about a reader.

    Args:
        moved: Bytes that a decode step reads.
        every: Bytes that it would read if it read everything that is kept.
    """
    less = tables.format_bytes(moved)
    more = tables.format_bytes(every)
    return f"a decode step moves {less}, and would move {more} if it read everything that is kept"


def host_note(nbytes: int, device: int, loaded: int, stored: int) -> str:
    """The line of a plan or a report about host memory.

    Args:
        nbytes: Bytes in host memory.
        device: Bytes on the device.
        loaded: Bytes that a decode step copies from host memory.
        stored: Bytes that it copies there.
    """
    places = f"{tables.format_bytes(nbytes)} are in host memory and {tables.format_bytes(device)} on the device"
    copied = f"{tables.format_bytes(loaded)} to the device, and {tables.format_bytes(stored)} from it"
    return f"{places}; a decode step copies {copied}"


def plan_html(plan: CachePlan) -> str:
    """An HTML table of a plan by layer: tokens, bytes by kind, and their share of the full cache's."""
    title = _title(plan, f"<code>{escape(str(plan.policy))}</code>")
    kinds = [kind for kind, size in plan.by_kind().items() if size]
    return tables.section(title, tables.layer_table(*_layers(plan, kinds)), *map(escape, _notes(plan)))


def _title(plan: CachePlan, policy: str) -> str:
    title = f"{policy}, {tables.count(plan.batch, 'row')}: {tables.size_summary(plan.nbytes, plan.full_nbytes)}"
    return f"{title} on each of {plan.tp} ranks" if plan.tp > 1 else title


def _layers(plan: CachePlan, kinds: Sequence[str]) -> tuple[tables.Cells, list[tuple[int, tables.Cells]], tables.Cells]:
    """The head, the rows and the last line of the table of layers."""
    by_kind = plan.by_kind()
    full = (plan.full_nbytes - sum(plan.unmanaged.values())) // max(1, len(plan.layers))
    tokens = {layer.layer_idx: f"{layer.tokens:,}" for layer in plan.layers}
    nbytes = {layer.layer_idx: dict(layer.nbytes) for layer in plan.layers}
    for index, size in plan.unmanaged.items():  # a layer may have a state beside its slots
        nbytes[index] = nbytes.get(index, {}) | {"unmanaged": size}
    rows = [
        (
            index,
            (
                tokens.get(index, "unmanaged"),
                *tables.byte_cells(sizes, kinds, _full(full, sizes) if index in tokens else 0),
            ),
        )
        for index, sizes in nbytes.items()
    ]
    head = ("layer", "budget", *kinds, "total", "of full")
    return head, sorted(rows), ("all", "", *tables.byte_cells(by_kind, kinds, plan.full_nbytes))


def _full(attended: int, sizes: Mapping[str, int]) -> int:
    """Bytes of a layer in the stock cache: of its tokens, and of what no policy manages."""
    return attended + sizes.get("unmanaged", 0)


def _notes(plan: CachePlan) -> list[str]:
    """The notes of a plan besides its table, one line each."""
    notes = [] if plan.measured else [NOT_MEASURED]
    if plan.resident_nbytes:
        notes.append(tables.resident_note(tables.format_bytes(plan.resident_nbytes)))
    if plan.weights:
        size = tables.format_bytes(plan.weights.nbytes)
        notes.append(f"weights on each of {tables.count(plan.tp, 'rank')} by {plan.weights.backend}: {size}")
    if plan.policy.replay is not None:
        notes.append(f"the prefill: up to {tables.format_bytes(plan.peak_nbytes)}")
    if plan.policy.reads_part:
        notes.append(moved_note(plan.moved, sum(layer.all_moved for layer in plan.layers)))
    if plan.host_nbytes:
        notes.append(host_note(plan.host_nbytes, plan.device_nbytes, plan.loaded, plan.stored))
    return [*notes, plan.note] if plan.note else notes


def _bytes(text: str) -> int:
    """The bytes of a memory, whose error does not speak of a budget."""
    try:
        return bytes_of(text)
    except KVPolicyError:
        raise KVPolicyError(f"memory must be an amount of bytes, got {text!r}; try '24GiB'.") from None


_SCALARS = ("batch", "full_nbytes", "measured", "note", "resident_nbytes", "tp", "peak_nbytes")


def plan_to_dict(plan: CachePlan) -> dict[str, Any]:
    """A plan as JSON can hold it, without its policy and weights; of its prefill, the length of the prompt."""
    return {
        **{name: getattr(plan, name) for name in _SCALARS},
        "layers": [asdict(layer) | _lists(layer) for layer in plan.layers],
        "unmanaged": {str(index): size for index, size in plan.unmanaged.items()},
        "columns": None if plan.prefill is None else plan.prefill.columns,
        "full_peak_nbytes": plan.full_peak_nbytes,
    }


def plan_from_dict(
    policy: Policy, content: Mapping[str, Any], prefill: Callable[[Policy, Sequence[LayerPlan], int], Prefill]
) -> CachePlan:
    """The plan that `plan_to_dict` described.

    Args:
        policy: The policy of the plan.
        content: The description; earlier versions wrote neither the length of the prompt nor copies of host memory.
        prefill: Makes what the activations follow from, of the policy, the layers and the length of the prompt.
    """
    layers = [_layer_plan(layer) for layer in content["layers"]]
    scalars: dict[str, Any] = {name: content[name] for name in _SCALARS}
    columns = content.get("columns")
    return CachePlan(
        policy=policy,
        layers=tuple(layers),
        unmanaged={int(index): size for index, size in content["unmanaged"].items()},
        prefill=prefill(policy, layers, columns) if columns else None,
        full_peak_nbytes=content.get("full_peak_nbytes", 0),
        **scalars,
    )


def _lists(layer: LayerPlan) -> dict[str, Any]:
    """The tuples of a layer as lists."""
    return {
        "layout": [layer.layout.exact, [*layer.layout.coded]],
        "pages": None if layer.pages is None else [*layer.pages],
    }


def _layer_plan(content: Mapping[str, Any]) -> LayerPlan:
    """A layer of a file, whose tuples are lists."""
    known = {field.name: content[field.name] for field in fields(LayerPlan) if field.name in content}
    exact, coded = known.pop("layout")
    pages = known.pop("pages")
    return LayerPlan(layout=Layout(exact, tuple(coded)), pages=None if pages is None else Pages(*pages), **known)

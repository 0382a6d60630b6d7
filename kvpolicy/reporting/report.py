"""Reports: the budgets, tokens and bytes of a cache, as text, HTML or JSON; and the repr of caches and handles.

`CacheSource` and `HandleSource` are the members of caches and handles that reports and plots use. The classes that
satisfy them, `kvpolicy.PolicyCache` and `kvpolicy.Handle`, live in `kvpolicy.hf`, which imports this room, so that they
are described here and recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvpolicy.engine.link import StepBytes
from kvpolicy.engine.state import HOST
from kvpolicy.planning.result import READ_KINDS, CachePlan, host_note, moved_note
from kvpolicy.policy import Policy
from kvpolicy.text import tables
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.formats import stamp


class LayerSource(Protocol):
    """A layer under a policy; the tensors exist once it has seen a prompt."""

    @property
    def layer_idx(self) -> int:
        """Index of the layer in the model."""
        ...

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has seen a prompt."""
        ...

    @property
    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, N]; negative where there is none."""
        ...

    @property
    def owner(self) -> Tensor | None:
        """KV head of each page, [B, NB]; None if all heads have the same budget."""
        ...

    @property
    def budget(self) -> Tensor:
        """The most tokens of each row, [B]."""
        ...

    @property
    def length(self) -> Tensor:
        """Tokens that each row has seen, [B]."""
        ...

    @property
    def prefix_kept(self) -> float:
        """Tokens of a shared prefix that a head holds, as a mean; 0 without one."""
        ...

    @property
    def step_bytes(self) -> StepBytes:
        """Bytes that a decode step moves."""
        ...

    def held(self) -> dict[str, int]:
        """Bytes by kind."""
        ...


@runtime_checkable
class CacheSource(Protocol):
    """A cache under a policy."""

    @property
    def policy(self) -> Policy:
        """The policy of the cache."""
        ...

    @property
    def plan(self) -> CachePlan | None:
        """The plan of the last prompt; None before it."""
        ...

    @property
    def layers(self) -> Sequence[Any]:
        """All layers, those that are not under the policy included."""
        ...

    @property
    def policy_layers(self) -> Sequence[LayerSource]:
        """The layers under the policy."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        ...

    @property
    def full_nbytes(self) -> int:
        """Bytes of a stock cache of the same tokens."""
        ...

    @property
    def resident_nbytes(self) -> int:
        """Bytes of calibration tensors, which belong to the model."""
        ...

    def unmanaged_bytes(self) -> dict[int, int]:
        """Bytes of the layers that are not under the policy, by layer."""
        ...

    def cosines(self) -> Tensor:
        """The cosines that the allocator measured for the last prompt, [B, L]."""
        ...


@runtime_checkable
class HandleSource(Protocol):
    """The handle of an attached policy."""

    @property
    def policy(self) -> Policy:
        """The attached policy."""
        ...

    @property
    def cache(self) -> CacheSource | None:
        """The newest cache that the model made; None before the first."""
        ...


class ShapeSource(Protocol):
    """The layers of a model."""

    @property
    def evictable(self) -> Sequence[int]:
        """Layers that a policy can manage."""
        ...

    @property
    def unmanaged(self) -> Mapping[int, int]:
        """Layers that are not under the policy, and their sliding windows."""
        ...

    @property
    def states(self) -> Mapping[int, object]:
        """Layers with states."""
        ...

    @property
    def owners(self) -> Mapping[int, int]:
        """Layers that read the keys of earlier ones, and these."""
        ...


FORMAT = 1
"""Version of the format of `Report.as_dict`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer of a report.

    Attributes:
        layer_idx: Index of the layer in the model.
        budget: The most tokens of each row.
        kept: Tokens held of each row, the most of any head.
        heads: Tokens held of each row by each head; empty if all heads have the same budget.
        seen: Tokens that each row has seen.
        nbytes: Bytes by kind.
        note: Why the layer is not under the policy, or empty.
        moved: Bytes that the last decode step read of the layer; of a cache without an eager one, what it would read.
        loaded: Those of them that it copied from host memory.
        stored: Bytes that it copied to host memory.
    """

    layer_idx: int
    budget: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    heads: tuple[tuple[int, ...], ...] = ()
    seen: tuple[int, ...] = ()
    nbytes: dict[str, int]
    note: str = ""
    moved: int = 0
    loaded: int = 0
    stored: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The budgets, tokens and bytes of a cache.

    Attributes:
        policy: The policy of the cache.
        layers: One entry per layer.
        nbytes: All bytes held.
        full_nbytes: Bytes of a stock cache of the same tokens.
        note: Where the effective behavior differs from the spec; empty if it does not.
        resident_nbytes: Bytes of calibration tensors, which belong to the model and not to the cache.
    """

    policy: Policy
    layers: tuple[LayerReport, ...]
    nbytes: int
    full_nbytes: int
    note: str = ""
    resident_nbytes: int = 0

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
    def host_nbytes(self) -> int:
        """Bytes held in host memory."""
        return sum(layer.nbytes.get(HOST, 0) for layer in self.layers)

    @property
    def device_nbytes(self) -> int:
        """Bytes held on the device."""
        return self.nbytes - self.host_nbytes

    @property
    def all_moved(self) -> int:
        """Bytes that a decode step would read of these layers if it read everything that is kept."""
        return sum(layer.nbytes.get(kind, 0) for layer in self.layers for kind in READ_KINDS)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings for JSON, with the versions of kvpolicy and of the format."""
        names = ("layer_idx", "budget", "kept", "heads", "seen", "nbytes", "note", "moved", "loaded", "stored")
        return {
            **stamp(FORMAT),
            "policy": str(self.policy),
            "nbytes": self.nbytes,
            "full_nbytes": self.full_nbytes,
            "note": self.note,
            "resident_nbytes": self.resident_nbytes,
            "moved": self.moved,
            "all_moved": self.all_moved,
            "host_nbytes": self.host_nbytes,
            "loaded": self.loaded,
            "stored": self.stored,
            "layers": [{name: getattr(layer, name) for name in names} for layer in self.layers],
        }

    def __repr__(self) -> str:
        """One line: policy, layers and bytes."""
        layers = tables.count(len(self.layers), "layer")
        return f"Report({self.policy}, {layers}, {tables.size_summary(self.nbytes, self.full_nbytes)})"

    def _repr_html_(self) -> str:
        return report_html(self)

    def __str__(self) -> str:
        """A table of tokens and bytes by layer, in which equal layers share a line, and the notes."""
        head, rows, last = _layers(self, tables.main_kinds(tables.sum_by_kind(layer.nbytes for layer in self.layers)))
        title = f"{self.policy}: {tables.size_summary(self.nbytes, self.full_nbytes)}:"
        nbytes = {layer.layer_idx: sum(layer.nbytes.values()) for layer in self.layers}
        return "\n".join([title, tables.text_layer_table(head, rows, last, nbytes), *_notes(self)])


def report_html(report: Report) -> str:
    """An HTML table of a report by layer: budget, tokens kept, bytes by kind, and their share of the full cache's."""
    totals = tables.sum_by_kind(layer.nbytes for layer in report.layers)
    head, rows, last = _layers(report, [kind for kind, size in totals.items() if size])
    title = f"<code>{escape(str(report.policy))}</code>: {tables.size_summary(report.nbytes, report.full_nbytes)}"
    escaped = [(index, (escape(cells[0]), *cells[1:])) for index, cells in rows]
    return tables.section(title, tables.layer_table(head, escaped, last), *map(escape, _notes(report)))


def _layers(report: Report, kinds: Sequence[str]) -> tuple[tables.Cells, list[tuple[int, tables.Cells]], tables.Cells]:
    """The head, the rows and the last line of the table of layers."""
    totals = tables.sum_by_kind(layer.nbytes for layer in report.layers)
    managed = [layer for layer in report.layers if layer.budget]
    own = [layer.nbytes if not layer.budget else {"state": layer.nbytes.get("state", 0)} for layer in report.layers]
    unmanaged = sum(tables.sum_by_kind(own).values())
    # All managed layers have the same shape, so each has an equal part of the full cache.
    full = (report.full_nbytes - unmanaged) // len(managed) if managed else 0
    rows = [
        (layer.layer_idx, _layer_cells(layer, kinds, full + layer.nbytes.get("state", 0))) for layer in report.layers
    ]
    head = ("layer", "budget", "kept", "seen", *kinds, "total", "of full")
    return head, rows, ("all", "", "", "", *tables.byte_cells(totals, kinds, report.full_nbytes))


def _notes(report: Report) -> list[str]:
    """The notes of a report besides its table, one line each."""
    notes = [tables.resident_note(tables.format_bytes(report.resident_nbytes))] if report.resident_nbytes else []
    if report.policy.reads_part:
        notes.append(moved_note(report.moved, report.all_moved))
    if report.host_nbytes:
        notes.append(host_note(report.host_nbytes, report.device_nbytes, report.loaded, report.stored))
    return [*notes, report.note] if report.note else notes


def _layer_cells(layer: LayerReport, kinds: Sequence[str], full: int) -> tables.Cells:
    if not layer.budget:
        return (layer.note.partition(":")[0], "", "", *tables.byte_cells(layer.nbytes, kinds, 0))
    rows = (_extent(numbers) for numbers in (layer.budget, layer.kept, layer.seen))
    return (*rows, *tables.byte_cells(layer.nbytes, kinds, full))


def _extent(numbers: Sequence[int]) -> str:
    """One number if all rows agree, else the smallest and the largest."""
    return f"{min(numbers):,}" if min(numbers) == max(numbers) else f"{min(numbers):,} to {max(numbers):,}"


def cache_of(source: Any) -> CacheSource:
    """The cache of a handle, or a cache itself.

    Raises:
        KVPolicyError: If there is none yet, or it has seen no prompt.
        KVPolicyTypeError: If it is neither.
    """
    cache: Any = source.cache if isinstance(source, HandleSource) else source
    if cache is not None and not isinstance(cache, CacheSource):
        raise KVPolicyTypeError(f"The source must be a Handle or a PolicyCache, got a {type(source).__name__}.")
    if cache is None or not any(layer.is_initialized for layer in cache.policy_layers):
        raise KVPolicyError("The cache must have seen a prompt; run the model first.")
    return cache


def mean_kept(cache: CacheSource, row: int = 0) -> float:
    """Tokens held of a row, of a shared prefix too, as a mean over layers and KV heads; 0 before a prompt."""
    layers = [layer for layer in cache.policy_layers if layer.is_initialized]
    kept = [float((layer.head_positions[row] >= 0).sum(-1).float().mean()) + layer.prefix_kept for layer in layers]
    return sum(kept) / max(len(kept), 1)


def _unmanaged(stock: Any) -> tuple[str, str]:
    """The kind of bytes, and the note, of a layer that no policy manages."""
    window = getattr(stock, "sliding_window", None)
    has_state = hasattr(stock, "recurrent_states")
    if window is not None:
        return "window", f"unmanaged: a sliding window of {window}{' and a state' if has_state else ''}"
    return ("state", "unmanaged: a state") if has_state else ("window", "unmanaged: no attention")


def make_report(cache: CacheSource) -> Report:
    """The report of a cache."""
    layers: list[LayerReport] = []
    managed = {layer.layer_idx: layer for layer in cache.policy_layers}
    unmanaged = cache.unmanaged_bytes()
    for index, stock in enumerate(cache.layers):
        layer = managed.get(index)
        if layer is None and hasattr(stock, "reads"):
            layers.append(LayerReport(layer_idx=index, nbytes={}, note=f"reads the keys of layer {stock.reads}"))
        elif layer is None:
            kind, note = _unmanaged(stock)
            layers.append(LayerReport(layer_idx=index, nbytes={kind: unmanaged.get(index, 0)}, note=note))
        elif not layer.is_initialized:
            layers.append(LayerReport(layer_idx=index, nbytes={}, note="empty"))
        else:
            # Heads of a row may hold different numbers of tokens, but never more than the budget on average.
            kept = (layer.head_positions >= 0).sum(-1)
            layers.append(
                LayerReport(
                    layer_idx=index,
                    budget=_integers(layer.budget),
                    kept=_integers(kept.amax(-1)),
                    heads=() if layer.owner is None else tuple(map(_integers, kept)),
                    seen=_integers(layer.length),
                    nbytes=layer.held() | ({"state": unmanaged[index]} if index in unmanaged else {}),
                    **layer.step_bytes._asdict(),
                )
            )
    return Report(
        policy=cache.policy,
        layers=tuple(layers),
        nbytes=cache.nbytes,
        full_nbytes=cache.full_nbytes,
        note="" if cache.plan is None else cache.plan.note,
        resident_nbytes=cache.resident_nbytes,
    )


def _integers(values: Tensor) -> tuple[int, ...]:
    return tuple(int(value) for value in values.tolist())


def cache_words(cache: CacheSource) -> str:
    """One line: a cache's policy, rows and bytes."""
    return f"PolicyCache({cache.policy}, {_state(cache)})"


def handle_words(handle: HandleSource, model: str, attached: bool) -> str:
    """One line: a handle's policy and model, and what its newest cache holds."""
    state = "no cache yet" if handle.cache is None else _state(handle.cache)
    return f"Handle({handle.policy} on {model}, {state}{'' if attached else ', detached'})"


def cache_html(cache: CacheSource) -> str:
    """The report of a cache, or its policy before the first prompt."""
    if cache.batch_size < 0:
        return tables.section("cache that has seen no prompt yet", cache.policy.to_html())
    return report_html(make_report(cache))


def handle_html(handle: HandleSource, model: str, attached: bool) -> str:
    """The state of a handle, and the report of its newest cache."""
    state = "attached to" if attached else "detached from"
    if handle.cache is None:
        return tables.section(f"{state} {escape(model)}, no cache yet", handle.policy.to_html())
    return tables.section(f"{state} {escape(model)}", cache_html(handle.cache))


def _state(cache: CacheSource) -> str:
    if cache.batch_size < 0:
        return "no prompt yet"
    return f"{tables.count(cache.batch_size, 'row')}, {tables.size_summary(cache.nbytes, cache.full_nbytes)}"

"""The tensors of one layer: allocated, counted, and selected by row in one place.

A store allocates them on the device of its keys, and a plan on the device meta, so that both count the same bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.link import to_host
from kvpolicy.engine.page_codes import alloc_codes
from kvpolicy.engine.pages import Pages, buffer_pages
from kvpolicy.engine.reading import ReadState, alloc_reads, choice_size, read_shape, reads_part
from kvpolicy.engine.row_limits import RowLimits, alloc_limits
from kvpolicy.engine.state import HOST, alloc_paged_state, bytes_by_kind, map_state
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.protocols import Codes, LayerShape, Layout, State

HOST_PARTS = ("keys", "values")
"""The attributes of a layer that may lie in host memory."""


@dataclass(eq=False)
class PageTensors:
    """The tensors of a layer that only one with a budget for each head has.

    Attributes:
        owner: KV head of each page, [B, NB] int64; H for a page that the row does not use.
        average: Tokens of an average head in whole pages, [B] int64: the budget that the selector sees.
        complete: Whether a row has all the pages of its budget, [B] bool: only then are tokens evicted in a step.
    """

    owner: Tensor
    average: Tensor
    complete: Tensor


@dataclass(eq=False)
class LayerTensors:
    """The tensors of one layer: B rows, H KV heads, S slots, or NB pages of P slots if each head has a budget.

    Attributes:
        keys: Keys of the full-precision buffer, [B, H, E, D], or of its pages, [B, NB, P, D].
        values: Values, as the keys; with D' in place of D where the sizes differ, 0 where none is held.
        positions: Original position of the token in each slot, [B, H, S] or [B, NB, P] int32, -1 for an empty slot.
        state: The selector's state of each slot.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] or [B, NB, P] fp32; () if it is
            always one.
        merged: The merger's state of each head.
        codes: The codec's tensors of each stage.
        limits: Limits of each row; None for a codec without stages.
        reads: The tensors of a reader; the empty tuple in a layer that always reads everything.
        length: Tokens that each row has seen, [B] int64.
        budget: The most tokens that each row may hold, [B] int64.
        columns: Columns seen, padding included, [] int64.
        pages: The pages; None in a layer without head budgets.
        host: Whether keys and values lie in host memory, and everything else on the device.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    counts: State
    merged: State
    codes: tuple[Codes, ...]
    limits: RowLimits | None
    reads: ReadState | tuple[()]
    length: Tensor
    budget: Tensor
    columns: Tensor
    pages: PageTensors | None = None
    host: bool = False

    @classmethod
    def of_slots(
        cls, spec: LayerSpec, batch: int, shape: LayerShape, layout: Layout, device: torch.device | str
    ) -> LayerTensors:
        """Empty tensors of a layer with equally many slots in all heads.

        Args:
            spec: The parts of the layer.
            batch: Number of rows.
            shape: The shape of the layer.
            layout: Its slots.
            device: Where they are allocated; `meta` to count them.
        """
        heads = shape.heads
        dim = shape.head_dim
        slots = layout.slots
        # Not strict: the layout of a layer with few tokens has no stages, whatever the codec has.
        stages = zip(spec.stages, layout.coded, strict=False)
        length, budget, columns = _counters(batch, device)
        own = "cpu" if spec.host and length.device.type != "meta" else device
        return cls(
            keys=torch.empty(batch, heads, layout.exact, dim, dtype=shape.dtype, device=own),
            values=torch.empty(batch, heads, layout.exact, shape.held_value_dim, dtype=shape.dtype, device=own),
            positions=torch.empty(batch, heads, slots, dtype=torch.int32, device=device),
            state=spec.selector.alloc(batch, heads, slots, device, shape.head),
            counts=torch.zeros(batch, heads, slots, device=device, dtype=torch.float32)
            if spec.merger_traits.counted
            else (),
            merged=spec.merger.alloc(batch, heads, device),
            codes=tuple(stage.alloc(batch, heads, size, dim, device) for stage, size in stages),
            limits=alloc_limits(spec.codec, batch, heads, dim, device),
            reads=alloc_index(spec, batch, shape, layout, device),
            length=length,
            budget=budget,
            columns=columns,
            host=spec.host,
        )

    @classmethod
    def of_pages(
        cls, spec: LayerSpec, batch: int, shape: LayerShape, pages: Pages, buffer: int, device: torch.device | str
    ) -> LayerTensors:
        """Empty tensors of a layer with a budget for each head.

        Args:
            spec: The parts of the layer.
            batch: Number of rows.
            shape: The shape of the layer.
            pages: The pages that its heads share.
            buffer: Slots of each head's full-precision buffer, if the pages hold codes.
            device: Where they are allocated; `meta` to count them.
        """
        heads = shape.heads
        dim = shape.head_dim
        codec = spec.codec
        exact = (batch, *pages)
        codes: tuple[Codes, ...] = ()
        every = pages
        # With a codec, the pages hold codes, and each head has a full-precision buffer of its own: positions and states
        # are of the pages' slots first, and then of the buffers', which count as pages too.
        if codec.stages:
            exact = (batch, heads, buffer)
            codes = (alloc_codes(codec, batch, heads, *pages, dim, device),)
            every = Pages(pages.number + heads * buffer_pages(buffer, pages.size), pages.size)
        length, budget, columns = _counters(batch, device)
        return cls(
            keys=torch.empty(*exact, dim, dtype=shape.dtype, device=device),
            values=torch.empty(*exact, shape.held_value_dim, dtype=shape.dtype, device=device),
            positions=torch.empty(batch, *every, dtype=torch.int32, device=device),
            state=alloc_paged_state(spec.selector, batch, heads, *every, device, shape.head),
            counts=torch.zeros(batch, *every, device=device, dtype=torch.float32) if spec.merger_traits.counted else (),
            merged=spec.merger.alloc(batch, heads, device),
            codes=codes,
            limits=alloc_limits(codec, batch, heads, dim, device, paged=True),
            reads=(),
            length=length,
            budget=budget,
            columns=columns,
            pages=PageTensors(
                owner=torch.empty(batch, every.number, dtype=torch.int64, device=device),
                average=torch.zeros(batch, dtype=torch.int64, device=device),
                complete=torch.zeros(batch, dtype=torch.bool, device=device),
            ),
        )

    @property
    def device(self) -> torch.device:
        """The device of the layer, where everything lies but what is in host memory."""
        return self.length.device

    @property
    def log_counts(self) -> Tensor | None:
        """Logarithm of the number of tokens that each slot stands for, as `counts`; None if it is always one."""
        return self.counts if isinstance(self.counts, Tensor) else None

    def paged(self) -> PageTensors:
        """The pages of a layer that has some."""
        assert self.pages is not None, "the heads of this layer have no budgets of their own"
        return self.pages

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Replace keys and values, and move them to host memory if those of the layer lie there."""
        self.set_part("keys", keys)
        self.set_part("values", values)

    def parts(self) -> dict[str, State]:
        """Every tensor by attribute, those of the pages too; calibrated ones belong to the model."""
        held = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("pages", "host")}
        pages = {} if self.pages is None else vars(self.pages)
        return {name: () if part is None else part for name, part in held.items()} | pages

    def set_part(self, name: str, part: State) -> None:
        """Replace an entry of `parts` by one of the same structure."""
        holder = self if hasattr(self, name) else self.paged()
        if self.host and name in HOST_PARTS:
            part = to_host(part, self.device)
        setattr(holder, name, None if name == "limits" and part == () else part)

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every per-row tensor by `fn` of it, which selects or repeats rows."""
        for name, part in self.parts().items():
            if name not in ("columns", "limits"):
                self.set_part(name, map_state(fn, part))
        if self.limits is not None:  # a limit that the codec does not need has no rows
            self.limits = map_state(lambda t: fn(t) if t.shape[0] else t, self.limits)

    def of_rows(self, rows: slice | Tensor) -> LayerTensors:
        """The tensors of some rows: views of a range, or copies of the rows with these indices, [n] int64."""
        part = copy.copy(self)
        part.pages = copy.copy(self.pages)
        if isinstance(rows, slice):
            part.map_rows(lambda t: t[rows])
        else:
            part.map_rows(lambda t: t.index_select(0, rows.to(t.device)))
        return part

    def put_rows(self, rows: Tensor, part: LayerTensors, names: Collection[str]) -> None:
        """Write the parts `names` of `of_rows(rows)` back to these rows, [n] int64, in place."""
        held = self.parts()
        new = part.parts()
        for name in names:
            for target, item in zip(all_tensors(held[name]), all_tensors(new[name]), strict=True):
                target.index_copy_(0, rows.to(target.device), item)

    def nbytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, index, counters; counts and host if any."""
        counters = [self.length, self.budget, self.columns, *all_tensors(self.limits or ())]
        merged = (self.counts, self.merged)
        exact = (self.keys, self.values)
        kinds = bytes_by_kind(exact, self.codes, self.positions, self.state, counters, merged, self.reads)
        if self.host:
            kinds |= {"exact": 0, HOST: kinds["exact"]}
        if self.pages is not None:
            kinds["positions"] += self.pages.owner.nbytes
            kinds["counters"] += self.pages.average.nbytes + self.pages.complete.nbytes
        return kinds


def alloc_index(
    spec: LayerSpec, batch: int, shape: LayerShape, layout: Layout, device: torch.device | str
) -> ReadState | tuple[()]:
    """Empty tensors of the reader of a layer; the empty tuple if it always reads everything."""
    if not reads_part(spec.reader, spec.layer_idx):
        return ()
    plan = read_shape(spec.reader, spec.codec, layout, spec.layer_idx)
    shown = choice_size(spec.reader, spec.codec, layout, spec.layer_idx)
    sizes = (batch, shape.heads, shape.head_dim, shape.dtype, device)
    return alloc_reads(spec.reader, plan, *sizes, spec.layer_idx, shown)


def _counters(batch: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens seen and the budget of each row, [B] int64 each, and columns seen, [] int64."""
    # `zeros_like` on the meta device would import PyTorch's symbolic shapes, for a quarter of the time of a plan.
    length = torch.zeros(batch, dtype=torch.int64, device=device)
    budget = torch.zeros(batch, dtype=torch.int64, device=device)
    return length, budget, torch.zeros((), dtype=torch.int64, device=device)

"""Contents of one layer: its tensors, and the numbers that it keeps on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine import capacity
from kvpolicy.engine.accounting import bytes_by_kind
from kvpolicy.engine.layout import fix_addresses
from kvpolicy.engine.link import Link
from kvpolicy.engine.rank_schedule import RankSchedule
from kvpolicy.engine.reading import ReadShape, ReadState, alloc_reads, reads_part
from kvpolicy.engine.rotary import Rope
from kvpolicy.engine.row_limits import RowLimits, alloc_limits
from kvpolicy.engine.sizes import SizeHistory, Sizes, crop_obstacle
from kvpolicy.engine.state import map_state
from kvpolicy.engine.undo_log import UNDO_LOG, UndoLog
from kvpolicy.mergers.drop import Drop
from kvpolicy.protocols import (
    SINGLE_RANK,
    Calibration,
    Codec,
    Codes,
    DecodeMode,
    HeadShape,
    Layout,
    Merger,
    Ranks,
    Reader,
    Selector,
    State,
    alloc_state,
)
from kvpolicy.readers.all import ReadAll
from kvpolicy.spec.errors import KVPolicyError

PARTS = (
    "keys",
    "values",
    "positions",
    "state",
    "counts",
    "merged",
    "codes",
    "limits",
    "reads",
    "length",
    "budget",
    "columns",
)
"""The attributes of a layer that hold its tensors."""

NUMBERS = ("capacity", "expected_len", "reserved", "largest_block", "scale", "_may_exceed_plan")
"""The attributes of a layer that are numbers on the host, or lists of them."""


class LayerContents:
    """Contents of one layer under a policy.

    Attributes:
        layer_idx: Index of the layer in the model.
        selector: The layer's selector.
        codec: The layer's codec.
        merger: The layer's merger.
        reader: The layer's reader.
        grows: Whether generated tokens are kept in addition to the budget.
        rope: The rotary embedding, if keys are coded unrotated.
        query_rope: The rotary embedding, if keys are coded unrotated or the selector needs queries without it.
        scale: The factor of the products of queries and keys, as in the last prompt.
        group: Query heads of each KV head.
        ranks: The ranks that hold the layer's other heads.
        layout: Slots of the full-precision buffer and of each stage.
        capacity: Tokens that the layout was made for.
        expected_len: Tokens that each row has slots for.
        schedule: When the slots are ranked together again.
        reserved: Dictionary slots, the first of the full-precision buffer.
        heads: KV heads.
        largest_block: The most tokens that any row demotes at a time.
        keys: Keys of the full-precision buffer, [B, H, E, D].
        values: Values of the full-precision buffer, [B, H, E, D].
        positions: Original position of the token in each slot, [B, H, S] int32, -1 for an empty slot.
        state: The selector's state of each slot.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; () if it is
            always one.
        merged: The merger's state of each head.
        codes: The codec's tensors of each stage.
        calibrations: The model's calibrated tensors of each stage.
        limits: Limits of each row; None for a codec without stages.
        read_shape: Read plan of a decode step; None for all slots.
        reads: The tensors of a reader; the empty tuple in a layer that always reads everything.
        link: The link that every read of a decode step goes through.
        undo: Undo log of the steps since the mark; None without a mark.
        sizes: Sizes of the layer before its prompts, for crops.
        free_steps: Steps until the layer must demote tokens, or needs more slots.
        steps_unsorted: Steps since slots were sorted, if a reader wants them sorted.
        records_digest: Whether the undo log records the digest of the mask.
        length: Tokens that each row has seen, [B] int64.
        budget: The most tokens that each row may hold, [B] int64.
        columns: Columns seen, padding included, [] int64.
    """

    is_paged = False
    """Whether heads have budgets of their own."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: State
    counts: State
    merged: State
    codes: tuple[Codes, ...]
    calibrations: tuple[Calibration, ...]
    limits: RowLimits | None
    reads: ReadState | tuple[()]
    length: Tensor
    budget: Tensor
    columns: Tensor

    def __init__(
        self,
        layer_idx: int,
        selector: Selector,
        codec: Codec,
        decode: DecodeMode,
        rope: Rope | None = None,
        merger: Merger | None = None,
        reader: Reader | None = None,
    ) -> None:
        """Make an empty store from the parts of a layer.

        Without a merger, evicted tokens are dropped; without a reader, every slot is read.
        """
        self.layer_idx = layer_idx
        self.selector = selector
        self.codec = codec
        self.merger: Merger = merger or Drop()
        self.reader: Reader = ReadAll() if reader is None else reader
        self.grows = decode == "grow"
        self.rope = rope if codec.traits.key_space == "unrotated" else None
        self.query_rope = rope
        self.scale = 1.0
        self.ranks = SINGLE_RANK
        self.layout = Layout(0)
        self.capacity = 0
        self.expected_len: list[int] = []
        self.schedule = RankSchedule(selector.needs.rerank_every)
        self.reserved = 0
        self.heads = 0
        self.largest_block = codec.traits.block
        self.limits = None
        self.read_shape: ReadShape | None = None
        self.reads = ()
        self.link = Link()
        self.is_initialized = False
        self.free_steps: float = 0
        self.steps_unsorted = 0
        self.records_digest = False
        self._may_exceed_plan = False
        self.undo: UndoLog | None = None
        self.sizes = SizeHistory(not crop_obstacle(selector, codec, self.merger, self.reader, paged=self.is_paged))

    def initialize(self, keys: Tensor, ranks: Ranks = SINGLE_RANK, group: int = 1) -> None:
        """Allocate a layer without slots, like `keys` [B, H, P, D], the first, with `group` query heads for each."""
        batch, heads, _, dim = keys.shape
        device = keys.device
        self.ranks = ranks
        self.group = group
        self.heads = heads
        self.keys = keys.new_empty(batch, heads, 0, dim)
        self.values = keys.new_empty(batch, heads, 0, dim)
        self.positions = torch.empty(batch, heads, 0, dtype=torch.int32, device=device)
        self.state = alloc_state(self.selector, batch, heads, 0, device, HeadShape(group, dim))
        self.counts = torch.zeros(batch, heads, 0, device=device) if self.merger.traits.counted else ()
        self.merged = self.merger.alloc(batch, heads, device)
        self.codes = ()
        self.limits = alloc_limits(self.codec, batch, heads, dim, device)
        self.calibrations = tuple(
            stage.load_calibration(self.layer_idx, device, ranks.held) for stage in self.codec.stages
        )
        self.length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.budget = torch.zeros(batch, dtype=torch.int64, device=device)
        self.columns = torch.zeros((), dtype=torch.int64, device=device)
        self.expected_len = [0] * batch
        self.schedule.start(batch)
        if reads_part(self.reader, self.layer_idx):
            self.reads = alloc_reads(self.reader, None, batch, heads, dim, keys.dtype, device, self.layer_idx)
        self.is_initialized = True

    def check_compatible(self, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values of another dtype or device than those of the slots.

        Raises:
            KVPolicyError: If they differ.
        """
        if not self.is_initialized:
            return
        for held, new in ((self.keys, keys), (self.values, values)):
            if held.dtype != new.dtype or held.device != new.device:
                raise KVPolicyError(
                    f"Keys and values must be {held.dtype} on {held.device} like the cache, got {new.dtype} on "
                    f"{new.device}; try a new cache after moving the model or switching autocast."
                )

    @property
    def log_counts(self) -> Tensor | None:
        """Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one."""
        return self.counts if isinstance(self.counts, Tensor) else None

    def nbytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, index, counters; counts and undo log if any."""
        if not self.is_initialized:
            return {}
        counters = (self.length, self.budget, self.columns, *(self.limits or ()))
        exact = (self.keys, self.values)
        merged = (self.counts, self.merged)
        kinds = bytes_by_kind(exact, self.codes, self.positions, self.state, counters, merged, self.reads)
        return kinds if self.undo is None else kinds | {UNDO_LOG: self.undo.nbytes}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that count as the cache's."""
        return sum(self.nbytes_by_kind().values())

    def tokens_by_head(self) -> Tensor:
        """Tokens that each head holds, [B, H] int64."""
        return (self.positions >= 0).sum(-1)

    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for an empty slot."""
        return self.positions

    # rows

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every per-row tensor by `fn` of it, which selects or repeats rows."""
        if not self.is_initialized:
            return
        self.keys = fn(self.keys)
        self.values = fn(self.values)
        self.positions = fn(self.positions)
        self.length = fn(self.length)
        self.budget = fn(self.budget)
        self.expected_len = fn(torch.tensor(self.expected_len)).tolist()
        self.schedule.map_rows(fn)
        self.state = map_state(fn, self.state)
        self.counts = map_state(fn, self.counts)
        self.merged = map_state(fn, self.merged)
        self.codes = map_state(fn, self.codes)
        self.reads = map_state(fn, self.reads)
        if self.limits is not None:  # a limit that the codec does not need has no rows
            self.limits = RowLimits(*(fn(t) if t.shape[0] else t for t in self.limits))
        self.sizes.map_rows(fn)
        self.fix_addresses()

    def note_sizes(self, new: int = 0) -> None:
        """Note the sizes of the layer before they change for a prompt of `new` columns that were counted already."""
        if self.sizes.is_kept:
            sizes = (self.layout.exact, self.capacity, list(self.expected_len), self.budget.tolist())
            self.sizes.entries.append(Sizes(int(self.columns) - new, *sizes))

    @property
    def is_inference(self) -> bool:
        """Whether some tensors may be changed in inference mode only."""
        # Rows may be selected outside of it, which replaces all tensors but this one, or inside of it later.
        return self.columns.is_inference() or self.length.is_inference()

    def leave_inference_mode(self) -> None:
        """Replace tensors that were made in inference mode, which only inference mode may change, by ordinary ones."""
        self.map_rows(torch.clone)
        self.columns = self.columns.clone()

    def fix_addresses(self) -> None:
        """Mark every tensor as static for CUDA graphs, after any of them was replaced."""
        fix_addresses([*self.parts().values(), self.calibrations])

    # all of it

    def parts(self) -> dict[str, State]:
        """Every tensor that the layer holds, by attribute; calibrated ones belong to the model."""
        # `or` for `limits` alone, which is a tuple or None: a tensor of several elements has no truth value.
        return {name: getattr(self, name) or () if name == "limits" else getattr(self, name) for name in PARTS}

    def set_part(self, name: str, part: State) -> None:
        """Replace an attribute of `parts` by one of the same structure."""
        setattr(self, name, None if name == "limits" and part == () else part)

    def empty_parts(self) -> dict[str, State]:
        """Tensors on the device `meta`, or empty ones, like those of `parts`, for the layout that is set."""
        batch, heads, _, dim = self.keys.shape
        nowhere = torch.device("meta")
        # Not strict: the layout of a layer with few tokens has no stages, whatever the codec has.
        sizes = zip(self.codec.stages, self.layout.coded, strict=False)
        exact = self.keys.new_empty(batch, heads, self.layout.exact, dim, device=nowhere)
        per_slot = torch.empty(batch, heads, self.layout.slots, device=nowhere)
        return self.parts() | {
            "keys": exact,
            "values": exact,
            "positions": per_slot.to(torch.int32),
            "state": alloc_state(self.selector, batch, heads, self.layout.slots, nowhere, HeadShape(self.group, dim)),
            "counts": per_slot if self.merger.traits.counted else (),
            "codes": tuple(stage.alloc(batch, heads, size, dim, nowhere) for stage, size in sizes),
        }

    def find_layout(self) -> Layout:
        """The layout, from the tensors where they determine it."""
        return self.layout

    def numbers(self) -> dict[str, Any]:
        """The numbers of the layer on the host, as JSON values; infinity is None."""
        return {
            "layout": [self.layout.exact, list(self.layout.coded)],
            "schedule": self.schedule.numbers(),
            "free_steps": None if self.free_steps == capacity.UNLIMITED else self.free_steps,
            **{name.lstrip("_"): getattr(self, name) for name in NUMBERS},
        }

    def set_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`."""
        exact, coded = numbers["layout"]
        self.layout = Layout(exact, tuple(coded))
        self.schedule.set_numbers(numbers["schedule"])
        free = numbers["free_steps"]
        self.free_steps = capacity.UNLIMITED if free is None else free
        for name in NUMBERS:
            setattr(self, name, numbers[name.lstrip("_")])

    def __repr__(self) -> str:
        """The slots, and how they are stored."""
        if not self.is_initialized:
            return f"{type(self).__name__}(layer_idx={self.layer_idx}, empty)"
        return f"{type(self).__name__}({self.describe()})"

    def describe(self) -> str:
        """Sizes of an initialized store, as a `repr` shows them."""
        batch, heads, slots = self.positions.shape
        kept = f"exact={self.layout.exact}" + (f", coded={self.layout.coded}" if self.layout.coded else "")
        return f"layer_idx={self.layer_idx}, rows={batch}, heads={heads}, slots={slots}, {kept}"

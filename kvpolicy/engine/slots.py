"""The slots of one layer: its tensors and their invariants.

A layer's slots are a full-precision buffer in the model's dtype, where every new token is written, and the codec's
stages, to which tokens are demoted in blocks (see `kvpolicy.protocols.Layout`). A prefill allocates the slots, and a
decode step overwrites one slot per head in place. The order of slots has no meaning, because keys carry their position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine import capacity, merging
from kvpolicy.engine.accounting import bytes_by_kind
from kvpolicy.engine.attention import Past
from kvpolicy.engine.codec_view import CodecView, StagePart
from kvpolicy.engine.layout import fix_addresses, grown_codes, grown_layout, grown_slots, grown_state
from kvpolicy.engine.link import Link
from kvpolicy.engine.merging import SlotMerge
from kvpolicy.engine.rank_schedule import RankSchedule
from kvpolicy.engine.reading import ReadShape, ReadState, alloc_reads, reads_part
from kvpolicy.engine.rotary import Rope, SlotRotary
from kvpolicy.engine.row_limits import RowLimits, alloc_limits, has_dictionary, with_tokens
from kvpolicy.engine.selection import finite_priority
from kvpolicy.engine.state import map_slots, map_state, slot_tensors
from kvpolicy.engine.token_batch import SlotData
from kvpolicy.kernels.slot_writes import gather_slots, write_slots
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
    StageStore,
    State,
    Tokens,
    View,
    alloc_state,
    traits_for,
)
from kvpolicy.readers.all import ReadAll
from kvpolicy.spec.errors import KVPolicyError


class LayerSlots:
    """The tensors of one layer: how they are allocated, grown, read and written. `LayerStore` operates on them.

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
        read_shape: What a decode step reads; None for everything.
        reads: The tensors of a reader; the empty tuple in a layer that always reads everything.
        link: What every read of a decode step goes through.
        length: Tokens that each row has seen, [B] int64.
        budget: The most tokens that each row may hold, [B] int64.
        columns: Columns seen, padding included, [] int64.
    """

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
        """Make an empty store of a layer's own parts.

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
        self._free_steps: float = 0
        self._may_exceed_plan = False

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

    # writing

    def write(self, slots: Tensor, data: SlotData | None, mask: Tensor | None, stage: int | None = None) -> None:
        """Write tokens to slots, or empty slots, in place: every change of a slot in a decode step goes through here.

        Args:
            slots: Slots of each head, [B, H, n] int64, counted from the first slot, or from the first one of `stage`.
            data: The tokens, keys in the codec's key space if they are coded; None to empty the slots.
            mask: Which of the slots are written, [B, H, n] bool; None for all.
            stage: The stage that codes the tokens; None for the full-precision buffer.
        """
        if data is None:
            slots = slots if stage is None else slots + self._stage_range(stage).start
            self._write_rows(self.positions, slots, torch.full_like(slots, -1, dtype=torch.int32), mask)
            self._refresh_slots(slots, stage)
            return
        if stage is None:
            self._write_rows(self.keys, slots, data.keys, mask)
            self._write_rows(self.values, slots, data.values, mask)
        else:
            assert mask is not None
            at = self._stage_range(stage)
            # Read before the new positions are written: codecs fit parameters where a head or a group was empty.
            occupied = self.positions[..., at] >= 0
            store = self.stage_store(stage)
            self.codec.stages[stage].write(store, data.keys, data.values, slots, mask, occupied)
            slots = slots + at.start
        self._write_rows(self.positions, slots, data.positions, mask)
        for target, item in zip(
            slot_tensors((self.state, self.counts)), slot_tensors((data.state, data.counts)), strict=True
        ):
            self._write_rows(target, slots, item, mask)
        self._refresh_slots(slots, stage)

    def _write_rows(self, target: Tensor, slots: Tensor, data: Tensor, mask: Tensor | None) -> None:
        if mask is not None:
            # A masked token writes back what its slot holds. This is safe because `slots` are distinct within a head,
            # masked or not, or have the same data and mask: a masked duplicate of a written slot could undo the write.
            written = mask.reshape(*mask.shape, *(1,) * (target.dim() - 3))
            data = torch.where(written, data, gather_slots(target, slots))
        write_slots(target, slots, data)

    def _refresh_slots(self, slots: Tensor, stage: int | None) -> None:
        """Recompute what an index holds of slots [B, H, n] that were written, counted from the layer's first slot."""

    def merge_evicted(self, victim: Tensor, evicted: Tensor, valid: Tensor | None, view: View) -> SlotMerge | None:
        """Merge the token in slot `victim` [B, H, 1] into another one, in the heads where it is `evicted` [B, H, 1].

        Nothing is written: what is returned is written with the new token. None if nothing is merged in decoding.
        """
        if not merging.merges_in_steps(self.merger, self.grows):
            return None
        if valid is not None:
            evicted = evicted & valid[:, :, None]
        exact = (self.keys, self.values)
        token = merging.slot_tokens(victim, evicted, exact, self.coded_view(), self.positions, self.counts)
        positions = self.positions[..., : self.layout.exact]
        counts = map_state(lambda t: t[..., : self.layout.exact], self.counts)
        slot = torch.arange(self.layout.exact, device=positions.device)
        # Codes refer to the tokens in dictionary slots, which must therefore stay as they are.
        targets = (positions >= 0) & (slot != victim) & self._open_slots()
        priority = None
        if self.merger.traits.ranked:
            priority = finite_priority(self.selector.priority(self.state, view))[..., : self.layout.exact]
        held = Tokens(*exact, positions, counts if isinstance(counts, Tensor) else None, targets, priority)
        merge = self.merger.merge_token(self.merged, token, held)
        data = SlotData(
            keys=gather_slots(self.keys, merge.slot) if merge.keys is None else merge.keys.to(self.keys.dtype),
            values=merge.values.to(self.values.dtype),
            positions=self.positions.gather(-1, merge.slot),
            state=map_slots(lambda t: t.gather(-1, merge.slot), self.state),
            counts=map_state(lambda t: t.gather(-1, merge.slot), self.counts) if merge.counts is None else merge.counts,
        )
        return SlotMerge(merge.slot, merge.write_mask & evicted, data)

    # growing

    def _lengthen(self) -> None:
        """Grow the slots to the capacity, and keep what they hold."""
        old = self.layout.exact
        # `_grow_slots` empties the buffer, which suits a prompt, whose tokens are placed anew. Here they stay in place.
        positions = self.positions[..., :old]
        before = map_slots(lambda t: t[..., :old], (self.state, self.counts))
        self._grow_slots()
        self.positions[..., :old] = positions
        for target, item in zip(slot_tensors((self.state, self.counts)), slot_tensors(before), strict=True):
            target[..., :old] = item
        padding = (0, 0, 0, self.layout.exact - old)
        self.keys = F.pad(self.keys, padding)
        self.values = F.pad(self.values, padding)

    def _grow_slots(self) -> None:
        """Make the layout fit the capacity; slots of the full-precision buffer come out empty, but for dictionaries."""
        old = self.layout
        self.layout = grown_layout(old, self.codec.layout(self.capacity))
        self.positions, self.state = grown_slots(self.positions, self.state, old, self.layout, self.reserved)
        self.counts = grown_state(self.counts, old, self.layout, self.reserved)
        if self.reserved and self.limits is not None:
            self.positions[..., : self.reserved].masked_fill_(~has_dictionary(self.limits), -1)
        if self.layout.coded != old.coded:
            batch, heads, _, dim = self.keys.shape
            self.codes = grown_codes(
                self.codec, self.codes, self.layout.coded, (batch, heads, dim), self.positions.device
            )

    def _set_budget(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens."""
        self.budget = budget
        tokens = budget.tolist()
        if self.limits is not None:
            # A budget may exceed all tokens that are expected, and slots are allocated for no more than those.
            allocated = [min(pair) for pair in zip(tokens, self.expected_len, strict=True)]
            self.limits = with_tokens(self.limits, self.codec, allocated, self.reserved)
            self.largest_block = max(traits_for(self.codec, count).block for count in allocated)
        self._may_exceed_plan = not self.grows and capacity.may_exceed_plan(self.expected_len, tokens)

    def tokens_by_head(self) -> Tensor:
        """Tokens that each head holds, [B, H] int64."""
        return (self.positions >= 0).sum(-1)

    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, n] int32, -1 for an empty slot."""
        return self.positions

    def _row_counts(self) -> list[int]:
        """Tokens in each row's fullest head."""
        return self.tokens_by_head().amax(-1).tolist()

    def _buffered(self) -> Tensor:
        """Tokens of each head in the full-precision buffer, the dictionary left out, [B, H]."""
        return ((self.positions[..., : self.layout.exact] >= 0) & self._open_slots()).sum(-1)

    # reading

    def coded_view(self) -> CodecView | None:
        """The coded slots as a decode step attends to them; None if there are none."""
        return CodecView(self._stage_parts()) if sum(self.layout.coded) else None

    def past(self) -> Past | None:
        """Every slot, decoded; None if there are none."""
        if not self.layout.slots:
            return None
        parts = [(self.keys, self.values), *CodecView(self._stage_parts()).read(self.keys.dtype)]
        keys = torch.cat([pair[0] for pair in parts], 2)
        values = torch.cat([pair[1] for pair in parts], 2)
        return Past(keys, values, self.positions >= 0, self.log_counts)

    @property
    def log_counts(self) -> Tensor | None:
        """Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one."""
        return self.counts if isinstance(self.counts, Tensor) else None

    def nbytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind: exact, codes, scales, positions, statistics, index, counters, and counts if there are any."""
        if not self.is_initialized:
            return {}
        counters = (self.length, self.budget, self.columns, *(self.limits or ()))
        exact = (self.keys, self.values)
        merged = (self.counts, self.merged)
        return bytes_by_kind(exact, self.codes, self.positions, self.state, counters, merged, self.reads)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that count as the cache's."""
        return sum(self.nbytes_by_kind().values())

    def _stage_parts(self) -> list[StagePart]:
        sizes = enumerate(self.layout.coded)
        return [
            StagePart(
                self.codec.stages[stage],
                self.stage_store(stage),
                self._slot_rotary(stage),
                size,
                self._stage_range(stage).start,
            )
            for stage, size in sizes
            if size
        ]

    def _stage_range(self, stage: int) -> slice:
        """The slots of a stage."""
        start = self.layout.starts()[stage]
        return slice(start, start + self.layout.coded[stage])

    def stage_store(self, stage: int) -> StageStore:
        """The tensors of a stage, as the codec takes them."""
        wanted = self.limits is not None and self.codec.traits.query_absmax
        absmax = self.limits.query_absmax if self.limits is not None and wanted else None
        return StageStore(self.codes[stage], self.calibrations[stage], self._atoms(), absmax)

    def _slot_rotary(self, stage: int) -> SlotRotary | None:
        if self.rope is None or self.limits is None:
            return None
        positions = self.positions[..., self._stage_range(stage)]
        return SlotRotary(self.rope, positions, self.length - 1, self.limits.rope_offset)

    def _atoms(self) -> tuple[Tensor, Tensor] | None:
        """Keys, in the codec's key space, and values of the dictionary slots, [B, H, W, D]; 0 for an empty slot."""
        if not self.reserved or self.limits is None:
            return None
        # By pins and not by positions: codes refer to an atom even after its own token was evicted.
        empty = (self.limits.pins < 0)[..., None]
        keys = self.keys[:, :, : self.reserved].masked_fill(empty, 0)
        values = self.values[:, :, : self.reserved].masked_fill(empty, 0)
        return self._codec_keys(keys, self.limits.pins).to(keys.dtype), values

    def _codec_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, H, n, D] at positions [B, H, n] in the codec's key space."""
        if self.rope is None or self.limits is None:
            return keys
        return self.rope.unrotate(keys, positions + self.limits.rope_offset[:, None, None])

    def _open_slots(self) -> Tensor:
        """Slots of the full-precision buffer that any token may take, [B or 1, 1, E] bool: all but dictionary slots."""
        slots = torch.arange(self.layout.exact, device=self.positions.device)[None, None]
        if not self.reserved or self.limits is None:
            return slots >= 0
        return (slots >= self.reserved) | ~has_dictionary(self.limits)

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
        self._fix_addresses()

    def leave_inference_mode(self) -> None:
        """Replace tensors that were made in inference mode, which only inference mode may change, by ordinary ones."""
        self.map_rows(torch.clone)
        self.columns = self.columns.clone()

    def _fix_addresses(self) -> None:
        fixed = (self.keys, self.values, self.positions, self.length, self.budget, self.columns)
        held = (self.state, self.counts, self.merged, self.codes, self.calibrations, self.limits or (), self.reads)
        fix_addresses([*fixed, *held])

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

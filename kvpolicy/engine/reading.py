"""Which entries a decode step reads: their slots, and their ranking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.state import fields
from kvpolicy.engine.token_batch import BEYOND
from kvpolicy.kernels.in_memory import in_memory
from kvpolicy.kernels.largest import largest
from kvpolicy.protocols import Codec, Codes, Index, Layout, Ranks, Read, Reader
from kvpolicy.statistics.channel_sums import AbsoluteSums

NEWEST = 3.0
FIRST = 2.0
RECENT = 1.0
"""How much entries are needed that are always read, by what they hold; of too many, the newest token's comes first.

It is more than the logarithm of any weight.
"""


class ReadShape(NamedTuple):
    """Read plan of a layer. These are integers of the layout, so that each layout has one graph.

    Attributes:
        page: Slots of an entry.
        chosen: Entries that each head reads.
        parts: The first slot and the slots of each part that is divided into entries: all slots in full precision, or
            the stages of a codec. An entry lies in one part.
        followed: Slots of an entry in the layer that chooses for this one; 0 if it chooses for itself.
    """

    page: int
    chosen: int
    parts: tuple[tuple[int, int], ...]
    followed: int = 0

    @property
    def entries(self) -> int:
        """The number of entries."""
        return sum(-(-size // self.page) for _, size in self.parts)

    @property
    def slots(self) -> int:
        """Slots that each head reads of these parts; fewer where the last entry of a part is shorter."""
        return self.chosen * self.page


class Choice(NamedTuple):
    """Tokens that a layer chose in a step, for the layers behind it.

    Attributes:
        positions: Positions of the tokens, the most needed first, -1 for none, [B, H, n] int32.
        slots: Slots of these tokens, [B, H, n] int32.
    """

    positions: Tensor
    slots: Tensor


class ReadState(NamedTuple):
    """Tensors of a layer that does not read all slots.

    Attributes:
        limit: Entries that each row reads, [B] int64: as many as it would alone; see `row_entries`.
        index: The reader's index.
        choice: The choice of the layer; the empty tuple if no other layer reads it.
        rope_offset: Offset of the rotary positions from a row's positions, [B] int64; () unless keys are rebuilt.
    """

    limit: Tensor
    index: Index
    choice: Choice | tuple[()] = ()
    rope_offset: Tensor | tuple[()] = ()


class Board:
    """Where a layer of a cache that chooses shows its tensors to the layers behind it.

    The tensors belong to the layer that chooses, which counts their bytes, and writes its choice in place.

    Attributes:
        choice: Its choice in the running step; the empty tuple before a prompt.
        positions: Positions of its slots, [B, H, S] int32; None before a prompt.
    """

    def __init__(self) -> None:
        """Show nothing before a prompt."""
        self.clear()

    def clear(self) -> None:
        """Show nothing, and let go of the tensors."""
        self.choice: Choice | tuple[()] = ()
        self.positions: Tensor | None = None


def reads_part(reader: Reader, layer_idx: int) -> bool:
    """Whether a layer may read fewer than all slots."""
    return reader.traits.source(layer_idx) is not None


def chooses(reader: Reader, layer_idx: int) -> bool:
    """Whether a layer chooses what it reads, and so may have an index."""
    return reader.traits.source(layer_idx) == layer_idx


def in_host_memory(reader: Reader, layer_idx: int) -> bool:
    """Whether keys and values of a layer lie in host memory, from where a step copies what it reads."""
    traits = reader.traits
    # In a layer that looks at every key to choose, each step would copy them all.
    looks_at_all = chooses(reader, layer_idx) and (traits.choosers_read_all or traits.scans_keys)
    return traits.host and reads_part(reader, layer_idx) and not looks_at_all


def load_basis(reader: Reader, layer_idx: int, device: torch.device | str, heads: slice) -> Tensor | tuple[()]:
    """The basis of the index of a layer, [H, D, r] fp32; the empty tuple if it has none."""
    basis = reader.traits.basis
    if basis is None or not chooses(reader, layer_idx):
        return ()
    return basis.load_basis(layer_idx, device, heads)


def read_shape(reader: Reader, codec: Codec, layout: Layout, layer_idx: int) -> ReadShape | None:
    """Read plan of a layer; None if it reads all slots and chooses for no other layer."""
    shape = _chosen_shape(reader, codec, layout) if reads_part(reader, layer_idx) else None
    if shape is None or chooses(reader, layer_idx):
        return shape
    return _followed_shape(shape)


def _followed_shape(shape: ReadShape) -> ReadShape | None:
    """Read plan of a layer with this shape if another layer chooses for it; None if it reads all slots."""
    # Single tokens: another layer may hold the same tokens in other slots.
    followed = ReadShape(1, shape.slots, shape.parts, shape.page)
    return None if followed.chosen >= followed.entries else followed


def _chosen_shape(reader: Reader, codec: Codec, layout: Layout) -> ReadShape | None:
    slots = _paged_slots(layout)
    if not slots:
        return None
    rebuilds = reader.traits.rebuilds is not None  # keys that are all read too, so that a short row is as in a batch
    wanted = min(reader.count(slots), slots)
    if wanted == slots and not rebuilds:
        return None
    page = reader.page_size(slots)
    if page > 1 and sum(layout.coded):  # so that no group of slots that share parameters is read in part
        group_size = codec.traits.group_size
        page = -(-page // group_size) * group_size
    parts = ((0, layout.exact),)
    if sum(layout.coded):
        parts = tuple(pair for pair in zip(layout.starts(), layout.coded, strict=True) if pair[1])
    shape = ReadShape(page, -(-wanted // page), parts)
    return None if shape.chosen >= shape.entries and not rebuilds else shape


def row_entries(reader: Reader, codec: Codec, shape: ReadShape, tokens: list[int]) -> list[int]:
    """Entries that each row reads, as many as it would alone.

    In a layer that follows another one, a row that would read everything alone has more than `shape.chosen`.

    Args:
        reader: The reader.
        codec: The codec.
        shape: Read plan of the layer.
        tokens: The most tokens that each row may hold.
    """
    layouts = [codec.layout(most) for most in tokens]
    counts = [reader.count(max(_paged_slots(layout), 1)) for layout in layouts]
    # A layer that follows reads single slots, but as many as fill whole pages of the layer that chooses.
    page = shape.followed or shape.page
    limits = [min(-(-count // page) * page // shape.page, shape.chosen) for count in counts]
    if not shape.followed:
        return limits
    alone = [_chosen_shape(reader, codec, layout) for layout in layouts]
    restricted = [own is not None and _followed_shape(own) is not None for own in alone]
    return [limit if follows else shape.chosen + 1 for limit, follows in zip(limits, restricted, strict=True)]


def restricted_rows(reader: Reader, codec: Codec, tokens: list[int]) -> list[bool]:
    """Whether each row would be read in part alone.

    Args:
        reader: The reader.
        codec: The codec.
        tokens: The most tokens that each row may hold.
    """
    return [_chosen_shape(reader, codec, codec.layout(most)) is not None for most in tokens]


def _paged_slots(layout: Layout) -> int:
    return sum(layout.coded) or layout.exact


def choice_size(reader: Reader, codec: Codec, layout: Layout, layer_idx: int) -> int:
    """Tokens of each head that a layer shows to the layers behind it, at most; 0 if it chooses for none."""
    if not reader.traits.shares(layer_idx):
        return 0
    shape = read_shape(reader, codec, layout, layer_idx)
    return _paged_slots(layout) if shape is None else shape.slots


def alloc_reads(
    reader: Reader,
    shape: ReadShape | None,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    layer_idx: int,
    shown: int = 0,
) -> ReadState:
    """The tensors of a layer that may read less than everything; without a shape there is no entry yet.

    Args:
        reader: The reader.
        shape: Read plan of the layer.
        batch: Number of rows.
        heads: Number of KV heads.
        head_dim: Size of a key.
        dtype: Dtype of the keys.
        device: Device of the tensors.
        layer_idx: Index of the layer.
        shown: Tokens that it shows to the layers behind it; see `choice_size`.
    """
    entries = 0 if shape is None else shape.entries
    limit = torch.zeros(batch, dtype=torch.int64, device=device)
    index = reader.alloc(batch, heads, entries, head_dim, dtype, device) if chooses(reader, layer_idx) else ()
    rebuilds = index and reader.traits.rebuilds is not None
    offset = torch.zeros(batch, dtype=torch.int64, device=device) if rebuilds else ()
    if not reader.traits.shares(layer_idx):
        return ReadState(limit, index, rope_offset=offset)
    positions, slots = (torch.zeros(batch, heads, shown, dtype=torch.int32, device=device) for _ in range(2))
    return ReadState(limit, index, Choice(positions, slots), offset)


def by_entry(shape: ReadShape, per_slot: Tensor, lacking: float = -1) -> Tensor:
    """Numbers of slots [B, H, S], such as positions, by entry, [B, H, X, page]; `lacking` behind the end of a part."""
    paged: list[Tensor] = []
    for start, size in shape.parts:
        part = per_slot[..., start : start + size]
        short = -size % shape.page
        paged.append((F.pad(part, (0, short), value=lacking) if short else part).unflatten(-1, (-1, shape.page)))
    return paged[0] if len(paged) == 1 else torch.cat(paged, 2)


def within_entries(reduce: Callable[[Tensor, int], Tensor], per_slot: Tensor) -> Tensor:
    """Reduce [B, H, X, page] over the slots of each entry, [B, H, X]."""
    # In steps: inductor (torch 2.13) unrolls a reduction of 4 int32 numbers, and is several times as slow on 16.
    while per_slot.shape[-1] % 4 == 0:
        per_slot = reduce(per_slot.unflatten(-1, (-1, 4)), -1)
    return reduce(per_slot, -1)


def entry_slots(shape: ReadShape, entries: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of entries [B, H, n].

    Returns:
        The slots, [B, H, n, page] int64, and whether they belong to the entry: the last one of a part may be shorter.
    """
    first = 0
    base: Tensor | int = 0
    end: Tensor | int = 0
    for number, (start, size) in enumerate(shape.parts):
        # `first` counts the entries of earlier parts: slot 0 of entry e is e * page + offset, also after a short entry.
        offset = start - first * shape.page
        if not number:
            base = offset
            end = start + size
        else:
            base = torch.where(entries >= first, offset, base)
            end = torch.where(entries >= first, start + size, end)
        first += -(-size // shape.page)
    slots = (entries * shape.page + base)[..., None] + torch.arange(shape.page, device=entries.device)
    last = end - 1 if isinstance(end, int) else end[..., None] - 1
    inside = slots <= last
    # A slot behind the end of its part repeats the last one, and is not read.
    return slots.clamp_max(last), inside


def entries_of(shape: ReadShape, part: int, slots: Tensor) -> Tensor:
    """The entries of slots, which are counted from the first one of their part."""
    first = sum(-(-size // shape.page) for _, size in shape.parts[:part])
    return slots.div(shape.page, rounding_mode="floor") + first


def written_entries(shape: ReadShape, part: int, slots: Tensor) -> Tensor:
    """The entries of slots of a part, which are counted from the first one of the layer."""
    start, _ = shape.parts[part]
    return entries_of(shape, part, slots - start if start else slots)


def largest_counts(shape: ReadShape, counts: Tensor, positions: Tensor) -> Tensor:
    """The largest of the counts [B, H, S] of the tokens in each entry, [B, H, X] fp32; 0 for an entry without one."""
    # No count is below 0, the logarithm of one token, so that the -1 behind a part is never the largest.
    return by_entry(shape, counts.masked_fill(positions < 0, 0)).amax(-1)


def log_tokens(shape: ReadShape, counts: Tensor | None, positions: Tensor) -> Tensor:
    """Logarithm of the tokens that each entry holds, [B, H, X] fp32; -inf for an entry without one.

    Args:
        shape: Read plan of the layer.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one.
        positions: Positions of all slots, [B, H, S] int32.
    """
    counts = torch.zeros_like(positions, dtype=torch.float32) if counts is None else counts
    return by_entry(shape, counts.masked_fill(positions < 0, -torch.inf), -torch.inf).logsumexp(-1)


def need_of(score: Tensor, empty: Tensor, ranks: Ranks) -> Tensor:
    """How much each entry is needed: its attention weight for the query head that weights it most.

    Args:
        score: Scores of the entries, scaled and capped, [B, H, G, X] fp32.
        empty: Which entries hold no token, [B, H or 1, X] bool.
        ranks: The ranks that hold the other query heads of these KV heads.

    Returns:
        The logarithm of the weight, [B, H, X] fp32; undefined for empty entries.
    """
    # In memory, as are the needs below: what reads numbers of fp32 takes a fraction of what reads positions.
    score = in_memory(score.masked_fill(empty[:, :, None], -torch.inf))
    # Logarithms rank like the weights, and do not underflow to equal zeros.
    need = (score - score.logsumexp(-1, keepdim=True)).amax(2)
    need = ranks.largest(need)
    # A head without a token yields -inf minus -inf, and the bits of NaN may rank above entries that are always read.
    least = torch.finfo(need.dtype).min
    if torch.compiler.is_compiling():  # `nan_to_num` is not vectorized by inductor (torch 2.13)
        return need.masked_fill(need != need, 0.0).clamp_min(least)
    return need.nan_to_num(0.0, torch.inf, least)


def choose(
    shape: ReadShape,
    limit: Tensor,
    needs: Callable[[Tensor], Tensor],
    positions: Tensor,
    length: Tensor,
    recent: int,
    in_slots_order: bool = False,
    *,
    sinks: int = 0,
) -> Read:
    """The slots of the entries that are needed most; ties go to the earlier position.

    Args:
        shape: Read plan of the layer.
        limit: Entries that each row reads, [B] int64.
        needs: How much entries are needed, [B, H, X] fp32, by which of them hold no token, [B, H, X] bool.
        positions: Positions of all slots, [B, H, S] int32.
        length: Tokens that each row has seen, [B] int64.
        recent: The newest tokens whose entries are always read.
        in_slots_order: Whether to return the slots in their order in memory, and not the most needed entry first.
        sinks: Entries with a token at a position below it are always read.
    """
    held = by_entry(shape, positions)
    newest = within_entries(torch.amax, held)
    earliest = within_entries(torch.amin, held.masked_fill(held < 0, BEYOND))
    empty = newest < 0
    need = needs(empty)
    outside = positions[..., : shape.parts[0][0]]  # a codec's full-precision buffer; parts reach to the last slot
    first = torch.cat([earliest, outside.masked_fill(outside < 0, BEYOND)], -1).amin(-1, keepdim=True)
    last = length.int()[:, None, None] - 1
    always = newest > last - recent
    need = need.masked_fill(always | (earliest < sinks) if sinks else always, RECENT)
    need = need.masked_fill(earliest == first, FIRST)
    # Masked last: in a row without any token, `last` is -1, as is the `newest` of its empty entries.
    need = in_memory(need.masked_fill(newest == last, NEWEST).masked_fill(empty, -torch.inf))
    entries = largest(need, earliest, shape.chosen)
    within = torch.arange(shape.chosen, device=limit.device) < limit[:, None, None]
    kept = within & (need.gather(-1, entries) > -torch.inf)
    if in_slots_order:
        entries, order = entries.sort(-1)
        kept = kept.gather(-1, order)
    slots, inside = entry_slots(shape, entries)
    return Read(slots.flatten(2), (inside & kept[..., None]).flatten(2), entries, kept)


def show(choice: Choice, chosen: Read, positions: Tensor) -> None:
    """Write what a layer chose of its slots, with `positions` [B, H, S] int32, where the layers behind it read it."""
    choice.positions.copy_(positions.gather(-1, chosen.slots).masked_fill(~chosen.chosen, -1))
    choice.slots.copy_(chosen.slots)


def every_slot(layout: Layout, positions: Tensor) -> Read:
    """All slots that a reader divides, of a layer with `positions` [B, H, S] int32; the newest tokens first."""
    start = layout.exact if sum(layout.coded) else 0
    slots = positions[..., start:].sort(-1, descending=True).indices + start
    return Read(slots, torch.ones_like(slots, dtype=torch.bool))


def follow(
    shape: ReadShape, limit: Tensor, choice: Choice, positions: Tensor, length: Tensor, same_slots: bool
) -> Read:
    """The slots of the tokens that another layer chose, as far as this one holds them, and of the newest token.

    Args:
        shape: Read plan of this layer.
        limit: Slots that each row reads, [B] int64; everything if they are more than `shape.chosen`.
        choice: The choice of the other layer.
        positions: Positions of all slots of this layer, [B, H, S] int32.
        length: Tokens that each row has seen, [B] int64.
        same_slots: Whether both layers hold the same tokens in the same slots.
    """
    within = torch.arange(shape.chosen, device=limit.device) < limit[:, None, None]
    if same_slots and choice.slots.shape[-1] == shape.chosen:
        slots = choice.slots.long()
        # Compared nevertheless, so that no other token is ever read in the place of the chosen one.
        found = (choice.positions >= 0) & (positions.gather(-1, slots) == choice.positions)
        return Read(slots, found & within)
    held = by_entry(shape, positions).squeeze(-1).contiguous()
    wanted, order = choice.positions.sort(-1)
    place = torch.searchsorted(wanted, held).clamp_max(wanted.shape[-1] - 1)
    # An empty slot and a missing token of the choice are both -1, and must not match.
    found = (wanted.gather(-1, place) == held) & (held >= 0)
    rank = order.gather(-1, place).masked_fill(~found, BEYOND)
    # Last, in a row of few tokens, what the other layer did not choose, or does not hold.
    rank = torch.where(found | (held < 0) | (limit <= shape.chosen)[:, None, None], rank, BEYOND - 1)
    # Where layers differ in size, the other one may hold it in a codec's full-precision buffer, which it does not show.
    rank = rank.masked_fill((held == length[:, None, None] - 1) & (held >= 0), -1)
    # A head holds a position once, so there are no ties but of slots that are not read.
    top = rank.topk(shape.chosen, -1, largest=False)
    slots, inside = entry_slots(shape, top.indices)
    return Read(slots.flatten(2), inside.flatten(2) & (top.values < BEYOND) & within)


def channel_salience(sums: AbsoluteSums, count: Tensor, ranks: Ranks) -> Tensor:
    """Mean absolute query times mean absolute key of each channel, over all pairs of a prompt, [B, H, D] fp32.

    Args:
        sums: The sums of the prompt.
        count: Its tokens in each row, [B] int64.
        ranks: The ranks that hold the other query heads of these KV heads.
    """
    tokens = count.clamp_min(1)[:, None, None]
    queries = ranks.group_mean((sums.queries / tokens).unflatten(1, (sums.keys.shape[1], -1)))
    return (queries * (sums.keys / tokens)).float()


def key_codes(codes: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors of codes that scores are computed from: all but those of values, by the names of their fields."""
    return tuple(tensor for name, tensor in fields(codes) if "value" not in name)


def value_codes(codes: Codes) -> tuple[Tensor, ...]:
    """The tensors of codes that values are decoded from: those that `key_codes` leaves out."""
    return tuple(tensor for name, tensor in fields(codes) if "value" in name)


def unscanned(buffer: tuple[Tensor, Tensor], codes: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Tensors that are still read after a scan of a layer's keys; with codes, a scan reads the coded keys alone."""
    if not codes:
        return (buffer[1],)
    return (*buffer, *value_codes(codes))

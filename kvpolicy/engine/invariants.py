"""Invariants of a layer after every operation, whatever its parts; tests check them wherever a layer changed.

Everything is counted again from positions and owners alone, without the functions that the engine counts with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.journal import UNDO_LOG
from kvpolicy.engine.layer_group import LayerGroup
from kvpolicy.engine.layer_slots import LayerSlots
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layer_tensors import PageTensors
from kvpolicy.engine.reading import by_entry, read_shape, row_entries
from kvpolicy.engine.row_limits import has_dictionary, stage_slots, with_tokens
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.engine.state import map_state
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.protocols import Changed

_TOLERANCE = 1e-3
"""Relative error of a sum of tokens that are stored as logarithms in fp32."""


def check_invariants(store: LayerStore, *, keeps_newest: bool = True) -> None:
    """Check a layer between two operations: after a prompt, after a step and its work, after rows were selected.

    - A head holds a position once, and no position that its row has not seen.
    - A head of a row that has begun holds the row's newest token; with head budgets, it owns a page.
    - No head holds more tokens than its budget, its pages and its row's slots allow, and no buffer is full.
    - Nothing stands in a page without an owner, or in a slot that its row may not use.
    - Keys and values that lie in host memory are those of the reader, and everything else is on the device.
    - An empty slot holds finite numbers, since its weight of 0 times an infinite one would be NaN.
    - The layers of a group hold the same tokens in the same slots, and no block of them waits.
    - Counters, limits, the reader's index and the number of bytes equal a recount.
    - The slots of a shared prefix are as they were when they were shared.

    Args:
        store: The layer.
        keeps_newest: Whether the selector keeps the newest token of a prompt, as those of policies do.

    Raises:
        AssertionError: If one of these does not hold; the message says which, and where.
    """
    if not store.is_initialized:
        return
    positions = _positions_by_head(store)
    _check_rows(store)
    _check_places(store)
    _check_positions(store, positions, keeps_newest)
    _check_budget(store, positions)
    if store.tensors.pages is not None:
        _check_pages(store, store.tensors.pages, positions)
    else:
        _check_slots(store)
    if store.slots is not None:
        _check_index(store, store.slots)
    if store.contents.group is not None:
        _check_group(store, store.contents.group)
    if store.tensors.positions.numel():  # there are no slots while a first prompt is held
        _check_buffer(store)
    _check_numbers(store, positions)
    _check_counts(store)
    if store.prefix is not None:
        _require(store.prefix.is_unchanged, store, "a shared prefix is as it was")


def _require(fine: Tensor | bool, store: LayerStore, rule: str) -> None:
    """Fail unless all elements of `fine` are true; its first dimensions are rows and heads."""
    if isinstance(fine, bool):
        assert fine, f"layer {store.layer_idx}: {rule}"
        return
    broken = (~fine).nonzero().tolist()
    assert not broken, f"layer {store.layer_idx}: {rule}; not so at {broken[:4]}"


def _positions_by_head(store: LayerStore) -> Tensor:
    """The positions that each head holds, [B, H, N], -1 for a slot that is empty or belongs to another head."""
    tensors = store.tensors
    if tensors.pages is None:
        return tensors.positions
    owner = tensors.pages.owner
    mine = owner[:, None] == torch.arange(store.shape.heads, device=owner.device)[:, None]
    return torch.where(mine[..., None], tensors.positions[:, None], -1).flatten(2)


def _check_rows(store: LayerStore) -> None:
    layer = store.contents
    tensors = store.tensors
    batch = tensors.length.shape[0]
    slots = (tensors.keys, tensors.values, tensors.positions, tensors.state, tensors.counts, tensors.codes)
    per_row = all_tensors((*slots, tensors.merged, tensors.reads))
    _require(all(t.shape[0] == batch for t in per_row), store, "every tensor has all rows")
    _require(len(layer.expected_len) == batch, store, "expected_len has all rows")
    _require(len(layer.schedule.ranked_len) == batch, store, "the rank schedule has all rows")
    _require(tensors.length <= tensors.columns, store, "a row has no more tokens than columns")
    _require(tensors.columns == layer.columns, store, "the host has counted the columns of the device")


def _check_places(store: LayerStore) -> None:
    """Keys and values of a layer that looks at few of them lie in host memory, if its reader says so; nothing else."""
    tensors = store.tensors
    spec = store.spec
    chosen = store.slots is not None and spec.reader_traits.source(store.layer_idx) is not None
    looks_at_all = spec.reader_traits.source(store.layer_idx) == store.layer_idx and (
        spec.reader_traits.choosers_read_all or spec.reader_traits.scans_keys
    )
    host = spec.reader_traits.host and chosen and not looks_at_all
    _require(tensors.host == host, store, "keys and values lie where the reader says")
    device = tensors.length.device
    for name, part in tensors.parts().items():
        own = torch.device("cpu") if host and name in ("keys", "values") else device
        _require(all(t.device == own for t in all_tensors(part)), store, f"{name} lie on {own}")
    vectors = tensors.keys.nbytes + tensors.values.nbytes
    held = store.nbytes_by_kind()
    _require((held["exact"], held.get("host", 0)) == ((0, vectors) if host else (vectors, 0)), store, "bytes by place")


def _check_positions(store: LayerStore, positions: Tensor, keeps_newest: bool) -> None:
    tensors = store.tensors
    length = tensors.length[:, None, None]
    _require((positions >= -1) & (positions < length), store, "positions are those of tokens that the row has seen")
    ordered = positions.sort(-1).values
    _require((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0), store, "a head holds a position once")
    newest = (positions == length - 1).any(-1)
    if keeps_newest:
        _require(newest | (tensors.length == 0)[:, None], store, "a head holds its row's newest token")


def _check_budget(store: LayerStore, positions: Tensor) -> None:
    layer = store.contents
    tensors = store.tensors
    heads = layer.shape.heads
    held = (positions >= 0).sum(-1)
    expected = torch.tensor(layer.expected_len, device=held.device)
    if layer.row_pages is None:
        _require(held <= tensors.budget[:, None], store, "a head holds at most its budget")
        _require(held <= expected[:, None], store, "a head holds at most the tokens that its row has slots for")
    elif not store.spec.grows and sum(layer.ranks.heads) in (0, heads):  # a single rank may leave its heads out
        # Beyond the announced tokens, the last page of a head may be filled: of every head in a growing cache, and of
        # heads with equally many pages in a row that was announced no more tokens than its budget.
        size = layer.row_pages.size.to(held.device).clamp_min(1)
        rounded = -(-tensors.budget // size) * size
        pages = (tensors.paged().owner[:, None] == torch.arange(heads, device=held.device)[:, None]).sum(-1)
        most = torch.where((pages == pages[:, :1]).all(-1), rounded, tensors.budget)
        _require(held.sum(-1) <= most * heads, store, "the heads hold at most the budget of their layer")


def _check_slots(store: LayerStore) -> None:
    layer = store.contents
    tensors = store.tensors
    layout = layer.layout
    _require(tensors.positions.shape[-1] == layout.slots, store, "there are as many slots as the layout says")
    sizes = (tensors.keys.shape[2], tensors.values.shape[2])
    _require(sizes == (layout.exact, layout.exact), store, "keys and values have the slots of the buffer")
    if tensors.limits is None:
        return
    # A budget that shrinks with a later prompt leaves tokens in slots that the row was given before.
    given = stage_slots([store.spec.codec.layout(count) for count in layer.expected_len], len(store.spec.stages))
    most = tensors.limits.stage_capacity.maximum(tensors.limits.stage_capacity.new_tensor(given))
    for stage, (start, size) in enumerate(zip(layout.starts(), layout.coded, strict=True)):
        slot = torch.arange(size, device=tensors.positions.device)
        coded = tensors.positions[..., start : start + size]
        within = (slot < most[:, stage, None, None]) | (coded < 0)
        _require(within, store, f"a row uses no more slots of stage {stage} than it would alone")
    if layer.reserved:
        first = tensors.positions[..., : layer.reserved]
        fine = (first < 0) | (first == tensors.limits.pins) | ~has_dictionary(tensors.limits)
        _require(fine, store, "dictionary slots hold their own tokens")


def _check_pages(store: LayerStore, pages: PageTensors, positions: Tensor) -> None:
    layer = store.contents
    tensors = store.tensors
    owner = pages.owner
    heads = layer.shape.heads
    head = torch.arange(heads, device=owner.device)[:, None]
    size = tensors.positions.shape[-1]
    buffer = tensors.keys.shape[2] if store.spec.stages else 0
    behind = -(-buffer // size) * heads if buffer else 0
    body = owner[:, : owner.shape[1] - behind]
    _require((owner >= 0) & (owner <= heads), store, "the owner of a page is a head, or none")
    _require((owner < heads)[..., None] | (tensors.positions < 0), store, "a page without an owner holds nothing")
    owned = (body[:, None] == head).sum(-1)
    _require((owned >= 1) | (tensors.length == 0)[:, None], store, "a head of a row that has begun owns a page")
    _require((positions >= 0).sum(-1) <= owned * size, store, "a head holds at most what its pages have slots for")
    if behind:
        buffers = tensors.positions[:, body.shape[1] :].unflatten(1, (heads, -1)).flatten(2)
        _require(buffers[..., buffer:] < 0, store, "nothing stands behind the end of a buffer")
        of_buffers = owner[:, body.shape[1] :].unflatten(1, (heads, -1))
        _require(of_buffers == head, store, "the pages of a buffer belong to its head")
    # Before the first prompt is compressed, as while it is held, a row has no budget.
    fits = tensors.budget <= tensors.budget.new_tensor(layer.expected_len)
    counted = pages.complete == (fits & (not store.spec.grows))
    _require(counted | (tensors.budget == 0), store, "`complete` equals a recount")


def _check_buffer(store: LayerStore) -> None:
    """The full-precision buffer is not full, and its empty slots cannot turn a sum into NaN."""
    layer = store.contents
    tensors = store.tensors
    buffer = tensors.positions
    if layer.layout.coded and tensors.pages is not None:
        pages = -(-tensors.keys.shape[2] // buffer.shape[-1]) * layer.shape.heads if tensors.keys.shape[2] else 0
        buffer = buffer[:, buffer.shape[1] - pages :].unflatten(1, (layer.shape.heads, -1)).flatten(2)
        buffer = buffer[..., : tensors.keys.shape[2]]
    elif tensors.pages is None:
        buffer = buffer[..., : layer.layout.exact]
    if tensors.limits is not None:
        usable = torch.ones_like(buffer, dtype=torch.bool)
        if layer.reserved:
            usable[..., : layer.reserved] = ~has_dictionary(tensors.limits)
        held = ((buffer >= 0) & usable).sum(-1)
        _require(held < tensors.limits.flush_threshold, store, "a full buffer was demoted")
    occupied = (buffer >= 0)[..., None]
    for name, held in (("keys", tensors.keys), ("values", tensors.values)):
        tensor = held.to(occupied.device)
        if bool((tensor.isfinite() | ~occupied).all()):  # else the model gave what is not finite
            _require(tensor.isfinite() | occupied, store, f"{name} of empty slots are finite")


def _check_numbers(store: LayerStore, positions: Tensor) -> None:
    """Numbers on the host, and the results of counting calls, equal a recount of the tensors."""
    layer = store.contents
    tensors = store.tensors
    _require(store.geometry.tokens_by_head() == (positions >= 0).sum(-1), store, "tokens_by_head equals a recount")
    _require(layer.free_steps <= store.geometry.count_free_steps(), store, "no step is counted that has no slot")
    full = (tensors.positions >= 0).all()
    _require(full | (not layer.is_full), store, "a layer that is noted as full has no empty slot")
    fine = not layer.evicts or layer.holds_all_it_may()
    _require(fine, store, "a layer that is noted to evict holds all that it may")
    _require(not layer.in_order or layer.holds_in_order(), store, "a layer that is noted as in order is")
    lengths = tensors.length.tolist()
    fine = all(ranked <= seen for ranked, seen in zip(layer.schedule.ranked_len, lengths, strict=True))
    _require(fine, store, "no row was ranked with tokens that it has not seen")
    kinds = store.nbytes_by_kind()
    kinds.pop(UNDO_LOG, 0)
    held = sum(t.nbytes for t in all_tensors(tuple(tensors.parts().values())))
    _require(sum(kinds.values()) == held, store, "the bytes by kind sum to those of all tensors")
    if tensors.limits is not None and bool((tensors.budget > 0).any()):
        allocated = [min(pair) for pair in zip(tensors.budget.tolist(), layer.expected_len, strict=True)]
        again = with_tokens(tensors.limits, store.spec.codec, allocated, layer.reserved)
        fine = all(
            torch.equal(now, then) for now, then in zip(all_tensors(tensors.limits), all_tensors(again), strict=True)
        )
        _require(fine, store, "limits equal those of the budget")


def _check_counts(store: LayerStore) -> None:
    """No slot stands for less than one token, and all of them for no more than the row has seen."""
    tensors = store.tensors
    counts = tensors.log_counts
    if counts is None:
        return
    occupied = tensors.positions >= 0
    _require((counts >= 0) | ~occupied, store, "a slot stands for at least one token")
    total = counts.exp().masked_fill(~occupied, 0).sum(-1)
    if tensors.pages is not None:  # of each page, and now of each head
        head = torch.arange(store.shape.heads, device=total.device)[:, None]
        total = (total[:, None] * (tensors.pages.owner[:, None] == head)).sum(-1)
    _require(total <= tensors.length[:, None] * (1 + _TOLERANCE), store, "slots stand for tokens that the row has seen")


def _check_group(store: LayerStore, group: LayerGroup) -> None:
    """The layers of a group are alike in all that says what a slot holds."""
    _require(not group.waits, store, "no block waits for the other layers of a group")
    first = group.layers[0]
    same = first.tensors.positions.shape == store.tensors.positions.shape
    _require(same, store, "the layers of a group have equally many slots")
    held = store.tensors.positions == first.tensors.positions
    _require(held, store, "the layers of a group hold the same tokens in the same slots")


def _check_index(store: LayerStore, slots: SlotGeometry) -> None:
    """The reader's index of entries with a token equals an index that is made from the slots now."""
    layer = store.contents
    tensors = store.tensors
    reads = tensors.reads
    if not reads:
        return
    shape = read_shape(store.spec.reader, store.spec.codec, layer.layout, store.layer_idx)
    _require(shape == slots.index.shape, store, "what is read follows from the layout")
    if shape is None:
        return
    limit = row_entries(store.spec.reader, store.spec.codec, shape, layer.expected_len)
    _require(reads.limit == reads.limit.new_tensor(limit), store, "a row reads as many entries as it would alone")
    if not reads.index or not bool((tensors.length > 0).all()):
        return
    fresh = reads._replace(index=map_state(torch.clone, reads.index))
    entries = torch.arange(shape.entries, device=tensors.positions.device).expand(*tensors.positions.shape[:2], -1)
    store.spec.reader.update(fresh.index, LayerSlots(layer, slots.codes, shape), Changed(entries))
    empty = by_entry(shape, tensors.positions).amax(-1) < 0  # what the index holds of such an entry is never read
    for now, then in zip(all_tensors(reads.index), all_tensors(fresh.index), strict=True):
        by_entries = now.shape[:3] == empty.shape
        ignored = empty.view(*empty.shape, *[1] * (now.dim() - 3)) if by_entries else torch.zeros_like(now).bool()
        _require((now == then) | ignored, store, "the index equals a recomputation")

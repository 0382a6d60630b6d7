"""Invariants of a layer after every operation, whatever its parts; tests check them wherever a layer changed.

Everything is counted again from positions and owners alone, without the functions that the engine counts with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.paged_store import PagedStore
from kvpolicy.engine.reading import ReadState, by_entry, read_shape, row_entries
from kvpolicy.engine.row_limits import has_dictionary, stage_slots, with_tokens
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.engine.store import LayerStore
from kvpolicy.engine.undo_log import UNDO_LOG

_TOLERANCE = 1e-3
"""Relative error of a sum of tokens that are stored as logarithms in fp32."""


def check_invariants(store: LayerStore, *, keeps_newest: bool = True) -> None:
    """Check a layer between two operations: after a prompt, after a step and its work, after rows were selected.

    - A head holds a position once, and no position that its row has not seen.
    - A head of a row that has begun holds the row's newest token; with head budgets, it owns a page.
    - No head holds more tokens than its budget, its pages and its row's slots allow, and no buffer is full.
    - Nothing stands in a page without an owner, or in a slot that its row may not use.
    - An empty slot holds finite numbers, since its weight of 0 times an infinite one would be NaN.
    - Counters, limits, the reader's index and the number of bytes equal a recount.

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
    _check_positions(store, positions, keeps_newest)
    _check_budget(store, positions)
    if isinstance(store, PagedStore):
        _check_pages(store, positions)
    else:
        _check_slots(store)
        _check_index(store)
    if store.positions.numel():  # there are no slots while a first prompt is held
        _check_buffer(store)
    _check_numbers(store, positions)
    _check_counts(store)


def _require(fine: Tensor | bool, store: LayerStore, rule: str) -> None:
    """Fail unless all elements of `fine` are true; its first dimensions are rows and heads."""
    if isinstance(fine, bool):
        assert fine, f"layer {store.layer_idx}: {rule}"
        return
    broken = (~fine).nonzero().tolist()
    assert not broken, f"layer {store.layer_idx}: {rule}; not so at {broken[:4]}"


def _positions_by_head(store: LayerStore) -> Tensor:
    """The positions that each head holds, [B, H, N], -1 for a slot that is empty or belongs to another head."""
    if not isinstance(store, PagedStore):
        return store.positions
    heads = torch.arange(store.heads, device=store.owner.device)
    mine = store.owner[:, None] == heads[:, None]
    return torch.where(mine[..., None], store.positions[:, None], -1).flatten(2)


def _check_rows(store: LayerStore) -> None:
    batch = store.length.shape[0]
    per_row = (store.keys, store.values, store.positions, store.state, store.counts, store.merged, store.codes)
    _require(all(t.shape[0] == batch for t in tensors((*per_row, store.reads))), store, "every tensor has all rows")
    _require(len(store.expected_len) == batch, store, "expected_len has all rows")
    _require(len(store.schedule.ranked_len) == batch, store, "the rank schedule has all rows")
    _require(store.length <= store.columns, store, "a row has no more tokens than columns")


def _check_positions(store: LayerStore, positions: Tensor, keeps_newest: bool) -> None:
    length = store.length[:, None, None]
    _require((positions >= -1) & (positions < length), store, "positions are those of tokens that the row has seen")
    ordered = positions.sort(-1).values
    _require((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0), store, "a head holds a position once")
    newest = (positions == length - 1).any(-1)
    if keeps_newest:
        _require(newest | (store.length == 0)[:, None], store, "a head holds its row's newest token")


def _check_budget(store: LayerStore, positions: Tensor) -> None:
    held = (positions >= 0).sum(-1)
    expected = torch.tensor(store.expected_len, device=held.device)
    if not isinstance(store, PagedStore):
        _require(held <= store.budget[:, None], store, "a head holds at most its budget")
        _require(held <= expected[:, None], store, "a head holds at most the tokens that its row has slots for")
    elif not store.grows and sum(store.ranks.heads) in (0, store.heads):  # a single rank may leave its heads out
        # Beyond the announced tokens, the last page of a head may be filled: of every head in a growing cache, and of
        # equal heads in a row that was announced no more tokens than its budget.
        size = store._rows.size.to(held.device).clamp_min(1)  # pyright: ignore[reportPrivateUsage]
        rounded = -(-store.budget // size) * size
        most = torch.where((held == held[:, :1]).all(-1), rounded, store.budget)
        _require(held.sum(-1) <= most * store.heads, store, "the heads hold at most the budget of their layer")


def _check_slots(store: LayerStore) -> None:
    layout = store.layout
    _require(store.positions.shape[-1] == layout.slots, store, "there are as many slots as the layout says")
    sizes = (store.keys.shape[2], store.values.shape[2])
    _require(sizes == (layout.exact, layout.exact), store, "keys and values have the slots of the buffer")
    if store.limits is None:
        return
    # A budget that shrinks with a later prompt leaves tokens in slots that the row was given before.
    given = stage_slots([store.codec.layout(count) for count in store.expected_len], len(store.codec.stages))
    most = store.limits.stage_capacity.maximum(store.limits.stage_capacity.new_tensor(given))
    for stage, (start, size) in enumerate(zip(layout.starts(), layout.coded, strict=True)):
        slot = torch.arange(size, device=store.positions.device)
        coded = store.positions[..., start : start + size]
        within = (slot < most[:, stage, None, None]) | (coded < 0)
        _require(within, store, f"a row uses no more slots of stage {stage} than it would alone")
    if store.reserved:
        first = store.positions[..., : store.reserved]
        fine = (first < 0) | (first == store.limits.pins) | ~has_dictionary(store.limits)
        _require(fine, store, "dictionary slots hold their own tokens")


def _check_pages(store: PagedStore, positions: Tensor) -> None:
    size = store.positions.shape[-1]
    buffer = store.keys.shape[2] if store.codec.stages else 0
    behind = -(-buffer // size) * store.heads if buffer else 0
    body = store.owner[:, : store.owner.shape[1] - behind]
    _require((store.owner >= 0) & (store.owner <= store.heads), store, "the owner of a page is a head, or none")
    _require(
        (store.owner < store.heads)[..., None] | (store.positions < 0), store, "a page without an owner holds nothing"
    )
    owned = (body[:, None] == torch.arange(store.heads, device=body.device)[:, None]).sum(-1)
    _require((owned >= 1) | (store.length == 0)[:, None], store, "a head of a row that has begun owns a page")
    _require((positions >= 0).sum(-1) <= owned * size, store, "a head holds at most what its pages have slots for")
    if behind:
        buffers = store.positions[:, body.shape[1] :].unflatten(1, (store.heads, -1)).flatten(2)
        _require(buffers[..., buffer:] < 0, store, "nothing stands behind the end of a buffer")
        of_buffers = store.owner[:, body.shape[1] :].unflatten(1, (store.heads, -1))
        heads = torch.arange(store.heads, device=body.device)[:, None]
        _require(of_buffers == heads, store, "the pages of a buffer belong to its head")
    # Before the first prompt is compressed, as while it is held, a row has no budget.
    counted = store.complete == store._find_complete()  # pyright: ignore[reportPrivateUsage]
    _require(counted | (store.budget == 0), store, "`complete` equals a recount")


def _check_buffer(store: LayerStore) -> None:
    """The full-precision buffer is not full, and its empty slots cannot turn a sum into NaN."""
    buffer = store.positions
    if store.layout.coded and isinstance(store, PagedStore):
        pages = -(-store.keys.shape[2] // buffer.shape[-1]) * store.heads if store.keys.shape[2] else 0
        buffer = buffer[:, buffer.shape[1] - pages :].unflatten(1, (store.heads, -1)).flatten(2)
        buffer = buffer[..., : store.keys.shape[2]]
    elif not isinstance(store, PagedStore):
        buffer = buffer[..., : store.layout.exact]
    if store.limits is not None:
        usable = torch.ones_like(buffer, dtype=torch.bool)
        if store.reserved:
            usable[..., : store.reserved] = ~has_dictionary(store.limits)
        held = ((buffer >= 0) & usable).sum(-1)
        _require(held < store.limits.flush_threshold, store, "a full buffer was demoted")
    occupied = (buffer >= 0)[..., None]
    for name, tensor in (("keys", store.keys), ("values", store.values)):
        if bool((tensor.isfinite() | ~occupied).all()):  # else the model gave what is not finite
            _require(tensor.isfinite() | occupied, store, f"{name} of empty slots are finite")


def _check_numbers(store: LayerStore, positions: Tensor) -> None:
    """Numbers on the host, and the results of counting calls, equal a recount of the tensors."""
    _require(store.tokens_by_head() == (positions >= 0).sum(-1), store, "tokens_by_head equals a recount")
    _require(store.free_steps <= store._count_free_steps(), store, "no step is counted that has no slot")  # pyright: ignore
    fine = all(ranked <= seen for ranked, seen in zip(store.schedule.ranked_len, store.length.tolist(), strict=True))
    _require(fine, store, "no row was ranked with tokens that it has not seen")
    kinds = store.nbytes_by_kind()
    kinds.pop(UNDO_LOG, 0)
    held = sum(t.nbytes for t in tensors(tuple(store.parts().values())))
    _require(sum(kinds.values()) == held, store, "the bytes by kind sum to those of all tensors")
    if store.limits is not None and bool((store.budget > 0).any()):
        allocated = [min(pair) for pair in zip(store.budget.tolist(), store.expected_len, strict=True)]
        again = with_tokens(store.limits, store.codec, allocated, store.reserved)
        fine = all(torch.equal(now, then) for now, then in zip(store.limits, again, strict=True))
        _require(fine, store, "limits equal those of the budget")


def _check_counts(store: LayerStore) -> None:
    """No slot stands for less than one token, and all of them for no more than the row has seen."""
    counts = store.log_counts
    if counts is None:
        return
    occupied = store.positions >= 0
    _require((counts >= 0) | ~occupied, store, "a slot stands for at least one token")
    total = counts.exp().masked_fill(~occupied, 0).sum(-1)
    _require(total <= store.length[:, None] * (1 + _TOLERANCE), store, "slots stand for tokens that the row has seen")


def _check_index(store: LayerStore) -> None:
    """The reader's index of entries with a token equals an index that is made from the slots now."""
    reads = store.reads
    if not reads:
        return
    shape = read_shape(store.reader, store.codec, store.layout, store.layer_idx)
    _require(shape == store.read_shape, store, "what is read follows from the layout")
    if shape is None:
        return
    limit = row_entries(store.reader, store.codec, shape, store.expected_len)
    _require(reads.limit == reads.limit.new_tensor(limit), store, "a row reads as many entries as it would alone")
    if not reads.index or not bool((store.length > 0).all()):
        return
    fresh = ReadState(reads.limit, map_state(torch.clone, reads.index), reads.choice)
    entries = torch.arange(shape.entries, device=store.positions.device).expand(*store.positions.shape[:2], -1)
    store._refresh(shape, fresh, entries)  # pyright: ignore[reportPrivateUsage]
    empty = by_entry(shape, store.positions).amax(-1) < 0  # what the index holds of such an entry is never read
    for now, then in zip(tensors(reads.index), tensors(fresh.index), strict=True):
        by_entries = now.shape[:3] == empty.shape
        ignored = empty.view(*empty.shape, *[1] * (now.dim() - 3)) if by_entries else torch.zeros_like(now).bool()
        _require((now == then) | ignored, store, "the index equals a recomputation")

"""The rules for the results of a reader."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.layer_slots import LayerSlots
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.reading import by_entry
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import Read, Reader
from kvpolicy.selectors.full import KeepAll
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.testing.part_checks import describe

_TOKENS = 1000


def check_reader(part: Reader) -> None:
    """Check how many slots a reader reads, and that an entry depends on the tokens in its own slots alone."""
    for slots in (1, 7, 64, _TOKENS, 100_000):
        page = part.page_size(slots)
        count = part.count(slots)
        is_page = isinstance(page, int) and page >= 1  # pyright: ignore[reportUnnecessaryIsInstance]
        assert is_page, f"{part}: page_size must be an integer of at least 1, got {page!r} for {slots} slots"
        fits = count == slots or (0 < count < slots and count % page == 0)
        assert fits, f"{part}: count must be a multiple of the page, {page}, or all {slots} slots, got {count!r}"
    if part.count(_TOKENS) == _TOKENS:
        return
    # What a reader of coordinates is given has as many channels as its basis has directions.
    loads = part.traits.basis
    basis = None if loads is None else loads.load_basis(0, "cpu")
    dim = 16 if basis is None else basis.shape[1]
    actual, planned = (
        [(list(each.shape), each.dtype) for each in tensors(part.alloc(2, 2, 5, dim, torch.float32, device))]
        for device in ("cpu", "meta")
    )
    assert actual == planned, f"{part}: an index must have the same sizes on the device meta, got {planned}"
    if type(part).update is Reader.update and type(part).choose is Reader.choose:
        _check_entries(part, dim, 16 if basis is None else basis.shape[2])
    _check_layer(part, 2 if basis is None or len(basis) == 1 else len(basis), dim)


def _check_entries(part: Reader, dim: int, width: int) -> None:
    """Check `refresh` and `score` of a reader of keys with `width` channels."""
    page = part.page_size(_TOKENS)
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 2, 5, page, width, generator=generator)
    queries = torch.randn(2, 2, 2, width, generator=generator)
    occupied = torch.rand(2, 2, 5, page, generator=generator) < 0.7
    every = torch.arange(5).expand(2, 2, -1)
    index = part.alloc(2, 2, 5, dim, torch.float32, "cpu")
    part.refresh(index, every, keys, occupied)
    shown = part.score(index, queries, _ProductsOf(keys.flatten(2, 3)))
    is_score = shown.dtype == torch.float32 and shown.shape[:3] == (2, 2, 2)
    assert is_score, f"{part}: score must be float32 [B, H, G, X], got {describe(shown)}"
    before = map_state(torch.clone, index)
    part.refresh(index, every[..., 3:4], keys[:, :, 3:4] * 2, occupied[:, :, 3:4])
    for now, then in zip(tensors(index), tensors(before), strict=True):
        kept = now.shape[2] != 5 or torch.equal(now[:, :, [0, 1, 2, 4]], then[:, :, [0, 1, 2, 4]])
        assert kept, f"{part}: refresh must change the given entries only, got others changed too"
    part.refresh(index, every[..., 3:4], keys[:, :, 3:4], occupied[:, :, 3:4])
    for now, then in zip(tensors(index), tensors(before), strict=True):
        assert torch.equal(now, then), f"{part}: refresh must compute an entry from its keys, got a trace of others"


class _ProductsOf:
    """The products with keys [B, H, S, D]; see `Products`."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys

    def __call__(self, queries: Tensor, channels: Tensor | None = None, /) -> Tensor:
        if channels is not None:
            inside = torch.zeros_like(queries[:, :, 0], dtype=torch.bool).scatter(-1, channels, True)
            queries = queries.masked_fill(~inside[:, :, None], 0)
        return queries @ self._keys.mT

    def group_mean(self, of_heads: Tensor, /) -> Tensor:
        return of_heads.mean(2)


def _check_layer(part: Reader, heads: int, dim: int) -> None:
    """Check `update` and `choose` in a layer of two rows, one of them with padding, that has empty slots."""
    layer_idx = next(idx for idx in range(_TOKENS) if part.traits.source(idx) == idx)
    store = LayerStore(LayerSpec(layer_idx, KeepAll(), Plain(), "grow", reader=part))
    # A prompt of two rows, and room for seven more tokens, which leaves empty slots.
    generator = torch.Generator().manual_seed(4)
    queries, keys, values = (
        torch.randn(2, each, _TOKENS, dim, generator=generator) for each in (2 * heads, heads, heads)
    )
    valid = torch.arange(_TOKENS) >= torch.tensor([[0], [7]])
    transform = ScoreTransform(dim**-0.5)
    store.initialize(keys)
    _, pending = store.attend_prompt(queries, keys, values, valid, transform)
    keep = valid.sum(-1)
    extra = torch.full_like(keep, 7)
    store.compress(pending, RowBudget(keep, extra, keep + extra))
    assert store.slots is not None
    shape = store.slots.index.shape
    held = store.tensors
    reads = store.tensors.reads
    if shape is None or not reads:
        return
    # Empty slots hold anything: entries of others must not depend on it.
    before = map_state(torch.clone, reads.index)
    empty = held.positions < 0
    held.keys[empty] = torch.nan
    held.values[empty] = torch.nan
    store.slots.index.fill()
    live = by_entry(shape, held.positions).amax(-1) >= 0
    for now, then in zip(tensors(reads.index), tensors(before), strict=True):
        by_entries = now.shape[:3] == live.shape
        same = torch.equal(now[live], then[live]) if by_entries else torch.equal(now, then)
        assert same, f"{part}: update must ignore slots without a token, got another index with NaN there"
    slots = LayerSlots(store.contents, store.slots.codes, shape, transform)
    read = part.choose(reads.index, slots, slots.coordinates(queries[:, :, -1].unflatten(1, (heads, 2))))
    _check_read(part, read, shape.slots, held.positions, held.length)


def _check_read(part: Reader, read: Read, count: int, positions: Tensor, length: Tensor) -> None:
    """Check what a step of two queries for each head reads of slots at `positions` [2, H, S]."""
    of_heads = positions.shape[:2]
    fits = read.slots.shape == read.chosen.shape == (*of_heads, count) and read.slots.dtype == torch.int64
    assert fits, f"{part}: choose must read {count} slots of each head as int64, got {describe(read.slots)}"
    inside = bool(((read.slots >= 0) & (read.slots < positions.shape[-1])).all())
    assert inside, f"{part}: choose must read slots of the layer, got {read.slots.tolist()}"
    newest = positions.gather(-1, read.slots) == length[:, None, None] - 1
    assert bool((newest & read.chosen).any(-1).all()), f"{part}: choose must read the newest token, got other tokens"
    if read.keys is not None:
        keys = read.keys()
        is_each = keys.shape[:3] == (*of_heads, count) and bool(keys[read.chosen].isfinite().all())
        assert is_each, f"{part}: keys must be finite [B, H, n, D], got {describe(keys)} or NaN"
    if read.rest is not None:
        found = read.rest(torch.zeros(*of_heads, 2))
        slots = found.scores.shape[-1]
        fits = found.scores.shape == (*of_heads, 2, slots) and found.values.shape[:3] == (*of_heads, slots)
        assert fits, f"{part}: estimates must be [B, H, G, R] and [B, H, R, D], got {[list(t.shape) for t in found]}"
        usable = found.scores.dtype == torch.float32 and not bool(found.scores.isnan().any())
        assert usable, f"{part}: estimates must be float32 scores, got {describe(found.scores)} or NaN"
        assert bool(found.values.isfinite().all()), f"{part}: estimated values must be finite, got NaN or inf"

"""The rules for the results of a reader."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.state import map_state, tensors
from kvpolicy.kernels.products import of_tokens
from kvpolicy.protocols import (
    Clusters,
    Estimated,
    Estimates,
    Index,
    Reader,
    RebuildsKeys,
)
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
    page = part.page_size(_TOKENS)
    # What a reader of coordinates is given has as many channels as its basis has directions.
    loads = part.traits.basis
    basis = None if loads is None else loads.load_basis(0, "cpu")
    dim = 16 if basis is None else basis.shape[1]
    width = 16 if basis is None else basis.shape[2]
    actual, planned = (
        [(list(each.shape), each.dtype) for each in tensors(part.alloc(2, 2, 5, dim, torch.float32, device))]
        for device in ("cpu", "meta")
    )
    assert actual == planned, f"{part}: an index must have the same sizes on the device meta, got {planned}"
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 2, 5, page, width, generator=generator)
    queries = torch.randn(2, 2, 2, width, generator=generator)
    occupied = torch.rand(2, 2, 5, page, generator=generator) < 0.7
    every = torch.arange(5).expand(2, 2, -1)
    shown = _score(part, dim, keys, occupied, every, queries)
    is_score = shown.dtype == torch.float32 and shown.shape[:3] == (2, 2, 2)
    assert is_score, f"{part}: score must be float32 [B, H, G, X], got {describe(shown)}"
    if part.traits.estimates is not None:
        _check_estimates(part, part.traits.estimates, dim)
    if part.traits.clusters is not None:
        _check_clusters(part, part.traits.clusters, dim, keys, occupied, shown)
    if part.traits.rebuilt is not None:
        _check_rebuilt(part, part.traits.rebuilt)
    if part.traits.scan is not None:
        return
    junk = torch.where(occupied[..., None], keys, torch.full_like(keys, torch.nan))
    same = torch.equal(_score(part, dim, junk, occupied, every, queries), shown)
    assert same, f"{part}: refresh must ignore slots without a token, got other scores with NaN there"
    index = _fitted(part, dim, keys, occupied)
    part.refresh(index, every, keys, occupied)
    before = map_state(torch.clone, index)
    part.refresh(index, every[..., 3:4], keys[:, :, 3:4] * 2, occupied[:, :, 3:4])
    for now, then in zip(tensors(index), tensors(before), strict=True):
        kept = now.shape[2] != 5 or torch.equal(now[:, :, [0, 1, 2, 4]], then[:, :, [0, 1, 2, 4]])
        assert kept, f"{part}: refresh must change the given entries only, got others changed too"
    part.refresh(index, every[..., 3:4], keys[:, :, 3:4], occupied[:, :, 3:4])
    for now, then in zip(tensors(index), tensors(before), strict=True):
        assert torch.equal(now, then), f"{part}: refresh must compute an entry from its keys, got a trace of others"


def _score(part: Reader, dim: int, keys: Tensor, occupied: Tensor, entries: Tensor, queries: Tensor) -> Tensor:
    """Scores of entries with these keys, in a model of the head dimension `dim`."""
    index = _fitted(part, dim, keys, occupied)
    part.refresh(index, entries, keys, occupied)
    return part.score(index, queries, _ProductsOf(keys.flatten(2, 3)))


def _fitted(part: Reader, dim: int, keys: Tensor, occupied: Tensor) -> Index:
    """An index of five entries, whose clusters are those of the keys if the reader has some."""
    index = part.alloc(2, 2, 5, dim, torch.float32, "cpu")
    clusters = part.traits.clusters
    if clusters is not None:
        positions = torch.arange(5, dtype=torch.int32).where(occupied.squeeze(-1), -1)
        clusters.fit_clusters(index, keys.squeeze(3), keys.squeeze(3), positions, torch.ones(2, dtype=torch.bool))
    return index


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


def _check_clusters(part: Reader, found: Clusters, dim: int, keys: Tensor, occupied: Tensor, shown: Tensor) -> None:
    """Check that entries belong to clusters that are scored, and that mean values are finite."""
    index = _fitted(part, dim, torch.where(occupied[..., None], keys, torch.full_like(keys, torch.nan)), occupied)
    part.refresh(index, torch.arange(5).expand(2, 2, -1), keys, occupied)
    assigned = found.assigned(index)
    fits = assigned.shape == (2, 2, 5) and assigned.dtype == torch.int64
    assert fits, f"{part}: assigned must be int64 [B, H, X], got {describe(assigned)}"
    clusters = shown.shape[-1]
    inside = bool(((assigned >= 0) & (assigned < clusters)).all())
    assert inside, f"{part}: assigned must be a cluster that is scored, got {clusters} scores and {assigned.tolist()}"
    has = found.has_clusters(index)
    assert has.tolist() == [True, True], f"{part}: has_clusters must be set after fit_clusters, got {has.tolist()}"
    if found.estimates_rest:
        values = found.mean_values(index)
        usable = values.shape == (2, 2, clusters, dim) and bool(values.isfinite().all())
        assert usable, f"{part}: mean_values must be finite [B, H, C, D], got {describe(values)} or NaN"


def _check_estimates(part: Reader, estimates: Estimates, dim: int) -> None:
    """Check that a summary depends on the values of its own tokens alone, and that the estimates are finite."""
    size = estimates.block
    entries = 2 * size + 1
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(2, 2, 3, size * part.page_size(_TOKENS), dim, generator=generator)
    occupied = torch.rand(2, 2, *values.shape[2:4], generator=generator) < 0.7
    occupied[:, :, 1] = False
    scores = torch.randn(2, 2, 2, entries, generator=generator)
    scores[..., size : 2 * size] = -torch.inf
    read = torch.rand(2, 2, entries, generator=generator) < 0.3
    read[..., 0] = True
    every = torch.arange(3).expand(2, 2, -1)

    def estimated(given: Tensor) -> Estimated:
        index = part.alloc(2, 2, entries, dim, torch.float32, "cpu")
        estimates.summarize(index, every, given, occupied)
        estimates.summarize(index, every[..., 1:], given[:, :, 1:], occupied[:, :, 1:])
        return estimates.estimate_rest(index, scores, read, scores.new_zeros(2, 2, 2))

    shown = estimated(values)
    slots = shown.scores.shape[-1]
    fits = shown.scores.shape == (2, 2, 2, slots) and shown.values.shape == (2, 2, slots, dim)
    assert fits, f"{part}: estimates must be [B, H, G, R] and [B, H, R, D], got {[list(t.shape) for t in shown]}"
    usable = shown.scores.dtype == torch.float32 and not bool(shown.scores.isnan().any() or shown.values.isnan().any())
    assert usable, f"{part}: estimates must be float32 numbers, got {describe(shown.scores)} or NaN"
    junk = estimated(torch.where(occupied[..., None], values, torch.full_like(values, torch.nan)))
    same = all(map(torch.equal, junk, shown))
    assert same, f"{part}: summarize must ignore slots without a token, got other estimates with NaN there"


def _check_rebuilt(part: Reader, rebuilt: RebuildsKeys) -> None:
    """Check that keys are rebuilt from their own coefficients, and exactly where they lie in few directions."""
    page = part.page_size(_TOKENS)
    generator = torch.Generator().manual_seed(5)
    # All along one direction in each head, by the same factors, so that one coefficient tells them.
    factors = torch.randn(2, 1, 5 * page, 1, generator=generator).expand(-1, 2, -1, -1)
    keys = (factors * torch.randn(2, 2, 1, 16, generator=generator)).unflatten(2, (5, page))
    occupied = (torch.rand(2, 1, 5, page, generator=generator) < 0.7).expand(-1, 2, -1, -1)
    index = part.alloc(2, 2, 5, 16, torch.float32, "cpu")
    assert rebuilt.has_basis(index).tolist() == [False, False], f"{part}: has_basis must not be set before fit_basis"
    flat = keys.masked_fill(~occupied[..., None], 0).flatten(2, 3).double()
    flat = of_tokens(flat) if rebuilt.joint_heads else flat
    rebuilt.fit_basis(index, flat.mT @ flat, torch.tensor([True, False]))
    assert rebuilt.has_basis(index).tolist() == [True, False], (
        f"{part}: fit_basis must find the basis of its rows alone"
    )
    rebuilt.fit_basis(index, flat.mT @ flat, torch.tensor([False, True]))
    every = torch.arange(5).expand(2, 2, -1)
    rebuilt.project(index, every, torch.where(occupied[..., None], keys, torch.full_like(keys, torch.nan)), occupied)
    before = map_state(torch.clone, index)
    rebuilt.project(index, every[..., 3:4], keys[:, :, 3:4], occupied[:, :, 3:4])
    same = all(torch.equal(now, then) for now, then in zip(tensors(index), tensors(before), strict=True))
    assert same, f"{part}: project must compute an entry from its keys, got a trace of others"
    slots = torch.randperm(5 * page, generator=generator).expand(2, 2, -1)
    found = rebuilt.rebuild_keys(index, slots)
    fits = found.shape == (2, 2, 5 * page, 16) and found.dtype == torch.float32
    assert fits, f"{part}: rebuild_keys must be float32 [B, H, n, D], got {describe(found)}"
    live = occupied.flatten(2)[:, :, slots[0, 0]]
    close = torch.allclose(found[live], keys.flatten(2, 3)[:, :, slots[0, 0]][live], atol=1e-4)
    assert close, f"{part}: rebuild_keys must be the keys where these lie in one direction, got others"
    held = rebuilt.coefficients(index)
    assert held.shape[1] in (1, 2) and held.shape[2] >= 5 * page, (
        f"{part}: coefficients must be [B, H or 1, S, ...] of {5 * page} slots at least, got {describe(held)}"
    )

"""A selector and a stage whose answers a test writes down, for tests of single modules of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_index import LayerIndex
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.page_geometry import PageGeometry
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.protocols import ALL_HEADS, SMALLEST_HEAD, DecodeMode, HeadShape, StageStore, State, View
from kvpolicy.statistics import Results
from kvpolicy.statistics.statistic import Context, Statistic
from kvpolicy.statistics.windows import Past, QueryWindow, ScoreTransform, newest_columns, take_queries, token_positions


def slots_of(store: LayerStore) -> SlotGeometry:
    """The slots of a layer without head budgets."""
    assert store.slots is not None
    return store.slots


PLAIN = Plain()


def prompted_store(
    selector: Any,
    drawn: tuple[Tensor, Tensor, Tensor],
    budget: int,
    expected: int | None = None,
    decode: Any = "evict",
    codec: Any = PLAIN,
) -> LayerStore:
    """A layer that holds a prompt, of one row, under a selector.

    Args:
        selector: The selector.
        drawn: Queries, keys and values of the prompt.
        budget: How many tokens it may hold.
        expected: How many tokens it has slots for; as many by default.
        decode: What steps do.
        codec: The codec.
    """
    q, k, v = drawn
    store = LayerStore(LayerSpec(0, selector, codec, decode))
    store.initialize(k)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(1.0))
    keep = torch.tensor([budget])
    slots = keep if expected is None else torch.tensor([expected])
    store.compress(pending, RowBudget(keep, torch.zeros_like(keep), slots))
    return store


def index_of(store: LayerStore) -> LayerIndex:
    """The index of a layer without head budgets."""
    return slots_of(store).index


def pages_of(store: LayerStore) -> PageGeometry:
    """The pages of a layer with head budgets."""
    assert isinstance(store.geometry, PageGeometry)
    return store.geometry


class Worth(NamedTuple):
    """What each token is worth, [B, H, S] fp32, and its number, [B, H, S] int64."""

    worth: Tensor
    number: Tensor


@dataclass(kw_only=True)
class Ranking:
    """A selector that ranks by its state, and notes what it was shown.

    Attributes:
        statistics: What it asks for.
        score: Makes the worth of the candidates of a prompt; by default it stays.
        views: Every view that it was asked for a priority of.
        seen: The statistics of every prompt.
    """

    statistics: tuple[Statistic[Any], ...] = ()
    decode: DecodeMode = "evict"
    min_tokens: int = 1
    score: Callable[[Worth, Results, View], Tensor] = lambda state, seen, view: state.worth
    views: list[View] = field(default_factory=list)
    seen: list[Results] = field(default_factory=list)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> Worth:
        shape = batch, heads, slots
        return Worth(torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int64, device=device))

    def observe(self, state: Worth, seen: Results, view: View) -> State:
        self.seen.append(seen)
        return Worth(self.score(state, seen, view), view.positions.long())

    def step(self, state: Worth, row: Tensor, view: View) -> None:
        state.worth.add_(row.sum(2))

    def priority(self, state: Worth, view: View) -> Tensor:
        self.views.append(view)
        return state.worth

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        return None


def contents_of(selector: Ranking) -> LayerContents:
    """A layer without keys whose slots `selector` ranks."""
    return LayerContents(LayerSpec(0, selector, Plain()))


class Floats(NamedTuple):
    """Keys and values [B, H, C, D] fp32, and how often each slot was written, [B, H, C, 1]."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor


class Uncoded:
    """A stage that stores what it is given."""

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> tuple[()]:
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> Floats:
        shape = batch, heads, slots
        return Floats(torch.zeros(*shape, head_dim), torch.zeros(*shape, head_dim), torch.zeros(*shape, 1))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        for b, h, n in write_mask.nonzero().tolist():
            slot = int(slots[b, h, n])
            store.codes.keys[b, h, slot] = keys[b, h, n]
            store.codes.values[b, h, slot] = values[b, h, n]
            store.codes.key_scale[b, h, slot] += 1

    def keys(self, store: StageStore, at: Any) -> Tensor:
        return _at(store.codes.keys, at)

    def values(self, store: StageStore, at: Any) -> Tensor:
        return _at(store.codes.values, at)

    def score(self, store: StageStore, queries: Tensor, rope: Any) -> Tensor:
        keys = store.codes.keys if rope is None else rope.keys(store.codes.keys, slice(None))
        return queries.float() @ keys.transpose(-1, -2)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        return weights @ store.codes.values


def _at(t: Tensor, at: Any) -> Tensor:
    return t[:, :, at] if isinstance(at, slice) else t.gather(2, at[..., None].expand(*at.shape, t.shape[-1]))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(count: int, *, rows: int, heads: int, most: int, seed: int) -> Tensor:
    """Distinct positions below `most` in random order, [rows, heads, count] int32."""
    dice = generator(seed)
    drawn = [torch.randperm(most, generator=dice)[:count] for _ in range(rows * heads)]
    return torch.stack(drawn).view(rows, heads, count).to(torch.int32)


def candidates_of(keys: Tensor, valid: Tensor | None, transform: ScoreTransform, past: Past | None = None) -> Context:
    """A prompt [B, H, P, D] as its statistics are reduced over it; the slots of `past` stand at positions from 0 on."""
    _, heads, columns, _ = keys.shape
    none = torch.zeros(len(keys) if valid is None else len(valid), dtype=torch.int64)
    held = 0 if past is None else past.keys.shape[2]
    positions = token_positions(valid, columns, none + held)[:, None].expand(-1, heads, -1)
    if past is not None:
        slots = torch.arange(held, dtype=torch.int32).expand_as(past.occupied)
        positions = torch.cat([slots.where(past.occupied, -1), positions], -1)
    return Context(keys=keys, values=keys, valid=valid, transform=transform, past=past, positions=positions)


def newest_queries(q: Tensor, valid: Tensor | None, width: int) -> QueryWindow:
    """The newest `width` valid queries of q [B, Hq, P, D], the newest last."""
    at = newest_columns(valid, (q.shape[0], q.shape[2]), width, q.device)
    return QueryWindow(take_queries(q, at), at)

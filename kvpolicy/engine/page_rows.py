"""Rows that come and go in a layer with a budget for each head; see `kvpolicy.engine.rows`."""

from __future__ import annotations

import copy

from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents, RowRoom
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.page_geometry import PageGeometry
from kvpolicy.engine.state import alloc_paged_state
from kvpolicy.engine.state import tensors as all_tensors
from kvpolicy.text.budget import page_size


class PageRows:
    """The rows of a layer whose slots are pages of single heads; see `RowSlots`.

    Pages are those of the longest row at first. A row of smaller ones has all pages of the layer cut to its size.
    """

    def __init__(self, layer: LayerContents, pages: PageGeometry) -> None:
        """Fill and empty rows of `layer`, arranged as `pages`."""
        self._layer = layer
        self._pages = pages

    def begin(self, tokens: int) -> None:
        """Make slots for `tokens` in every head of every row; there are none before."""
        layer = self._layer
        layer.expected_len = [tokens] * len(layer.expected_len)
        layer.capacity = tokens
        size = page_size(tokens)
        self._pages.begin_rows(self._each(tokens, size), size)
        layer.tensors.paged().average.fill_(tokens)

    def _each(self, tokens: int, size: int) -> int:
        """Pages of an average head with `tokens` tokens; in a cache that grows, the prompt has whole pages."""
        return -(-tokens // size) + self._layer.spec.grows

    def widen(self, tokens: int) -> None:
        """Add slots to all rows, so that one may have `tokens`."""
        layer = self._layer
        layer.capacity = tokens
        size = layer.tensors.positions.shape[-1]
        self._pages.lengthen(self._each(tokens, size) * layer.shape.heads)

    def fit(self, other: LayerStore) -> bool:
        """Cut all pages to those of a layer of one row; returns whether they were larger."""
        size = other.tensors.positions.shape[-1]
        is_smaller = size < self._layer.tensors.positions.shape[-1]
        self._pages.cut(size)
        return is_smaller

    def set_budgets(self, budget: Tensor) -> None:
        """Let each row hold `budget` [B] tokens, in the tensors that are there."""
        self._layer.set_budget_in_place(budget)
        self._pages.note_complete()

    def holds(self, other: LayerStore, tokens: int) -> bool:
        """Whether a row has as many pages as a layer of one row, with slots for `tokens` of it."""
        own = self._prepared(other, tokens)
        fits = own.tensors.keys.shape[2] <= self._layer.tensors.keys.shape[2] or not own.spec.stages
        return fits and own.contents.expected_len[0] <= tokens and _geometry(own).pages <= self._pages.pages

    def take(self, other: LayerStore, tokens: int) -> RowRoom:
        """Copy what a layer of one row holds to this one, which has one row too, with slots for `tokens` of it."""
        own = self._prepared(other, tokens)
        own.contents.capacity = self._layer.capacity
        _geometry(own).lengthen(self._pages.pages)
        theirs = own.tensors.parts()
        for name, part in self._layer.tensors.parts().items():
            if name != "columns":
                for target, source in zip(all_tensors(part), all_tensors(theirs[name]), strict=True):
                    target.copy_(source)
        return RowRoom(own.contents.expected_len[0], int(own.tensors.budget))

    def _prepared(self, other: LayerStore, tokens: int) -> LayerStore:
        """A layer of one row with the contents of another, slots for `tokens`, and pages of the size of these."""
        own = other.contents
        store = LayerStore(own.spec)
        store.contents.begin(own.tensors.of_rows(slice(0, 1)), own.shape, own.ranks)
        # Nothing of this changes the other layer: its lists are copied, and pages are added and cut in new tensors.
        store.geometry.set_numbers(copy.deepcopy(other.geometry.numbers()))
        more = tokens - own.expected_len[0]
        if more > 0:
            store.geometry.extend([more])
        _geometry(store).cut(self._layer.tensors.positions.shape[-1])
        return store

    def note(self, row: int, other: LayerStore) -> None:
        """Note the pages of a row that has taken over a layer."""
        pages = other.contents.row_pages
        assert pages is not None, "the layer has pages"
        self._set_pages(row, [int(part) for part in pages])

    def fill_index(self) -> None:
        """Nothing: pages have no index."""

    def empty(self) -> None:
        """Empty the layer, which has one row, as it was before its first token."""
        layer = self._layer
        tensors = layer.tensors
        spec = layer.spec
        heads = layer.shape.heads
        tensors.positions.fill_(-1)
        tensors.length.zero_()
        _, pages, size = tensors.positions.shape
        state = alloc_paged_state(spec.selector, 1, heads, pages, size, tensors.device, layer.shape.head)
        fresh = (state, spec.merger.alloc(1, heads, tensors.device))
        for target, source in zip(all_tensors((tensors.state, tensors.merged)), all_tensors(fresh), strict=True):
            target.copy_(source)
        for counts in all_tensors(tensors.counts):
            counts.zero_()
        assert layer.room is not None, "only rows that come can go"
        paged = tensors.paged()
        paged.owner.copy_(self._pages.even_owners())
        paged.average.fill_(layer.room.tokens)

    def free(self, row: int) -> None:
        """Note the pages of a free row."""
        size = self._layer.tensors.positions.shape[-1]
        self._set_pages(row, [size, self._pages.pages, 0])

    def _set_pages(self, row: int, sizes: list[int]) -> None:
        pages = self._layer.row_pages
        assert pages is not None, "the layer has pages"
        for part, size in zip(pages, sizes, strict=True):
            part[row] = size
        self._pages.note_complete()


def _geometry(store: LayerStore) -> PageGeometry:
    assert isinstance(store.geometry, PageGeometry), "the layer has pages"
    return store.geometry

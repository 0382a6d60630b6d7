"""The interface of a reader: which of the kept tokens a decode step reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.protocols.codec import ALL_HEADS, ModelInfo
from kvpolicy.protocols.selector import StepMemo
from kvpolicy.statistics.ranks import Ranks

Index = Any
"""A NamedTuple of one layer's tensors that describe its entries; the empty tuple for a reader without an index."""


class ReaderTraits(NamedTuple):
    """Properties of a reader that the engine must know, and the objects that it hands over for what it does otherwise.

    Attributes:
        dense: How many of the model's first layers read every slot.
        recent: The newest tokens whose entries are always read; that of the newest one always is.
        ordered: Whether entries are pages of slots that should hold neighbors, so that slots are kept in the order of
            their positions.
        resort: After how many decode steps the slots are sorted again where tokens are evicted, if `ordered`, and
            the index is made again, if a part of it is `fitted`.
        host: Whether keys and values lie in host memory, in the layers that read a part of them.
        estimates_rest: Whether tokens that are not read take part in attention, by summaries of values; else they have
            no weight.
        salience: Says how salient channels are, which `fit` is then given; None if it is not.
        basis: Loads the basis that the index is of coordinates in; None without one.
        scan: Says how much of every key `score` reads; None if it reads the index alone.
        fitted: Says when a part of the index is to be found again from all keys of a row; None if no part is.
        rebuilds: Says how keys are rebuilt that `choose` does not read as they are stored; None if it reads all so.
        choosers: Says which layers choose, also for those behind them; None if every layer chooses for itself.
    """

    dense: int = 0
    recent: int = 1
    ordered: bool = False
    resort: int = 256
    host: bool = False
    estimates_rest: bool = False
    salience: Salience | None = None
    basis: LoadsBasis | None = None
    scan: KeyScan | None = None
    fitted: Fitted | None = None
    rebuilds: RebuildsKeys | None = None
    choosers: Choosers | None = None

    @property
    def scans_keys(self) -> bool:
        """Whether `score` reads every key whole."""
        return self.scan is not None and self.scan.is_whole

    @property
    def choosers_read_all(self) -> bool:
        """Whether a layer that chooses reads every slot itself."""
        return self.choosers is not None and self.choosers.read_all

    def channels_read(self, head_dim: int) -> int:
        """How many channels of every key `score` reads; 0 for none, or for whole keys."""
        return 0 if self.scan is None or self.scan.is_whole else self.scan.channels_read(head_dim)

    def source(self, layer_idx: int) -> int | None:
        """The layer that chooses for a layer: itself, an earlier one, or None if it reads all slots.

        Examples:
            >>> [ReaderTraits(dense=1).source(layer_idx) for layer_idx in range(3)]
            [None, 1, 2]
        """
        if layer_idx < self.dense:
            return None
        return layer_idx if self.choosers is None else self.choosers.source(layer_idx)

    def shares(self, layer_idx: int) -> bool:
        """Whether a layer chooses for the next one too."""
        return self.source(layer_idx) == layer_idx == self.source(layer_idx + 1)


class Choosers(Protocol):
    """Which layers choose what is read, also for those behind them: see `ReaderTraits.choosers`."""

    @property
    def read_all(self) -> bool:
        """Whether a layer that chooses reads every slot itself."""
        ...

    def source(self, layer_idx: int) -> int | None:
        """The layer that chooses for a layer behind the dense ones; None if it reads all slots."""
        ...


class KeyScan(Protocol):
    """The part of every key that `Reader.score` reads, by one call of `products`: see `ReaderTraits.scan`."""

    @property
    def is_whole(self) -> bool:
        """Whether it reads whole keys, with the queries that it got."""
        ...

    def channels_read(self, head_dim: int) -> int:
        """How many channels of a key are read."""
        ...


class Salience(Protocol):
    """How salient the channels of a layer are, by the prompt or by a file: see `ReaderTraits.salience`."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the salience comes from a file; else the engine measures it in the prompt."""
        ...

    def load_salience(self, layer_idx: int, heads: slice = ALL_HEADS) -> Tensor:
        """The salience of the channels of a layer, [H, D] fp32, if it comes from a file.

        Args:
            layer_idx: Index of the layer.
            heads: Which of the model's KV heads this rank holds.
        """
        ...


class LoadsBasis(Protocol):
    """A calibrated basis that an index is of coordinates in: see `ReaderTraits.basis`.

    `refresh` gets the coordinates of keys, and `score` those of queries, in fp32; they have r channels instead of D.
    """

    def load_basis(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Tensor:
        """The basis of each KV head of a layer, [H, D, r] fp32, whose columns are directions; H is 1 if all share it.

        Args:
            layer_idx: Index of the layer.
            device: Device of the result.
            heads: Which of the model's KV heads this rank holds.
        """
        ...


class Fitted(Protocol):
    """The part of an index that is found from all keys of a row, such as clusters: see `ReaderTraits.fitted`.

    `Reader.update` finds it of the rows that had a prompt, and of all rows after `ReaderTraits.resort` decode steps.
    """

    def is_missing(self, index: Index, slots: SlotAccess, steps: int) -> bool:
        """Whether the index must be made again because a row has no such part. May wait for the device.

        Args:
            index: The index.
            slots: The slots of the layer.
            steps: Decode steps since it was found; 0 if the layer was just given more slots.
        """
        ...


class RebuildsKeys(Protocol):
    """Keys that a step computes from the index instead of reading them: see `ReaderTraits.rebuilds`.

    Needs equally many slots in full precision in every head, so no codec, and keys without their rotary embedding:
    `SlotAccess.unrotated` and `SlotAccess.rotated` work in such layers only.
    """

    @property
    def joint_heads(self) -> bool:
        """Whether the heads of a layer must hold the same tokens in the same slots."""
        ...


class Products(Protocol):
    """The products of queries with every key of the slots that a reader divides."""

    def __call__(self, queries: Tensor, channels: Tensor | None = None, /) -> Tensor:
        """The products of queries [B, H, G, D], [B, H, G, S] fp32; in some channels [B, H, r] int64 alone if given."""
        ...

    def group_mean(self, of_heads: Tensor, /) -> Tensor:
        """The mean of [B, H, G, N] over the query heads of each KV head, [B, H, N]; those of other ranks count too."""
        ...


class Estimated(NamedTuple):
    """Slots that stand for those that a step does not read. Attention treats them as the slots that it reads.

    Attributes:
        scores: Their scores, [B, H, G, R] fp32, scaled and capped; -inf for a slot that stands for none.
        values: Their values, [B, H, R, D], finite everywhere.
    """

    scores: Tensor
    values: Tensor


class Read(NamedTuple):
    """The slots of a layer that a step reads, besides a codec's full-precision buffer.

    Attributes:
        slots: Slots of the layer, [B, H, n] int64.
        chosen: Whether a slot belongs to the entries that are read, [B, H, n] bool; it may still be empty.
        entries: Their entries, [B, H, k] int64; None if another layer chose.
        read: Which of these entries are read, [B, H, k] bool.
        keys: Computes the keys of these slots, [B, H, n, D]; None if they are read as they are stored.
        rest: Estimates what is not read, from the logarithm of the sum of the exponentials of the scores of all slots
            that are read of entries, [B, H, G] fp32; None if that has no weight.
        none_empty: Whether every slot that is chosen is known to hold a token.
    """

    slots: Tensor
    chosen: Tensor
    entries: Tensor | None = None
    read: Tensor | None = None
    keys: Callable[[], Tensor] | None = None
    rest: Callable[[Tensor], Estimated] | None = None
    none_empty: bool = False


class Changed(NamedTuple):
    """The changes in a layer since its index was made.

    Attributes:
        entries: The entries whose slots were written, [B, H, n] int64, where one may be given twice; None if the index
            is made again, of all entries, which happens between steps.
        placed: Rows for which what is fitted is found again, [B] bool; None for none but those that lack it.
        emptied: Slots of the layer [B, H, n] int64 some of which were emptied, where none was written; else None.
    """

    entries: Tensor | None = None
    placed: Tensor | None = None
    emptied: Tensor | None = None


class SlotAccess(Protocol):
    """The slots of a layer as its reader sees them. In a step, the bytes of what is asked for are counted.

    Attributes:
        positions: Positions of all slots, [B, H, S] int32; -1 for an empty one.
        length: Tokens that each row has seen, [B] int64.
        ranks: The ranks that hold the other heads of the layer.
        entries: How many entries there are.
        slots_read: Slots of entries that a step reads of each head.
        products: The products with every key, which `ReaderTraits.scan` must declare.
        memo: What the layers of the step compute alike.
    """

    positions: Tensor
    length: Tensor
    ranks: Ranks
    entries: int
    slots_read: int
    products: Products
    memo: StepMemo

    def tiles(self, entries: Tensor | None, block: int = 1) -> Sequence[Tensor]:
        """The blocks of `block` neighboring entries that hold `entries`, or all, a part [B, H, n] int64 at a time."""
        ...

    def of_entries(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of entries [B, H, ...], [B, H, n] int64, and which hold a token of it, [B, H, ..., page] bool.

        An entry may have fewer slots than a page, at the end of a codec's stage. Its last one is then repeated.
        """
        ...

    def entries_of(self, slots: Tensor) -> Tensor:
        """The entries of slots [B, H, n] of the layer; any for a slot that belongs to none."""
        ...

    def keys(self, at: Tensor) -> Tensor:
        """The keys of slots [B, H, n], as attention sees them, [B, H, n, D]; undefined in empty slots."""
        ...

    def values(self, at: Tensor) -> Tensor:
        """The vectors that attention mixes of slots [B, H, n], [B, H, n, D]; undefined in empty slots."""
        ...

    def coordinates(self, vectors: Tensor) -> Tensor:
        """Vectors [B, H, n, D] in the basis of `ReaderTraits.basis`, [B, H, n, r] fp32; as they are without one."""
        ...

    def unrotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, H, n, D] at positions [B, H, n] without their rotary embedding, fp32."""
        ...

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, H, n, D] fp32 without a rotary embedding at positions [B, H, n], as attention sees them, fp32."""
        ...

    def scores(self, raw: Tensor) -> Tensor:
        """Products of the queries, [B, H, G, X] fp32, scaled and capped as attention does it, in place."""
        ...

    def log_tokens(self) -> Tensor:
        """Logarithm of the tokens that each entry holds, [B, H, X] fp32; -inf for an entry without one."""
        ...

    def best(self, scores: Tensor, sinks: int = 0) -> Read:
        """The entries with the largest attention weights, for the query head that weights them most.

        The entries of the newest tokens and of the first kept one are always read. Ties go to the earlier position.

        Args:
            scores: Scores of the entries, scaled and capped, [B, H, G, X] fp32.
            sinks: Entries with a token at a position below it are always read too.
        """
        ...

    def most_needed(self, need: Tensor, sinks: int = 0) -> Read:
        """As `best`, by numbers [B, H, X] fp32 below 1; undefined for empty entries."""
        ...

    def missing(self, found: Tensor, placed: Tensor | None) -> Tensor:
        """Rows with tokens for which something is to be found, [B] bool, as each row would alone.

        Args:
            found: Rows for which it was found, [B] bool.
            placed: `Changed.placed`.
        """
        ...

    def whole(self, parts: Any) -> None:
        """Count the reading of all of a tensor, or of each tensor in (nested) tuples."""
        ...

    def rows(self, source: Tensor, count: int) -> None:
        """Count the reading of `count` vectors of each head of `source` [B, H, S, ...]."""
        ...

    def written(self, parts: Any = (), keys: bool = True, block: int = 0) -> None:
        """Count what `Reader.update` reads for the tokens that a step writes; see `Reader.count_step`.

        Args:
            parts: Tensors that it reads whole.
            keys: Whether it reads the keys of their entries.
            block: Of how many entries it reads all values, for each of theirs; 0 for none.
        """
        ...

    def stored_keys(self, count: int) -> None:
        """Count the reading of `count` keys of each head; see `Reader.count_step`."""
        ...


@runtime_checkable
class Reader(Protocol):
    """Which of the kept tokens does a decode step read?

    The slots of a layer are divided into entries: pages of `page` neighboring slots, or single slots. A decode step
    scores every entry, reads the slots of the best ones, and attends to them alone. How many are read depends on the
    number of slots and not on data. The index holds what the scores are computed from; it is recomputed for an entry
    whenever one of its slots is overwritten.

    A codec's full-precision buffer is small, and is always read whole: there, the slots of a layer are the coded ones.

    Shapes: X entries, n of which are refreshed. `refresh`, `score` and `choose` are traceable: no host sync, no
    data-dependent shape; so is `update` of some entries.

    A class that inherits from it has single tokens as entries and no index, and needs `count` and `score`. One that
    keeps an index in another way than by entries, or reads other things than stored keys and values, overrides
    `update`, `choose` and `count_step`. An object that has all members is accepted whatever its class.
    """

    __slots__ = ()

    @property
    def traits(self) -> ReaderTraits:
        """Properties that the engine must know."""
        return ReaderTraits()

    def page_size(self, slots: int) -> int:
        """Slots of an entry, in a layer of `slots` slots; by default 1."""
        return 1

    def count(self, slots: int) -> int:
        """Slots of `slots` that each KV head reads in a step: a multiple of the page, or all, as by default."""
        return slots

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a model's keys cannot be indexed; by default they can."""

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> Index:
        """An empty index of tensors [B, H, ...]; on the device `meta` too, where only their sizes count.

        When a layer gets more slots, tensors are carried over: those that get longer in their third dimension keep what
        they have at its beginning, until entries are recomputed. By default there is no index.
        """
        return ()

    def fit(self, index: Index, salience: Tensor, rows: Tensor) -> None:
        """Choose what a head's index consists of, in place, from the first prompt of some rows.

        Args:
            index: The index.
            salience: Mean absolute query times mean absolute key of each channel, [B, H, D] fp32; the queries are those
                of all query heads of the KV head.
            rows: Which rows had their first prompt, [B] bool; the others keep what they have.
        """

    def update(self, index: Index, slots: SlotAccess, changed: Changed) -> None:
        """Bring the index up to date, in place; by default, `refresh` the entries that were written.

        Args:
            index: The index.
            slots: The slots of the layer.
            changed: What changed.
        """
        if changed.emptied is not None:  # what an index holds of an empty slot is never read
            return
        for entries in slots.tiles(changed.entries):
            at, occupied = slots.of_entries(entries)
            keys = slots.coordinates(slots.keys(at))
            self.refresh(index, entries, keys.unflatten(2, occupied.shape[2:]), occupied)

    def refresh(self, index: Index, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Recompute entries, in place.

        Args:
            index: The index.
            entries: Which entries, [B, H, n] int64; where one is given twice, so are its keys.
            keys: Their keys, as attention sees them, [B, H, n, page, D]; undefined where `occupied` is not set.
            occupied: Which of these slots hold a token, [B, H, n, page] bool.
        """

    def choose(self, index: Index, slots: SlotAccess, queries: Tensor) -> Read:
        """Choose what a step reads; by default, the entries that `score` scores highest.

        Args:
            index: The index.
            slots: The slots of the layer.
            queries: [B, H, G, D], in the basis if there is one.
        """
        slots.whole(index)
        return slots.best(slots.scores(self.score(index, queries, slots.products)))

    def count_step(self, index: Index, slots: SlotAccess) -> None:
        """Count what `update` and `choose` read in a step, besides what `traits.scan` declares and what is chosen.

        A plan counts with tensors on the device `meta`, and must predict what a step reads. By default that is the
        index, and the keys of the entry that is written.
        """
        slots.whole(index)
        slots.written(keys=bool(index))

    def score(self, index: Index, queries: Tensor, products: Products) -> Tensor:
        """An estimate of the largest product of each query with the keys of each entry.

        The engine turns it into attention weights as it does with products: it scales and caps them, adds the largest
        count of the entry's tokens if a merger counts them, hides entries without a token, and normalizes them over
        the entries. An entry is as needed as the query head that needs it
        most says.

        Args:
            index: The index.
            queries: [B, H, G, D].
            products: Returns the products of queries with every key, [B, H, G, S] fp32. It reads all keys, which
                `traits.scan` must declare, or some channels of them.

        Returns:
            [B, H, G, X] fp32.
        """
        ...

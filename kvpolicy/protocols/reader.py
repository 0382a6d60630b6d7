"""The interface of a reader: which of the kept tokens a decode step reads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.protocols.codec import ALL_HEADS, ModelInfo

Index = Any
"""A NamedTuple of one layer's tensors that describe its entries; the empty tuple for a reader without an index."""


class ReaderTraits(NamedTuple):
    """Properties of a reader that the engine must know, and the objects that it hands over for what it does otherwise.

    Attributes:
        dense: How many of the model's first layers read every slot.
        recent: The newest tokens whose entries are always read; that of the newest one always is.
        sinks: Tokens at positions below it are always read, if they are kept, besides the newest ones.
        ordered: Whether entries are pages of slots that should hold neighbors, so that slots are kept in the order of
            their positions.
        resort: After how many decode steps the slots are sorted again where tokens are evicted, if `ordered`, and
            clusters, or a basis of keys, are found again.
        host: Whether keys and values lie in host memory, in the layers that read a part of them.
        salience: Says how salient channels are, which `fit` is then given; None if it is not.
        basis: Loads the basis that the index is of coordinates in; None without one.
        scan: Says what `score` reads of every key; None if it reads the index alone.
        estimates: Estimates what is not read; None if that has no weight.
        clusters: Finds the clusters that `score` scores; None if it scores entries.
        rebuilt: Computes the keys that a step reads from the index; None if they are read as they are stored.
        choosers: Says which layers choose, also for those behind them; None if every layer chooses for itself.
    """

    dense: int = 0
    recent: int = 1
    sinks: int = 0
    ordered: bool = False
    resort: int = 256
    host: bool = False
    salience: Salience | None = None
    basis: LoadsBasis | None = None
    scan: KeyScan | None = None
    estimates: Estimates | None = None
    clusters: Clusters | None = None
    rebuilt: RebuildsKeys | None = None
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
        """How many channels of a key are read; then there is no index of keys, and `refresh` is not called."""
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


class Clusters(Protocol):
    """Clusters of similar keys, to which entries belong: see `ReaderTraits.clusters`.

    Entries are single slots, and `score` returns the scores of C clusters, [B, H, G, C]. A step reads the entries of
    the best clusters, the earlier positions of the last one. Clusters are found from all keys of a layer: after each
    prompt, and again after `ReaderTraits.resort` decode steps. In between, `refresh` assigns new keys to them.

    If it estimates, what is not read of a cluster takes part in attention as one slot, that has the score and the mean
    value of the cluster, and stands for as many tokens. `Estimates` is not needed for that.
    """

    @property
    def estimates_rest(self) -> bool:
        """Whether what is not read takes part in attention."""
        ...

    def fit_clusters(self, index: Index, keys: Tensor, values: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Find the clusters of some rows, in place; `refresh` of all entries follows. Not traceable.

        Args:
            index: The index.
            keys: The keys of all entries, as attention sees them, [B, H, X, D]; undefined in empty slots.
            values: Their values, [B, H, X, D].
            positions: Their positions, [B, H, X] int32; -1 in empty slots.
            rows: Which rows, [B] bool; the others keep what they have.
        """
        ...

    def has_clusters(self, index: Index) -> Tensor:
        """Whether clusters of a row were found, [B] bool."""
        ...

    def assigned(self, index: Index) -> Tensor:
        """The cluster of each entry, [B, H, X] int64, below C; of an empty slot any."""
        ...

    def centers(self, index: Index) -> Any:
        """The tensors, in (nested) tuples, that `refresh` reads to assign a key."""
        ...

    def mean_values(self, index: Index) -> Tensor:
        """The mean value of each cluster, [B, H, C, D], finite everywhere; only called if the reader estimates."""
        ...


class RebuildsKeys(Protocol):
    """Keys that a step computes from the index when it reads them: see `ReaderTraits.rebuilt`.

    The index holds a basis of the keys of each head without their rotary embedding, and the coefficients of each key in
    it. A step rebuilds the keys of the slots that it reads, and the engine rotates them to their positions. Only the
    keys of the newest tokens (`ReaderTraits.recent`), and of those at the first positions (`ReaderTraits.sinks`), are
    read as they are stored. The basis is found from all keys of a layer: after each prompt, and again after
    `ReaderTraits.resort` decode steps. In between, new keys get coefficients in it.

    With `joint_heads`, the basis is of the keys of all heads of a token, one behind the other, and coefficients are
    those of a token.

    Needs equally many slots in full precision in every head, so no codec. All methods but `fit_basis` and `has_basis`
    are traceable.
    """

    @property
    def joint_heads(self) -> bool:
        """Whether the heads of a layer share a basis, so that they must hold the same tokens in the same slots."""
        ...

    def fit_basis(self, index: Index, moments: Tensor, rows: Tensor) -> None:
        """Find the basis of some rows, in place; `project` of all entries follows. Not traceable.

        Args:
            index: The index.
            moments: Sums of the outer products of the unrotated keys of each head, [B, H, D, D] fp64; of all heads with
                `joint_heads`, [B, 1, H * D, H * D].
            rows: Which rows, [B] bool; the others keep what they have.
        """
        ...

    def has_basis(self, index: Index) -> Tensor:
        """Whether the basis of a row was found, [B] bool."""
        ...

    def project(self, index: Index, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Compute the coefficients of the keys of some entries, in place, after `Reader.refresh` of them.

        Args:
            index: The index.
            entries: Which entries, [B, H, n] int64; where one is given twice, so are its keys.
            keys: Their keys without rotary embedding, [B, H, n, page, D] fp32; undefined where `occupied` is not set.
            occupied: Which of these slots hold a token, [B, H, n, page] bool.
        """
        ...

    def rebuild_keys(self, index: Index, slots: Tensor) -> Tensor:
        """The keys of slots [B, H, n] int64 without rotary embedding, [B, H, n, D] fp32; of an empty slot any."""
        ...

    def scored(self, index: Index) -> Any:
        """The tensors, in (nested) tuples, that `score` reads."""
        ...

    def basis(self, index: Index) -> Any:
        """The tensors, in (nested) tuples, that `project` and `rebuild_keys` read whole."""
        ...

    def coefficients(self, index: Index) -> Tensor:
        """The coefficients, of which each head reads those of its slots, [B, H or 1, S, ...] with S slots at least."""
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


class Estimates(Protocol):
    """Slots that take part in attention for those that are not read: see `ReaderTraits.estimates`.

    The index also has summaries of values: one for every block of `block` neighboring entries. Like entries, they are
    recomputed when one of their slots is overwritten. Both methods are traceable, as `score` is.
    """

    @property
    def block(self) -> int:
        """How many neighboring entries share a summary of their values."""
        ...

    def summarize(self, index: Index, blocks: Tensor, values: Tensor, occupied: Tensor) -> None:
        """Recompute the summaries of blocks, in place.

        Args:
            index: The index.
            blocks: Which blocks, [B, H, n] int64; where one is given twice, so are its values.
            values: The values of their slots, m for each block, [B, H, n, m, D]; undefined where `occupied` is not set.
            occupied: Which of these slots hold a token, [B, H, n, m] bool.
        """
        ...

    def estimate_rest(self, index: Index, scores: Tensor, read: Tensor, normalizer: Tensor) -> Estimated:
        """Slots that stand for the entries that are not read.

        Args:
            index: The index.
            scores: The result of `Reader.score`, scaled and capped, plus the logarithm of the tokens that each entry
                holds, [B, H, G, X] fp32; -inf for an entry without a token.
            read: Which entries are read, [B, H, X] bool.
            normalizer: Logarithm of the sum of the exponentials of the scores of all slots that are read of entries, as
                attention computes them, [B, H, G] fp32.
        """
        ...


@runtime_checkable
class Reader(Protocol):
    """Which of the kept tokens does a decode step read?

    The slots of a layer are divided into entries: pages of `page` neighboring slots, or single slots. A decode step
    scores every entry, reads the slots of the best ones, and attends to them alone. How many are read depends on the
    number of slots and not on data. The index holds what the scores are computed from; it is recomputed for an entry
    whenever one of its slots is overwritten.

    A codec's full-precision buffer is small, and is always read whole: there, the slots of a layer are the coded ones.

    Shapes: X entries, n of which are refreshed. `refresh` and `score` are traceable: no host sync, no data-dependent
    shape.

    A class that inherits from it has single tokens as entries and no index, and needs `count` and `score`. An object
    that has all members is accepted whatever its class. What it does otherwise, it hands over as an object of its
    `traits`.
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

    def refresh(self, index: Index, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Recompute entries, in place.

        Args:
            index: The index.
            entries: Which entries, [B, H, n] int64; where one is given twice, so are its keys.
            keys: Their keys, as attention sees them, [B, H, n, page, D]; undefined where `occupied` is not set.
            occupied: Which of these slots hold a token, [B, H, n, page] bool.
        """

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
            [B, H, G, X] fp32; of clusters instead of entries with `ReaderTraits.clusters`.
        """
        ...

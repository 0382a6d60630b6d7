"""The interface of a reader: which of the kept tokens a decode step reads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpolicy.protocols.codec import ALL_HEADS, ModelInfo

Index = Any
"""A NamedTuple of one layer's tensors that describe its entries; the empty tuple for a reader without an index."""


class ReaderTraits(NamedTuple):
    """Properties of a reader that the engine must know.

    Attributes:
        dense: How many of the model's first layers read every slot.
        recent: The newest tokens whose entries are always read; that of the newest one always is.
        ordered: Whether entries are pages of slots that should hold neighbors, so that slots are kept in the order of
            their positions.
        resort: After how many decode steps the slots are sorted again where tokens are evicted, if `ordered`.
        salience: Whether `fit` needs the salience of the channels in the prompt.
        calibrated: Whether the salience is that of a calibration instead, see `LoadsSalience`.
        projected: Whether the index is of coordinates in a calibrated basis, see `LoadsBasis`.
        estimates: How many neighboring entries share a summary of their values, by which a step estimates what it does
            not read, see `Estimates`. 0: what is not read has no weight.
        scans_keys: Whether `score` reads every key, by one call of `products` with the queries that it got.
        every: Of the layers that do not read everything, every how many one chooses; those behind it read what it
            chose. 1: every layer chooses for itself.
        choosing: The layers that choose, ascending, instead of `every`.
        choosers_read_all: Whether a layer that chooses reads every slot itself.
        host: Whether keys and values lie in host memory, in the layers that read a part of them.
        sinks: Tokens at positions below it are always read, if they are kept, besides the newest ones.
        clustered: Whether `score` scores clusters, each the sum of many entries, see `Clusters`. They are found again
            after `resort` decode steps.
        rebuilds: Whether a step computes the keys that it reads from the index, see `RebuildsKeys`. What this needs is
            found again after `resort` decode steps.
        joint_heads: Whether the heads of a layer share a basis of keys, so that they must hold the same tokens in the
            same slots, see `RebuildsKeys`.
    """

    dense: int = 0
    recent: int = 1
    ordered: bool = False
    resort: int = 256
    salience: bool = False
    calibrated: bool = False
    projected: bool = False
    estimates: int = 0
    scans_keys: bool = False
    every: int = 1
    choosing: tuple[int, ...] = ()
    choosers_read_all: bool = False
    host: bool = False
    sinks: int = 0
    clustered: bool = False
    rebuilds: bool = False
    joint_heads: bool = False

    @property
    def summarized(self) -> int:
        """How many neighboring entries share a summary of their values that `Estimates.summarize` computes, or 0.

        Clusters are no neighbors: their values are summarized when they are found, see `Clusters`.
        """
        return 0 if self.clustered else self.estimates

    def source(self, layer_idx: int) -> int | None:
        """The layer that chooses for a layer: itself, an earlier one, or None if it reads all slots.

        Examples:
            >>> [ReaderTraits(dense=1, every=2).source(layer_idx) for layer_idx in range(5)]
            [None, 1, 1, 3, 3]
        """
        if layer_idx < self.dense:
            return None
        if self.choosing:
            return max((chooser for chooser in self.choosing if chooser <= layer_idx), default=None)
        return layer_idx - (layer_idx - self.dense) % self.every

    def shares(self, layer_idx: int) -> bool:
        """Whether a layer chooses for the next one too.

        Examples:
            >>> ReaderTraits(every=2).shares(2), ReaderTraits(every=2).shares(3), ReaderTraits().shares(2)
            (True, False, False)
        """
        return self.source(layer_idx) == layer_idx == self.source(layer_idx + 1)


@runtime_checkable
class LoadsSalience(Protocol):
    """An optional ability of a reader, for `ReaderTraits.calibrated`: the salience of channels comes from a file."""

    def load_salience(self, layer_idx: int, heads: slice = ALL_HEADS) -> Tensor:
        """The salience of the channels of a layer, [H, D] fp32.

        Args:
            layer_idx: Index of the layer.
            heads: Which of the model's KV heads this rank holds.
        """
        ...


@runtime_checkable
class LoadsBasis(Protocol):
    """An optional ability of a reader, for `ReaderTraits.projected`: its index is of coordinates in a calibrated basis.

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


@runtime_checkable
class Clusters(Protocol):
    """An optional ability of a reader, for `ReaderTraits.clustered`: an entry belongs to a cluster of similar keys.

    Entries are single slots, and `score` returns the scores of C clusters, [B, H, G, C]. A step reads the entries of
    the best clusters, the earlier positions of the last one. Clusters are found from all keys of a layer: after each
    prompt, and again after `ReaderTraits.resort` decode steps. In between, `refresh` assigns new keys to them.

    With `ReaderTraits.estimates`, what is not read of a cluster takes part in attention as one slot, that has the score
    and the mean value of the cluster, and stands for as many tokens. `Estimates` is not needed for that.
    """

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


@runtime_checkable
class RebuildsKeys(Protocol):
    """An optional ability of a reader, for `ReaderTraits.rebuilds`: a step computes the keys that it reads.

    The index holds a basis of the keys of each head without their rotary embedding, and the coefficients of each key in
    it. A step rebuilds the keys of the slots that it reads, and the engine rotates them to their positions. Only the
    keys of the newest tokens (`ReaderTraits.recent`), and of those at the first positions (`ReaderTraits.sinks`), are
    read as they are stored. The basis is found from all keys of a layer: after each prompt, and again after
    `ReaderTraits.resort` decode steps. In between, new keys get coefficients in it.

    With `ReaderTraits.joint_heads`, the basis is of the keys of all heads of a token, one behind the other, and
    coefficients are those of a token.

    Needs equally many slots in full precision in every head, so no codec. All methods but `fit_basis` and `has_basis`
    are traceable.
    """

    def fit_basis(self, index: Index, moments: Tensor, rows: Tensor) -> None:
        """Find the basis of some rows, in place; `project` of all entries follows. Not traceable.

        Args:
            index: The index.
            moments: Sums of the outer products of the unrotated keys of each head, [B, H, D, D] fp64; of all heads with
                `ReaderTraits.joint_heads`, [B, 1, H * D, H * D].
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


@runtime_checkable
class ReadsChannels(Protocol):
    """An optional ability of a reader: `score` reads a few channels of every key, by one call of `products`.

    There is no index of keys, and `refresh` is not called.
    """

    def channels_read(self, head_dim: int) -> int:
        """How many channels of a key are read; 0 for none."""
        ...


class Estimated(NamedTuple):
    """Slots that stand for those that a step does not read. Attention treats them as the slots that it reads.

    Attributes:
        scores: Their scores, [B, H, G, R] fp32, scaled and capped; -inf for a slot that stands for none.
        values: Their values, [B, H, R, D], finite everywhere.
    """

    scores: Tensor
    values: Tensor


@runtime_checkable
class Estimates(Protocol):
    """An optional ability of a reader, for `ReaderTraits.estimates`: what is not read takes part in attention.

    The index also has summaries of values: one for every block of `ReaderTraits.estimates` neighboring entries. Like
    entries, they are recomputed when one of their slots is overwritten. Both methods are traceable, as `score` is.
    """

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


def channels_read(reader: Reader, head_dim: int) -> int:
    """How many channels of every key `score` reads; 0 for none, or all (`ReaderTraits.scans_keys`).

    Args:
        reader: The reader.
        head_dim: Size of a key.
    """
    return reader.channels_read(head_dim) if isinstance(reader, ReadsChannels) else 0


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
    that has all members is accepted whatever its class. Optional abilities are `LoadsSalience`,
    `LoadsBasis`, `ReadsChannels`, `Estimates`, `Clusters` and `RebuildsKeys`.
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
                `traits.scans_keys` must declare, or some channels of them, see `ReadsChannels`.

        Returns:
            [B, H, G, X] fp32; of clusters instead of entries with `ReaderTraits.clustered`.
        """
        ...

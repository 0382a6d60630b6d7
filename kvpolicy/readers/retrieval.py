"""Retrieval: read the clusters whose center has the largest product with the query, and estimate the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import thin_products
from kvpolicy.kernels.slot_writes import write_slots
from kvpolicy.protocols import Changed, Estimated, Read, ReaderTraits, SlotAccess
from kvpolicy.readers.clusters import ClusterTokens, need_in_clusters
from kvpolicy.readers.common import LONG, Amount, TokenReader, amount, slots_of_page
from kvpolicy.text.strategy import AutoInt, least, strategy

SEGMENT = 8192
"""Tokens that are clustered together: neighbors in the order of positions."""

ROUNDS = 10
"""Rounds of k-means."""

_TILE = 2**20
"""Products of one head's keys with directions that are computed at a time."""

_TIE = 1e-5
"""Products that differ by less than this, relative to the largest, count as equal."""

_LEAST = 1e-30


class RetrievalIndex(NamedTuple):
    """The clusters of one layer.

    Attributes:
        directions: Direction of each cluster, of length 1, [B, H, C, D] in the dtype of the keys.
        lengths: Mean product of the keys of a cluster with its direction, [B, H, C, 1] fp32.
        used: Which clusters there are, [B, H, C] bool.
        values: Their mean values, [B, H, C, D] in the dtype of the keys; the empty tuple if nothing is estimated.
        assigned: Cluster of each slot, [B, H, X, 1] int16, or int32 where there are too many clusters for that.
    """

    directions: Tensor
    lengths: Tensor
    used: Tensor
    values: Tensor | tuple[()]
    assigned: Tensor


@strategy
class Retrieval(TokenReader):
    """Read the clusters whose center has the largest product with the query, and estimate the others.

    After a prompt, the keys of each KV head are divided into clusters of similar keys, by k-means. Of each cluster, the
    index holds its center and the mean of its values, and of each token, its cluster. A step multiplies the query with
    the centers, and reads the tokens of the best clusters. What is not read of a cluster takes part in the same softmax
    as a single slot, with the score of the center and the mean value, that stands for as many tokens.

    Tokens of a cluster may lie anywhere, so the order of the slots does not matter: this reader suits caches that
    evict, and all codecs. New tokens join the cluster whose direction has the largest product with their key; every
    `rebuild` steps, and after each prompt, clusters are found again.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float). Of the
            last cluster, the earlier positions are read as far as they fit.
        cluster: Tokens of a cluster on average; `auto`: 4 in a row of less than 4,096 tokens, else 16.
        estimate: Whether the tokens that are not read take part in attention.
        dense: How many of the model's first layers read everything.
        sinks: Tokens at the first positions that are always read, and not clustered; the first kept one always is read.
        recent: The newest tokens that are always read; the newest one always is.
        rebuild: After how many steps clusters are found again.
        host: Whether keys and values lie in host memory, from where a step copies the tokens that it reads. Clusters,
            and everything of the layers that read everything, stay on the device.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> Retrieval(read=0.05).count(1000), Retrieval(cluster=16).clusters(1000), Retrieval().clusters(16_384)
        (50, 63, 1024)

    Source:
        the shape of RetrievalAttention (Liu et al., 2024, arXiv:2409.10516): a vector index for each head, and keys and
        values in host memory; with the clusters of RetroInfer (Chen et al., 2025, arXiv:2505.02922), and its authors'
        code, commit 6b1228c: spherical k-means in segments of 8,192 tokens, and its attention to clusters that are
        retrieved and clusters that are estimated. RetrievalAttention's index is a graph that is built from queries of
        the prompt, since queries are distributed otherwise than keys, and the host searches it; here there are clusters
        of the keys alone, which the device compares with the query. Differences from RetroInfer:

        - As many tokens are read in each step, and not as many clusters, so that no shape depends on data; the authors
          read 1.8 % of the clusters. Of the last cluster, the earlier positions are read as far as they fit.
        - Everything that is not read is estimated; the authors estimate 23 % of the clusters, and leave out the others.
        - The center is the mean key's part along the direction of the cluster, which its keys were assigned by; the
          authors take the mean key.
        - There is one set of tokens per KV head: a token is as needed as the query head says that weights its cluster
          most, after a softmax in which a cluster counts once for each token. Ties go to the earlier position.
        - Generated tokens join clusters at once, and all tokens are clustered again every `rebuild` steps; the authors
          always read them, and cluster them apart every 1,024.
        - Mean values are those of the tokens that were held when clusters were found, numbers of tokens are current;
          the authors hold sums.
        - The first 4 and the newest 16 tokens are within `read` by default; the authors read 4 and 64 beside.
        - Nothing is cached between steps on the device; the authors have a cache of blocks.
    """

    read: Amount = amount(256)
    cluster: AutoInt = least(1, "auto")
    estimate: bool = True
    dense: int = least(0, 0)
    sinks: int = least(0, 4)
    recent: int = least(1, 16)
    rebuild: int = least(1, 1024)
    host: bool = False

    @property
    def traits(self) -> ReaderTraits:
        """Clusters, which are found from all keys, and a mean value for each."""
        return ReaderTraits(
            dense=self.dense,
            recent=self.recent,
            resort=self.rebuild,
            fitted=self,
            estimates_rest=self.estimate,
            host=self.host,
        )

    def clusters(self, slots: int) -> int:
        """The most clusters that a head may need, with `slots` slots or fewer of them filled."""
        whole, rest = divmod(slots, SEGMENT)
        per_segment = self._stride
        wanted = whole * per_segment + -(-rest // slots_of_page(self.cluster, max(slots, 1)))
        # With `auto`, a shorter row has clusters of fewer tokens, and may have more of them.
        shorter = min(slots, LONG - 1)
        return max(wanted, -(-shorter // slots_of_page(self.cluster, shorter)))

    @property
    def _stride(self) -> int:
        """Clusters of a whole segment."""
        return -(-SEGMENT // slots_of_page(self.cluster, SEGMENT))

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> RetrievalIndex:
        """No clusters."""
        clusters = self.clusters(entries)
        number = torch.int16 if clusters <= torch.iinfo(torch.int16).max else torch.int32
        vectors = (batch, heads, clusters, head_dim)
        return RetrievalIndex(
            directions=torch.zeros(vectors, dtype=dtype, device=device),
            lengths=torch.zeros(batch, heads, clusters, 1, device=device, dtype=torch.float32),
            used=torch.zeros(batch, heads, clusters, dtype=torch.bool, device=device),
            values=torch.zeros(vectors, dtype=dtype, device=device) if self.estimate else (),
            assigned=torch.zeros(batch, heads, entries, 1, dtype=number, device=device),
        )

    def fit_clusters(
        self, index: RetrievalIndex, keys: Tensor, values: Tensor, positions: Tensor, rows: Tensor
    ) -> None:
        """Find the clusters of `rows` [B] bool, in place, from the keys and values of all slots, [B, H, X, D].

        Those of slots at position -1 are undefined. Values count only if something is estimated.
        """
        most = index.used.shape[-1]
        directions, used = self._directions(keys, positions, most)
        # Rounded first: tokens are assigned by the directions that are held.
        directions = directions.to(index.directions.dtype)
        occupied = positions >= 0
        assigned = nearest(keys.masked_fill(~occupied[..., None], 0), directions, used)
        counted = occupied & (positions >= self.sinks)
        means, _ = mean_by_cluster(keys, assigned, counted, most)
        lengths = (means * directions.double()).sum(-1, keepdim=True)
        found = [(index.directions, directions), (index.lengths, lengths), (index.used, used)]
        if isinstance(index.values, Tensor):
            found.append((index.values, mean_by_cluster(values, assigned, counted, most)[0]))
        for held, new in found:
            chosen = rows.view(-1, *[1] * (held.dim() - 1))
            held.copy_(torch.where(chosen, new.to(held.dtype), held))

    def _directions(self, keys: Tensor, positions: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Directions of the clusters of each head, [B, H, C, D] fp32, and which there are, [B, H, C] bool."""
        clustered = positions >= self.sinks
        place = torch.where(clustered, positions, torch.iinfo(positions.dtype).max)
        order = place.argsort(dim=-1, stable=True)
        total = clustered.sum(-1)
        size = torch.where(total < LONG, slots_of_page(self.cluster, 1), slots_of_page(self.cluster, LONG))
        shape = (*keys.shape[:2], most)
        directions = keys.new_zeros(*shape, keys.shape[-1], dtype=torch.float32)
        used = torch.zeros(shape, dtype=torch.bool, device=keys.device)
        for number in range(segments(int(total.max()))):
            of_segment = order[..., number * SEGMENT : (number + 1) * SEGMENT]
            tokens = (total - number * SEGMENT).clamp(0, of_segment.shape[-1])
            clusters = (tokens + size - 1).div(size, rounding_mode="floor")
            held = keys.gather(2, of_segment[..., None].expand(*of_segment.shape, keys.shape[-1]))
            first = number * self._stride
            width = min(max(int(clusters.max()), 1), most - first)
            at = slice(first, first + width)
            directions[:, :, at], used[:, :, at] = k_means(held, tokens, clusters, width)
        return directions, used

    def has_clusters(self, index: RetrievalIndex) -> Tensor:
        """Whether clusters of a row were found, [B] bool."""
        return index.used.flatten(1).any(-1)

    def is_missing(self, index: RetrievalIndex, slots: SlotAccess, steps: int) -> bool:
        """Whether a row has no clusters that is read in part from now on, since it was given more slots."""
        return not steps and bool(slots.missing(self.has_clusters(index), None).any())

    def update(self, index: RetrievalIndex, slots: SlotAccess, changed: Changed) -> None:
        """Find clusters if the index is made again, and assign the keys that changed to them."""
        if changed.emptied is not None:
            return
        if changed.entries is None:
            rows = slots.missing(self.has_clusters(index), changed.placed)
            if bool(rows.any()):
                every = torch.arange(slots.entries, device=rows.device).expand(*index.used.shape[:2], -1)
                at, _ = slots.of_entries(every)
                keys = slots.keys(at)
                values = slots.values(at) if self.estimate else keys
                self.fit_clusters(index, keys, values, slots.positions.gather(-1, at), rows)
        slots.whole((index.directions, index.used))
        TokenReader.update(self, index, slots, changed)

    def refresh(self, index: RetrievalIndex, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Assign some keys to clusters; see `Reader.refresh`."""
        keys = keys.squeeze(3).masked_fill(~occupied, 0)  # a page is one slot
        found = nearest(keys, index.directions, index.used)
        write_slots(index.assigned, entries, found[..., None].to(index.assigned.dtype))

    def score(self, index: RetrievalIndex, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products with the centers of the clusters, [B, H, G, C] fp32."""
        return thin_products(queries, index.directions) * index.lengths.squeeze(-1)[:, :, None]

    def choose(self, index: RetrievalIndex, slots: SlotAccess, queries: Tensor) -> Read:
        """Read the tokens of the best clusters, and estimate what is not read of each cluster."""
        slots.whole(index)
        scores = slots.scores(self.score(index, queries, slots.products))
        assigned = index.assigned.squeeze(-1).long()
        clusters = ClusterTokens.counted(assigned, slots.log_tokens(), scores.shape[-1])
        read = slots.most_needed(need_in_clusters(scores, clusters, slots.ranks), self.sinks)
        if not self.estimate:
            return read
        assert read.entries is not None and read.read is not None
        of_rest = scores + clusters.unread(read.entries, read.read).log()[:, :, None]
        return read._replace(rest=partial(self._rest, index, of_rest))

    def _rest(self, index: RetrievalIndex, scores: Tensor, normalizer: Tensor) -> Estimated:
        """The unread part of each cluster, as a slot with its mean value, whatever the weight of the others is."""
        assert isinstance(index.values, Tensor)  # only called if something is estimated
        return Estimated(scores, index.values)

    def count_step(self, index: RetrievalIndex, slots: SlotAccess) -> None:
        slots.whole(index)
        slots.written((index.directions, index.used))


def segments(tokens: int) -> int:
    """How many segments so many tokens have.

    Examples:
        >>> segments(0), segments(8192), segments(8193)
        (0, 1, 2)
    """
    return -(-tokens // SEGMENT)


def nearest(keys: Tensor, directions: Tensor, used: Tensor) -> Tensor:
    """The direction that has the largest product with each key; of equal ones, the first.

    Args:
        keys: [B, H, n, D].
        directions: [B, H, C, D].
        used: Which of the directions there are, [B, H, C] bool.

    Returns:
        [B, H, n] int64; 0 in a head without directions.

    Examples:
        >>> nearest(torch.tensor([[[[3.0, 1.0]]]]), torch.eye(2)[None, None], torch.ones(1, 1, 2, dtype=torch.bool))
        tensor([[[0]]])
    """
    count = directions.shape[2]
    across = directions.float().mT
    number = torch.arange(count, device=keys.device)
    step = max(_TILE // max(count, 1), 1)
    found: list[Tensor] = []
    for tile in keys.float().split(step, 2):
        product = (tile @ across).masked_fill(~used[:, :, None], -torch.inf)
        best = product.amax(-1, keepdim=True)
        # Sums of a product over more keys are rounded otherwise, and what is equal must stay so.
        within = product >= best - _TIE * best.abs()
        found.append(torch.where(within, number, count).amin(-1).clamp_max(count - 1))
    # In a head without directions, -inf - inf is NaN, and no direction is within.
    return torch.where(used.any(-1, keepdim=True), torch.cat(found, 2), 0)


def mean_by_cluster(vectors: Tensor, assigned: Tensor, counted: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Means of vectors by cluster.

    Args:
        vectors: [B, H, n, D].
        assigned: The cluster of each, [B, H, n] int64.
        counted: Which vectors count, [B, H, n] bool; others may be undefined.
        clusters: C.

    Returns:
        The means, [B, H, C, D] fp64, 0 for a cluster without a vector; and how many vectors each has, [B, H, C] fp64.
    """
    # In fp64, so that a mean does not depend on the order of its sum.
    kept = vectors.double().masked_fill(~counted[..., None], 0)
    index = assigned[..., None].expand(kept.shape)
    total = kept.new_zeros(*kept.shape[:2], clusters, kept.shape[-1]).scatter_add(2, index, kept)
    number = kept.new_zeros(*kept.shape[:2], clusters).scatter_add(2, assigned, counted.double())
    return total / number.clamp_min(1)[..., None], number


def k_means(keys: Tensor, tokens: Tensor, clusters: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Find the directions of clusters of keys, from evenly spaced keys on.

    Args:
        keys: The keys of a segment, in the order of positions, [B, H, n, D]; those behind `tokens` are undefined.
        tokens: How many there are in each head, [B, H] int64.
        clusters: How many clusters each head gets, at most `tokens`, [B, H] int64.
        most: C.

    Returns:
        Directions of length 1, [B, H, C, D] fp32, and which of them there are, [B, H, C] bool.
    """
    number = torch.arange(most, device=keys.device)
    used = number < clusters[..., None]
    start = ((2 * number + 1) * tokens[..., None]).div(2 * clusters[..., None].clamp_min(1), rounding_mode="floor")
    start = start.minimum(tokens[..., None] - 1).clamp_min(0)
    counted = torch.arange(keys.shape[2], device=keys.device) < tokens[..., None]
    keys = keys.float().masked_fill(~counted[..., None], 0)
    directions = unit(keys.gather(2, start[..., None].expand(*start.shape, keys.shape[-1])))
    for _ in range(ROUNDS):
        means, held = mean_by_cluster(keys, nearest(keys, directions, used), counted, most)
        # A cluster that lost all of its keys stays where it was.
        directions = torch.where(held[..., None] > 0, unit(means).float(), directions)
    return directions, used


def unit(vectors: Tensor) -> Tensor:
    """Vectors [..., D] of length 1; those of zeros stay so."""
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(_LEAST)

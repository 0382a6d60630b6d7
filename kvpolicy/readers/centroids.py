"""Centroids: read the pages whose mean key has the largest product with the query, and estimate the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import thin_products
from kvpolicy.kernels.slot_writes import write_slots
from kvpolicy.protocols import Estimated, ReaderTraits
from kvpolicy.readers.common import Amount, amount, page_means, slots_of_page
from kvpolicy.readers.summaries import SummaryReader
from kvpolicy.text.strategy import AutoInt, least, strategy


class CentroidIndex(NamedTuple):
    """The centroids of one layer, in the dtype of the keys; 0 for a page without a token.

    Attributes:
        keys: The mean key of each page, [B, H, X, D].
        values: The mean value of each page, [B, H, X, D]; the empty tuple if nothing is estimated.
    """

    keys: Tensor
    values: Tensor | tuple[()]


@strategy
class Centroids(SummaryReader):
    """Read the pages whose mean key has the largest product with the query, and estimate the others.

    The slots are divided into pages. Of each page, the index holds the mean key, as attention sees keys, and the mean
    value. A step reads the pages whose mean keys have the largest products with the query, and attends to their tokens.
    Each of the other pages takes part in the same softmax as a single slot, with its mean key and its mean value, that
    stands for as many tokens as the page holds. So no token is without any weight.

    The index takes two vectors per page: 1/16 of the keys and values at a page of 16 slots, and 1/4 at a page of 4.
    Pages are useful if they hold neighboring tokens. So a cache that evicts sorts its slots every `resort` steps, and
    with a codec nothing may be evicted while decoding.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float); rounded
            up to whole pages.
        page: Slots of a page; `auto`: 4 in a layer of less than 4,096 slots, else 16. With a codec whose slots share
            parameters, it is rounded up to a multiple of the codec's `group_size`.
        estimate: Whether the pages that are not read take part in attention.
        dense: How many of the model's first layers read everything.
        recent: The newest tokens whose pages are always read; those of the newest one and of the first kept one always
            are.
        resort: After how many steps the slots are sorted again by position, in a cache that evicts.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> Centroids().page_size(1000), Centroids(read=0.05).count(1000), Centroids().page_size(16_384)
        (4, 52, 16)

    Source:
        RetroInfer (Chen et al., 2025, arXiv:2505.02922), and its authors' code, commit 6b1228c: its weighted attention
        of clusters that are read and clusters that are estimated. Differences:

        - Clusters are pages of neighbors, and not found by k-means in segments of 8,192 keys, so that an entry follows
          from its own slots in every step; the authors cluster generated tokens every 1,024 steps. Means are computed
          anew when a slot of a page is overwritten, and slots of a cache that evicts are sorted again.
        - Every page that is not read is estimated; the authors read 1.8 % of the clusters, estimate 23 %, and leave out
          the others.
        - Mean values are held, and not sums.
        - Everything stays on the device; the authors keep clusters in host memory, behind a cache of blocks.
        - There is one set of pages per KV head: a page is as needed as the query head says that weights it most, after
          a softmax over the pages, in which a page counts once and not once for each token. Ties go to the earlier
          position.
        - The pages of the first kept token and of the newest `recent` are always read; the authors always read the
          first 4 tokens and the newest 64.
        - Slots that stand for several merged tokens count once in the means, and as often as they stand for in the
          weight of their page.
    """

    read: Amount = amount(256)
    page: AutoInt = least(1, "auto")
    estimate: bool = True
    dense: int = least(0, 0)
    recent: int = least(1, 1)
    resort: int = least(1, 256)

    @property
    def traits(self) -> ReaderTraits:
        """Pages of neighbors, unless a page is one slot, and a mean value for each."""
        return ReaderTraits(
            dense=self.dense,
            recent=self.recent,
            ordered=self.page != 1,
            resort=self.resort,
            estimates_rest=self.estimate,
        )

    @property
    def block(self) -> int:
        """A page has a mean value of its own."""
        return 1 if self.estimate else 0

    def page_size(self, slots: int) -> int:
        return slots_of_page(self.page, slots)

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> CentroidIndex:
        keys = torch.zeros(batch, heads, entries, head_dim, dtype=dtype, device=device)
        return CentroidIndex(keys, torch.zeros(keys.shape, dtype=dtype, device=device) if self.estimate else ())

    def refresh(self, index: CentroidIndex, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Compute the mean keys of some pages; see `Reader.refresh`."""
        write_slots(index.keys, entries, page_means(keys, occupied).to(index.keys.dtype))

    def score(self, index: CentroidIndex, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products with the mean keys, [B, H, G, X] fp32."""
        return thin_products(queries, index.keys)

    def summarize(self, index: CentroidIndex, blocks: Tensor, values: Tensor, occupied: Tensor) -> None:
        """Compute the mean values of some pages; see `SummaryReader`."""
        assert isinstance(index.values, Tensor)  # only called if there are blocks
        write_slots(index.values, blocks, page_means(values, occupied).to(index.values.dtype))

    def estimate_rest(self, index: CentroidIndex, scores: Tensor, read: Tensor, normalizer: Tensor) -> Estimated:
        """One slot for each page that is not read; see `SummaryReader`."""
        assert isinstance(index.values, Tensor)
        return Estimated(scores.masked_fill(read[:, :, None], -torch.inf), index.values)

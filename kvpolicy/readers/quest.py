"""Quest: read the pages whose keys may have the largest product with the query."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpolicy.kernels.products import thin_products
from kvpolicy.protocols import ReaderTraits
from kvpolicy.readers.bounds import BoundsReader, PageBounds
from kvpolicy.readers.common import Amount, amount, slots_of_page
from kvpolicy.text.strategy import AutoInt, least, strategy


@strategy
class Quest(BoundsReader):
    """Read the pages of tokens whose keys may have the largest product with the query.

    The slots are divided into pages. Of each page, the index holds the largest and the smallest number of every key
    channel, as attention sees the keys. The larger of the two products of a query's channel with them bounds that
    channel's product from above, and so their sum bounds the product of the query with every key of the page. A step
    reads the pages with the largest bounds.

    The index takes two keys per page: 1/16 of the keys and values at a page of 16 slots, and 1/4 at a page of 4. Pages
    are useful if they hold neighboring tokens. So a cache that evicts sorts its slots every `resort` steps, and with a
    codec nothing may be evicted while decoding.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float); rounded
            up to whole pages.
        page: Slots of a page; `auto`: 4 in a layer of less than 4,096 slots, else 16. With a codec whose slots share
            parameters, it is rounded up to a multiple of the codec's `group_size`.
        dense: How many of the model's first layers read everything.
        recent: The newest tokens whose pages are always read; those of the newest one and of the first kept one always
            are.
        resort: After how many steps the slots are sorted again by position, in a cache that evicts.
        host: Whether keys and values lie in host memory, from where a step copies the pages that it reads. Bounds, and
            everything of the layers that read everything, stay on the device.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> Quest().page_size(1000), Quest(read=0.05).count(1000), Quest().page_size(16_384)
        (4, 52, 16)

    Source:
        Quest (Tang et al., ICML 2024, arXiv:2406.10774), Algorithm 1, and its authors' code, commit 01c1623.
        Differences:

        - There is one set of pages per KV head, and not per query head: a page is as needed as the query head says that
          weights it most, after a softmax over the pages. The evaluation code of the authors repeats the KV heads;
          their kernels have as many KV heads as query heads.
        - The page is shorter where few tokens are held. `auto` follows the slots of the layer: a short row beside a
          long one may have longer pages than alone.
        - The first page is always read; the authors' kernels always read the newest one only.
        - Bounds are computed anew when a slot of a page is overwritten. In a cache that evicts, slots are sorted again.
        - The evaluation code of the authors skips the first two layers; here `dense` says how many.
        - Ties go to the earlier position.
    """

    read: Amount = amount(256)
    page: AutoInt = least(1, "auto")
    dense: int = least(0, 2)
    recent: int = least(1, 1)
    resort: int = least(1, 256)
    host: bool = False

    @property
    def traits(self) -> ReaderTraits:
        """Pages of neighbors, unless a page is one slot."""
        ordered = self.page != 1
        return ReaderTraits(dense=self.dense, recent=self.recent, ordered=ordered, resort=self.resort, host=self.host)

    def page_size(self, slots: int) -> int:
        return slots_of_page(self.page, slots)

    def score(self, index: PageBounds, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The upper bound of the products with the keys of each page, [B, H, G, X] fp32."""
        # max(q * high, q * low) is q * high where q is positive, and q * low where it is negative.
        return thin_products(torch.cat([queries.clamp_min(0), queries.clamp_max(0)], -1), index.bounds)

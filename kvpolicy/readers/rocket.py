"""RocketKV: read the pages whose keys may have the largest product in the largest channels of the query."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import thin_products
from kvpolicy.protocols import ModelInfo, Products, Read, ReaderTraits, SlotAccess
from kvpolicy.readers.bounds import BoundsReader, PageBounds
from kvpolicy.readers.common import Amount, amount
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy


class Split(NamedTuple):
    """How the two stages of RocketKV share the reduction of what a step reads.

    Attributes:
        budget: Fraction of the prompt that is kept: the budget of the policy.
        read: Fraction of the slots of a layer that a step reads: the option `read` of the reader.
    """

    budget: float
    read: float


@strategy
class RocketKV(BoundsReader):
    """Read the pages whose keys may have the largest product in the largest channels of the query.

    Two indices in one: as in Quest, the slots are divided into pages, and the index holds the largest and the smallest
    number of every key channel of each page. As in SparQ, a step reads few channels of it, those in which the queries
    of a KV head are largest. In each of them, the sign of the summed queries says whether the largest number counts or
    the smallest, so that a step reads one number of a page and channel.

    The paper puts this reader behind a prompt that SnapKV has compressed once, and divides the reduction between both:
    `split` computes the budget and `read`. By default, scores cost a step as many bytes as what it then reads.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float); rounded
            up to whole pages.
        page: Slots of a page; `auto`: with c the slots over twice what is read, the root of c, rounded up, and at most
            c. With a codec whose slots share parameters, it is rounded up to a multiple of the codec's `group_size`.
        channels: Channels of the index that a step reads, at most the head dimension; `auto`: `page / c` of them.
        dense: How many of the model's first layers read everything.
        recent: The newest tokens whose pages are always read; those of the newest one and of the first kept one always
            are.
        resort: After how many steps the slots are sorted again by position, in a cache that evicts.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> reader = RocketKV(read=256)
        >>> reader.page_size(4096), reader.count(4096), reader.channels_read(4096 // 3, 128)
        (3, 258, 48)
        >>> [round(share, 3) for share in RocketKV.split(0.05)]
        [0.253, 0.099]

    Source:
        RocketKV (Behnam et al., ICML 2025, arXiv:2502.14051), its hybrid sparse attention, and its authors' code,
        commit 63637c8. The paper's first stage is the selector `snapkv:kernel=63:pool=max:decode=grow`. Differences:

        - Whole pages are read; the authors read as many tokens as `read` says, so that the last page may be read in
          part.
        - A page is as needed as the query head says that weights it most, after a softmax over the pages; the authors
          add up the weights of the query heads of a KV head, after a softmax over the tokens.
        - The pages of the newest token and of the first kept one are always read. Ties go to the earlier position.
        - Bounds are computed anew when a slot of a page is overwritten, and slots of a cache that evicts are sorted
          again; the authors widen the bounds of the last page, and never evict while decoding.
        - The channels of a page lie together, and those that a step reads are gathered. The authors store each channel
          contiguously; here a processor that reads memory in whole lines may move more than is counted.
        - Pages and channels of `auto` follow the slots of the layer: a short row beside a long one may have longer
          pages than alone. The authors compute them once, from the length of the prompt and the new tokens.
        - The version for conversations, which keeps the whole prompt and compresses it again for each turn, is this
          reader without the first stage.
    """

    read: Amount = amount(256)
    page: AutoInt = least(1, "auto")
    channels: AutoInt = least(1, "auto")
    dense: int = least(0, 0)
    recent: int = least(1, 1)
    resort: int = least(1, 256)

    @staticmethod
    def split(share: float) -> Split:
        """Divide a reduction between what a prompt keeps and what a step reads.

        A step then reads keys, values and index of about `share` times the bytes of the full cache.

        Args:
            share: Of the bytes of the full cache, above 0 and up to 1.

        Raises:
            KVPolicyError: If the share is out of range.
        """
        if not 0 < share <= 1:
            raise KVPolicyError(f"share must be above 0 and up to 1, got {share!r}; try 0.05.")
        # The paper's exponent: the more is to be saved, the larger is the share of the first stage.
        budget = share ** min(0.2 - 0.06 * math.log2(share), 0.8)
        return Split(budget, share / 2 / budget)

    @property
    def traits(self) -> ReaderTraits:
        """Pages of neighbors, unless a page is one slot."""
        return ReaderTraits(dense=self.dense, recent=self.recent, ordered=self.page != 1, resort=self.resort)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a key has fewer channels than are read."""
        if self.channels != "auto" and self.channels > model.head_dim:
            raise KVPolicyError(
                f"RocketKV.channels must be at most the head dimension of {model.head_dim}, got {self.channels}; try "
                f"{max(1, model.head_dim // 4)}."
            )

    def page_size(self, slots: int) -> int:
        if self.page != "auto":
            return self.page
        ratio = max(1.0, slots / self.read if isinstance(self.read, int) else 1 / self.read) / 2
        return max(1, min(math.floor(ratio), math.ceil(math.sqrt(ratio))))

    def channels_read(self, entries: int, head_dim: int) -> int:
        """Channels of the index that a step reads of each page, in a layer of `entries` pages."""
        if self.channels != "auto":
            return self.channels
        # Page over c, since the slots are page times entries.
        part = 2 * (self.read / max(entries, 1) if isinstance(self.read, int) else self.read * self.page_size(1))
        return min(head_dim, max(1, round(head_dim * part)))

    def choose(self, index: PageBounds, slots: SlotAccess, queries: Tensor) -> Read:
        self._count(index, slots)
        return slots.best(slots.scores(self.score(index, queries, slots.products)))

    def count_step(self, index: PageBounds, slots: SlotAccess) -> None:
        self._count(index, slots)
        slots.written()

    def score(self, index: PageBounds, queries: Tensor, products: Products) -> Tensor:
        """The products in the largest channels, as large as those in all are expected to be, [B, H, G, X] fp32."""
        head_dim = queries.shape[-1]
        size = queries.float().abs()
        together, summed = products.group_mean(torch.cat([size, queries.float()], -1)).chunk(2, -1)
        # In their order: the sum of a product is that of a page's channels in their order.
        channels = together.topk(self.channels_read(index.bounds.shape[2], head_dim), -1).indices.sort(-1).values
        column = channels + head_dim * (summed.gather(-1, channels) <= 0)
        bounds = index.bounds.gather(-1, column[:, :, None].expand(*index.bounds.shape[:3], -1))
        taken = channels[:, :, None].expand(*queries.shape[:3], -1)
        # A query of zeros has no share of anything, and products of 0.
        tiny = torch.finfo(torch.float32).tiny
        covered = (size.gather(-1, taken).sum(-1) / size.sum(-1).clamp_min(tiny)).clamp_min(tiny)
        return thin_products(queries.gather(-1, taken), bounds) / covered.sqrt()[..., None]

    def _count(self, index: PageBounds, slots: SlotAccess) -> None:
        """Count the channels of the index that a step reads, one number of each page."""
        entries, width = index.bounds.shape[2:]
        slots.rows(index.bounds.mT, self.channels_read(entries, width // 2))

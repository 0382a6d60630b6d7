"""SparQ: read the tokens whose keys have the largest product with the query in its own largest channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.slot_writes import write_slots
from kvpolicy.protocols import Changed, Estimated, ModelInfo, Products, ReaderTraits, SlotAccess
from kvpolicy.readers.common import Amount, amount
from kvpolicy.readers.summaries import SummaryReader
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy

_BLOCK = 32
"""Slots whose values are summed together: a step sums one block anew, and adds up the sums of all."""


class SparQIndex(NamedTuple):
    """The index of one layer, if the output is corrected.

    Attributes:
        sums: Sum of the values of each block of slots, [B, H, ceil(X / 32), D] fp32.
    """

    sums: Tensor


@strategy
class SparQ(SummaryReader):
    """Read the tokens whose keys have the largest product with the query in its own largest channels.

    A query has most of its length in few channels, and the products in these channels say which tokens it attends to. A
    step reads these channels of every key, and keys and values of the tokens with the largest results. Channels are
    chosen anew in every step, so there is no index of keys, and nothing to calibrate.

    The weight that attention would give to the tokens that are not read is estimated from the same products. The mean
    of all values gets it. The index holds what this mean is computed from: sums of the values of 32 slots each.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float).
        channels: Channels of every key that are read, at most the head dimension; `auto`: a quarter of it.
        correct: Whether the mean of all values gets the weight of the tokens that are not read.
        dense: How many of the model's first layers read everything.
        recent: The newest tokens that are always read; the newest one and the first kept one always are.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> SparQ(read=0.05).count(1000), SparQ().channels_read(128), SparQ(channels=16).channels_read(128)
        (50, 32, 16)

    Source:
        SparQ Attention (Ribar et al., ICML 2024, arXiv:2312.04985), Algorithm 1, and its authors' code, commit ead9b6a.
        Differences:

        - There is no second copy of the keys. The authors hold one that stores each channel contiguously, which half
          again as much memory pays for; here the channels are gathered from the keys, so that a processor which reads
          memory in whole lines may move more than is counted.
        - With a codec, the products are computed from whole codes, all of which are counted.
        - A token is as needed as the query head says that weights it most, after a softmax over the tokens; the authors
          add up the scores of the query heads of a KV head.
        - The newest and the first kept token are always read, and `recent` is in `read`; the authors read a window of
          the newest, and the newest one besides. Ties go to the earlier position.
        - The mean of the values is that of all slots that the reader divides. It is exact but for the rounding of its
          sums in fp32, also where tokens are evicted: a block is summed anew whenever one of its slots is overwritten.
          The authors update one running mean of a cache that never evicts. A slot that stands for several merged tokens
          counts once in the mean.
        - The mean is one more slot of the same softmax, with the score that gives it its weight. Learned sinks take
          part once, and attention weights that a selector adds up are those of the tokens that are read.
        - With a codec's full-precision buffer, which is always read, the share of what is not read is that among the
          coded slots.
    """

    read: Amount = amount(256)
    channels: AutoInt = least(1, "auto")
    correct: bool = True
    dense: int = least(0, 0)
    recent: int = least(1, 1)

    @property
    def traits(self) -> ReaderTraits:
        """Some channels of every key are read, and the others are estimated, unless the output is not corrected."""
        return ReaderTraits(dense=self.dense, recent=self.recent, scan=self, estimates_rest=self.correct)

    @property
    def is_whole(self) -> bool:
        """No: some channels are read."""
        return False

    @property
    def block(self) -> int:
        """Values whose sum is held."""
        return _BLOCK if self.correct else 0

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a key has fewer channels than are read."""
        if self.channels_read(model.head_dim) > model.head_dim:
            raise KVPolicyError(
                f"SparQ.channels must be at most the head dimension of {model.head_dim}, got {self.channels}; try "
                f"{max(1, model.head_dim // 4)}."
            )

    def channels_read(self, head_dim: int) -> int:
        """Channels of every key that a step reads; see `KeyScan`."""
        return max(1, head_dim // 4) if self.channels == "auto" else self.channels

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> SparQIndex | tuple[()]:
        if not self.correct:
            return ()
        return SparQIndex(
            torch.zeros(batch, heads, -(-entries // _BLOCK), head_dim, device=device, dtype=torch.float32)
        )

    def update(self, index: SparQIndex, slots: SlotAccess, changed: Changed) -> None:
        """Sum values alone: there is no index of keys."""
        self.update_summaries(index, slots, changed)

    def count_step(self, index: SparQIndex | tuple[()], slots: SlotAccess) -> None:
        slots.whole(index)
        slots.written(keys=False, block=self.block)

    def score(self, index: SparQIndex | tuple[()], queries: Tensor, products: Products) -> Tensor:
        """The products in the largest channels, as large as those in all channels are expected to be, [B, H, G, X]."""
        size = queries.float().abs()
        together = products.group_mean(size)
        # In their order: the sum of a product is that of a key's channels in their order.
        channels = together.topk(self.channels_read(queries.shape[-1]), -1).indices.sort(-1).values
        share = size.gather(-1, channels[:, :, None].expand(-1, -1, queries.shape[2], -1)).sum(-1)
        # A query of zeros has no share of anything, and products of 0.
        least = torch.finfo(torch.float32).tiny
        covered = (share / size.sum(-1).clamp_min(least)).clamp_min(least)
        return products(queries, channels) / covered.sqrt()[..., None]

    def summarize(self, index: SparQIndex, blocks: Tensor, values: Tensor, occupied: Tensor) -> None:
        """Sum the values of some blocks; see `SummaryReader`."""
        total = values.double().masked_fill(~occupied[..., None], 0).sum(3)
        write_slots(index.sums, blocks, total.float())

    def estimate_rest(self, index: SparQIndex, scores: Tensor, read: Tensor, normalizer: Tensor) -> Estimated:
        """One slot with the mean value, and the weight of all that is not read; see `SummaryReader`."""
        of_read = scores.masked_fill(~read[:, :, None], -torch.inf).logsumexp(-1)
        of_rest = scores.masked_fill(read[:, :, None], -torch.inf).logsumexp(-1)
        # exp(of_rest - of_read) is how much of the weight is not read, over how much is, as far as few channels say.
        score = torch.where(of_rest > -torch.inf, normalizer + of_rest - of_read, -torch.inf)
        tokens = (scores[:, :, 0] > -torch.inf).sum(-1).clamp_min(1)
        return Estimated(score[..., None], index.sums.sum(2, keepdim=True) / tokens[..., None, None])

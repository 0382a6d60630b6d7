"""ChunkKV: keep whole chunks of neighboring tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, HeadShape, HoldsAttention, Selector, State, View, scoped
from kvpolicy.selectors.base import Wrapper, check_base
from kvpolicy.selectors.common import below_base, position_sums
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.statistics import Results
from kvpolicy.text.strategy import checked, least, strategy


@scoped(ranked="row")
class ChunkState(NamedTuple):
    """The rank of the chunk of each slot's token, and the state of the base.

    Attributes:
        rank: Minus the number of chunks that rank higher, minus 1, [B, H, S] fp32.
        ranked: Tokens that the row had seen when its chunks were ranked, [B] int64.
        base: The state of the base.
    """

    rank: Tensor
    ranked: Tensor
    base: State


@strategy
class ChunkKV(Wrapper):
    """Keep the chunks of neighboring tokens that another selector ranks highest in the mean, the same in all heads.

    A fact is told by several words in a row, of which single ones may score low. So tokens are kept or evicted together
    with their neighbors.

    Args:
        base: The selector that ranks the tokens; any selector. The attention that it holds of them is averaged, or
            their priorities if it holds none.
        size: Positions of a chunk.

    Raises:
        KVPolicyError: If `size` is below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("chunk:size=5/h2o@0.2"))
        'chunk:size=5/h2o@0.2'

    Source:
        ChunkKV (arXiv:2502.00299), Section 3, and kvpress (ChunkKVPress). Differences:

        - What the base always keeps, such as a window, is kept beside the chunks and does not count in them.
        - The budget is used to the last token, so that the first tokens of one more chunk are kept.
        - Generated tokens rank above all chunks. While decoding, tokens of the lowest chunk are evicted, the last one
          first.
        - Each layer ranks its own chunks. In the paper, several layers may share those of one.
        - Each row has its own chunks. kvpress takes those of the first row for the batch.
        - A position counts by its mean over the heads that hold it.
        - Of chunks of equal mean, the first are kept.
        - The `decode` mode is that of the base.
    """

    base: Selector = checked(check_base, SnapKV)
    size: int = least(1, 20)

    @property
    def compares_heads(self) -> bool:
        """No: all heads keep the same chunks."""
        return False

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """No chunk is ranked."""
        return ChunkState(
            rank=torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
            ranked=torch.zeros(batch, dtype=torch.int64, device=device),
            base=self.base.alloc(batch, heads, slots, device, head),
        )

    def observe(self, state: ChunkState, seen: Results, view: View) -> State:
        """Update the base, and rank the chunks of all candidates."""
        base = self.base.observe(state.base, seen, view)
        priority = self.base.priority(base, view)
        counts = view.valid & priority.isfinite()
        # A mean of attention: priorities may be its logarithm or minus its reciprocal, of which one token decides.
        worth = self.base.attention(base) if isinstance(self.base, HoldsAttention) else priority
        return ChunkState(self._ranks(worth, counts, view), view.length.clone(), base)

    def priority(self, state: ChunkState, view: View) -> Tensor:
        """The newest token and what the base keeps, generated tokens by age, then others by chunk: [B, H, N]."""
        return below_base(state.rank, view, state.ranked, self.base.priority(state.base, view))

    def _ranks(self, worth: Tensor, counts: Tensor, view: View) -> Tensor:
        """The rank of the chunk of each token, [B, H, N] fp32.

        Args:
            worth: Of each token, [B, H, N] fp32.
            counts: Which tokens count in their chunks, [B, H, N] bool.
            view: The tokens.
        """
        heads = view.positions.shape[1]
        at = view.positions.long().clamp_min(0)
        size = int(view.length.max()) if view.length.numel() else 0
        heads_with = position_sums(counts.double(), at, size, view)
        sums = position_sums(worth.double().masked_fill(~counts, 0), at, size, view) / heads_with.clamp_min(1)
        held = heads_with > 0
        chunk = torch.arange(size, device=at.device).div(self.size, rounding_mode="floor").expand_as(sums)
        chunks = -(-size // self.size)
        total = sums.new_zeros(sums.shape[0], chunks).scatter_add_(1, chunk, sums)
        tokens = sums.new_zeros(sums.shape[0], chunks).scatter_add_(1, chunk, held.double())
        # Equal means must stay equal, and the fp32 of a mean is what a priority is compared by.
        mean = (total / tokens.clamp_min(1)).float()
        ordered = mean.sort(dim=-1).values
        higher = chunks - torch.searchsorted(ordered, mean, right=True)
        of_token = higher.gather(1, at.flatten(1).div(self.size, rounding_mode="floor")).unflatten(1, (heads, -1))
        return -1.0 - of_token

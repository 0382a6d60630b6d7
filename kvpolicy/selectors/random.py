"""RandomTokens: keep tokens that are drawn at random."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.draws import mixed
from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View, scoped
from kvpolicy.statistics import Results
from kvpolicy.text.strategy import least, strategy


@scoped(key="head")
class Keyed(NamedTuple):
    """The numbers with which the draws of each head begin.

    Attributes:
        key: [B, H] int64.
    """

    key: Tensor


@strategy
class RandomTokens(Selector):
    """Keep the newest token, and others that are drawn at random: the baseline that a selector must exceed.

    Every token has a random number, and those with the largest are kept. So what is kept is a uniform sample of all
    tokens so far, in a prompt as in decode, if all heads have the same budget.

    Args:
        seed: Seed of the draw.
        decode: `evict`: generated tokens take part in the draw; `grow`: they are kept in addition to the budget.

    Raises:
        KVPolicyError: If `seed` is negative.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("random:seed=1@0.2"))
        'random:seed=1@0.2'

    Source:
        our own, as the random eviction that papers compare with. The number of a token is a function of the seed, the
        layer, the KV head and the position, so that a row of a batch, a chunk and a rank draw as if alone. Rows with
        the same prompt thus keep the same tokens; another `seed` draws again. In the pages of a head allocator, the
        heads of a layer share the numbers while decoding, because a page does not know its head: the kept tokens of the
        prompt are drawn again there, and fewer of them stay than in a uniform sample.
    """

    seed: int = least(0, 0)
    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Keys of zero."""
        return Keyed(torch.zeros(batch, heads, dtype=torch.int64, device=device))

    def observe(self, state: Keyed, seen: Results, view: View) -> State:
        """Set the keys, which are the same after each prompt."""
        every = torch.arange(view.ranks.kv_heads(state.key.shape[1]), device=state.key.device)
        keys = mixed(mixed(self.seed, torch.full_like(every, view.layer_idx)), every)[view.ranks.held]
        return Keyed(keys.expand_as(state.key).contiguous())

    def priority(self, state: Keyed, view: View) -> Tensor:
        """The newest token is always kept, other tokens by their random number: [B, H, N]."""
        key = state.key
        if key.shape[1] != view.positions.shape[1]:  # pages, which do not know their heads
            key = mixed(self.seed, torch.full_like(view.length, view.layer_idx))[:, None]
        drawn = mixed(key[:, :, None], view.positions.clamp_min(0).long())
        return view.keep_newest((drawn >> 8).float())  # 24 bits, which fp32 holds exactly

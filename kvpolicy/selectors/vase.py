"""VaSE: keep the tokens whose values have the widest range, and draw the others by their attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.kernels.draws import exponentials, mixed
from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.selectors.asked import Asked, add_generated, among_newest, none_ranked, with_prompt
from kvpolicy.selectors.common import first_tokens, half_budget, keep_always, unranked_first
from kvpolicy.statistics import NewestQueries, Results, Statistic, Vectors
from kvpolicy.text.strategy import between, least, odd, strategy

_TINY = torch.finfo(torch.float32).tiny
_LARGE = 64.0
"""No draw is that large: attention is at most 1, and minus the logarithm of an exponential number is below 17."""

TILE_ELEMENTS = 1 << 22
"""Attention weights in one tile: 16 MiB of fp32."""


@strategy
class VaSE(Selector):
    """Keep the tokens whose values have the widest range, and draw the others by their attention.

    A model whose cache lacks the few values of large magnitude repeats itself without end. So a share of the budget
    keeps the tokens whose values have the widest range between their channels. The rest is a random sample without
    replacement, in which the attention of the newest queries is the probability of a token: what is kept is more
    diverse than the most attended tokens, and those that are attended to less survive some of the rankings.

    Args:
        window: How many of the newest queries are asked; as many of the newest tokens are always kept. At most half the
            budget.
        large: The share of the budget that keeps the widest values, in [0, 1]; it counts the sinks.
        sinks: How many of the first tokens are always kept, at most half the budget.
        kernel: Width of the average pooling of attention along the tokens, odd; 1 for no pooling.
        every: After how many generated tokens all kept tokens are ranked and drawn again; at most half the budget.
            Until then new tokens are kept.
        seed: Seed of the draws.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `window` is outside [1, 32767], `large` outside [0, 1], `kernel` is not odd, `every` is below
            1, or `sinks` or `seed` is negative.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("vase:large=0.5@0.25"))
        'vase:large=0.5@0.25'

    Source:
        VaSE (arXiv:2606.03928), its variant VaSE-AttnV, and its authors' code, commit bfa2692, from which the defaults
        are: 1,024 wide values in a budget of 4,096. Differences:

        - One token, the lowest of the last ranking, is evicted for each generated one, so that there are never more
          than the budget. The code lets the cache grow by 64 tokens and then evicts as many.
        - The code does not shorten a prompt before its budget is exceeded while decoding; here its newest queries rank
          it.
        - Draws are a function of the seed, the layer, the KV head, the position and the tokens that were seen, so that
          a row of a batch and a rank draw as if alone, and a run can be repeated. The code draws anew in each call.
        - Attention is pooled along positions. The code pools along its slots, whose order the draw has changed.
        - The number of wide values follows the budget; in the code, each task has its own.
        - A cap of scores (Gemma 2) and learned attention sinks (gpt-oss) are left out of the attention that ranks.
        - With a codec, coded keys and values are looked at as attention reads them.
        - VaSE-DKV, which ranks as `cur` does by a random sketch of keys and values, is left out.
    """

    window: int = between(1, 32767, 64)  # as many queries are held of each head
    large: float = between(0, 1, 0.25)
    sinks: int = least(0, 4)
    kernel: int = odd(5)
    every: int = least(1, 64)
    seed: int = least(0, 0)
    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The newest queries, and keys and values of all tokens after a prompt and now and then."""
        return (Vectors(generated=True), NewestQueries(self.window))

    @property
    def rerank_every(self) -> int:
        """After `every` tokens."""
        return self.every

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return none_ranked(batch, heads, slots, self.window, head, device)

    def observe(self, state: Asked, seen: Results, view: View) -> State:
        """Take the newest queries of a prompt, and rank every candidate."""
        queries = with_prompt(state.queries, seen[NewestQueries], view)
        return self.rerank(state._replace(queries=queries), seen, view)

    def rerank(self, state: Asked, seen: Results, view: View) -> State:
        """Draw every token by the newest queries, but for the widest values."""
        tokens = seen[Vectors]
        # In the order of positions, for the pooling and for ties.
        order = view.positions.argsort(dim=-1, stable=True)
        inside = order[..., None].expand(*order.shape, tokens.keys.shape[-1])
        keys = tokens.keys.gather(2, inside)
        spread = _spread(tokens.values).gather(-1, order)
        view = view._replace(positions=view.positions.gather(-1, order))
        past = view.valid & ~view.newest(self._width(view))
        attention = self._attention(state.queries, keys, tokens.scale, past, view)
        score = attention.clamp_min(_TINY).log() - self._noise(view).log()
        place, count = _places(spread.masked_fill(first_tokens(view, self.sinks), torch.inf), past)
        large = (view.budget.double() * self.large + 1e-9).floor()[:, None, None]
        share = (place / count.clamp_min(1)).float()
        score = torch.where(past & (place < large), _LARGE + 1 - share, score)
        back = order.argsort(dim=-1)
        return state._replace(score=score.gather(-1, back), ranked=view.length.clone())

    def step(self, state: Asked, row: Tensor, view: View) -> None:
        """Take the query of a generated token, which is not ranked yet."""
        add_generated(state.queries, view)

    def priority(self, state: Asked, view: View) -> Tensor:
        """Sinks and the newest tokens are always kept, then tokens that were not ranked yet, by age: [B, H, N]."""
        priority = unranked_first(state.score, view, state.ranked, _LARGE + 2)
        return keep_always(priority, view.newest(self._width(view)) | first_tokens(view, self.sinks))

    def _attention(self, queries: Tensor, keys: Tensor, scale: float, past: Tensor, view: View) -> Tensor:
        """Mean attention of the newest queries to the tokens before the window, pooled, [B, H, N]."""
        counts = among_newest(self.window, self._width(view), view)
        keys = keys.float().masked_fill(~past[..., None], 0)
        batch, heads, tokens = past.shape
        group = queries.shape[3]
        total = keys.new_zeros(batch, heads, group, tokens)
        tile = max(TILE_ELEMENTS // max(batch * heads * group * tokens, 1), 1)
        for start in range(0, self.window, tile):
            some = slice(start, start + tile)
            raw = torch.einsum("bhwgd,bhnd->bhwgn", queries[:, :, some], keys) * scale
            weights = raw.masked_fill(~past[:, :, None, None], -torch.inf).softmax(-1)
            asked = counts[:, None, some, None, None] & past[:, :, None, None]
            total += weights.masked_fill(~asked, 0).sum(2)
        mean = view.ranks.group_mean(total) / counts.sum(-1).clamp_min(1)[:, None, None]
        return F.avg_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)

    def _noise(self, view: View) -> Tensor:
        """Exponential draws of this ranking, of which minus the logarithm makes a sample by the largest sums."""
        heads = view.positions.shape[1]
        every = torch.arange(view.ranks.kv_heads(heads), device=view.positions.device)
        keys = mixed(mixed(self.seed, torch.full_like(every, view.layer_idx)), every)[view.ranks.held]
        return exponentials(mixed(keys, view.length[:, None])[..., None], view.positions.clamp_min(0).long())

    def _width(self, view: View) -> Tensor:
        """Tokens of the window, [B]."""
        return half_budget(view, self.window)


def _spread(values: Tensor) -> Tensor:
    """The largest number of each value less the smallest one, [B, H, N, D] -> [B, H, N] fp32."""
    values = values.float()
    return values.amax(-1) - values.amin(-1)


def _places(spread: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each token by `spread` [B, H, N], 0 for the largest, and how many there are, [B, H, 1].

    Ties go to the earlier token; those that are not `past` stand behind the others.
    """
    descending = spread.masked_fill(~past, -1).argsort(dim=-1, descending=True, stable=True)
    return descending.argsort(dim=-1), past.sum(-1, keepdim=True)

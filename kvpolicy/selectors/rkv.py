"""R-KV: keep tokens that are attended to and do not repeat others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.selectors.asked import Asked, add_generated, among_newest, none_ranked, with_prompt
from kvpolicy.selectors.common import half_budget, keep_always, unranked_first
from kvpolicy.statistics import NewestQueries, Results, Sizes, Statistic, Vectors, Working
from kvpolicy.statistics.statistic import SHORTEST_TILE
from kvpolicy.text.strategy import between, least, odd, strategy

_MOST = 2.0
"""No mixture of attention and redundancy is that large."""

TILE_ELEMENTS = 1 << 20
"""Cosines in one tile: 4 MiB of fp32."""


@dataclass(frozen=True)
class ComparingQueries(NewestQueries):
    """The newest queries, for a selector that also compares keys with keys."""

    def working(self, sizes: Sizes) -> Working:
        """Tiles of cosines, and what they are compared by."""
        candidates = sizes.candidates
        return Working(chosen=3 * 4 * max(min(TILE_ELEMENTS, candidates * sizes.keys), SHORTEST_TILE * candidates))


@strategy
class RKV(Selector):
    """Keep tokens that the newest queries attend to, and whose keys do not resemble those of other tokens.

    Long chains of thought repeat themselves. Attention alone keeps every repetition, so that the redundancy of a token,
    the softmax of the mean cosine of its key with all others, is subtracted from its attention.

    Args:
        window: How many of the newest queries are asked; as many of the newest tokens are always kept. At most half the
            budget.
        kernel: Width of the max pooling of attention along the tokens, odd.
        mix: The weight of attention, in [0, 1]; redundancy has the rest.
        similar: The cosine above which a key is similar to another one.
        every: After how many generated tokens all kept tokens are ranked again; at most half the budget. Until then new
            tokens are kept.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `window` is outside [1, 32767], `every` is below 1, `kernel` is not odd, or `mix` or `similar`
            is outside [0, 1].

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("rkv:mix=0.1@0.2"))
        'rkv:mix=0.1@0.2'

    Source:
        R-KV (arXiv:2505.24133), Section 3, and its authors' code, from which the defaults are; as in the code, the
        newest queries also rank the tokens of a prompt. Differences:

        - One token, the lowest of the last ranking, is evicted for each generated one, so that there are never more
          than the budget. The code lets the cache grow by 128 tokens and then evicts as many.
        - Each row of a batch is ranked by its own keys. In earlier versions of the code, redundancy is that of the
          first row.
        - A key that resembles no other leaves out none. The code then leaves out the first token.
        - A cap of scores (Gemma 2) and learned attention sinks (gpt-oss) are left out of the attention that ranks.
        - With a codec, coded keys are compared as attention reads them.
    """

    window: int = between(1, 32767, 8)  # as many queries are held of each head
    kernel: int = odd(7)
    mix: float = between(0, 1, 0.07)
    similar: float = between(0, 1, 0.5)
    every: int = least(1, 128)
    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The newest queries, and the keys of all tokens after a prompt and now and then."""
        return (Vectors(generated=True), ComparingQueries(self.window))

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
        queries = with_prompt(state.queries, seen[ComparingQueries], view)
        return self.rerank(state._replace(queries=queries), seen, view)

    def rerank(self, state: Asked, seen: Results, view: View) -> State:
        """Rank every token by the newest queries and by all keys."""
        tokens = seen[Vectors]
        # In the order of positions, for the pooling and for the latest of similar keys.
        order = view.positions.argsort(dim=-1, stable=True)
        keys = tokens.keys.gather(2, order[..., None].expand(-1, -1, -1, tokens.keys.shape[-1]))
        positions = view.positions.gather(-1, order)
        view = view._replace(positions=positions)
        cosines = mean_cosines(keys, view.valid, self.similar)
        redundancy = _softmax(cosines, view.valid)
        score = self.mix * self._attention(state.queries, keys, tokens.scale, view) - (1 - self.mix) * redundancy
        back = order.argsort(dim=-1)
        return state._replace(score=score.gather(-1, back), ranked=view.length.clone())

    def _attention(self, queries: Tensor, keys: Tensor, scale: float, view: View) -> Tensor:
        """Mean attention of the newest queries to the tokens before the window, pooled, [B, H, N]."""
        width = self._width(view)
        past = view.valid & ~view.newest(width)
        keys = keys.float().masked_fill(~past[..., None], 0)
        raw = torch.einsum("bhwgd,bhnd->bhwgn", queries, keys) * scale
        weights = _softmax(view.ranks.largest(raw.amax(3)), past[:, :, None].expand(-1, -1, self.window, -1))
        counts = among_newest(self.window, width, view)
        mean = (weights * counts[:, None, :, None]).sum(2) / counts.sum(-1).clamp_min(1)[:, None, None]
        pooled = F.max_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.masked_fill(~past, 0)

    def step(self, state: Asked, row: Tensor, view: View) -> None:
        """Take the query of a generated token, which is not ranked yet."""
        add_generated(state.queries, view)

    def priority(self, state: Asked, view: View) -> Tensor:
        """The newest tokens are always kept, then tokens that were not ranked yet, by age: [B, H, N]."""
        priority = unranked_first(state.score, view, state.ranked, _MOST)
        return keep_always(priority, view.newest(self._width(view)))

    def _width(self, view: View) -> Tensor:
        """Tokens of the window, [B]."""
        return half_budget(view, self.window)


def _softmax(x: Tensor, among: Tensor) -> Tensor:
    """The softmax over the last dimension `among` some entries, 0 elsewhere and where there is none."""
    return x.masked_fill(~among, -torch.inf).softmax(-1).masked_fill(~among, 0)


def mean_cosines(keys: Tensor, valid: Tensor, similar: float) -> Tensor:
    """The mean cosine of each key with the keys of its head, of which every key leaves out the latest similar one.

    The latest of several similar tokens thus counts as less redundant than the others.

    Args:
        keys: By ascending position, [B, H, N, D].
        valid: Which of them are tokens, [B, H, N] bool.
        similar: The cosine above which two keys are similar.

    Returns:
        [B, H, N] fp32; 0 for what is no token.
    """
    # Not a product with the mask: what is no token may hold inf or NaN.
    unit = F.normalize(keys.float().masked_fill(~valid[..., None], 0), dim=-1)
    batch, heads, tokens, _ = unit.shape
    rows = max(TILE_ELEMENTS // max(batch * heads * tokens, 1), 16)
    column = torch.arange(tokens, device=keys.device)
    number = torch.arange(1, tokens + 1, device=keys.device, dtype=torch.float32)
    total = unit.new_zeros(batch, heads, tokens)
    for start in range(0, tokens, rows):
        tile = unit[:, :, start : start + rows] @ unit.mT
        own = column[start : start + rows]
        tile[:, :, own - start, own] = 0
        latest = (number * (tile > similar)).amax(-1, keepdim=True)  # 0 where no key is similar
        total += tile.masked_fill_(number == latest, 0).sum(2)
    return total / valid.sum(-1, keepdim=True).clamp_min(1)

"""TriAttention: keep the tokens that a typical query attends to from where generation will go."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, ModelInfo, Selector, State, View, scoped
from kvpolicy.selectors.center_files import CENTER_FILES, Centers
from kvpolicy.selectors.common import unranked_first
from kvpolicy.statistics import Results, Rotation, Statistic, Vectors
from kvpolicy.text.strategy import least, strategy, tiny_or

_MOST = 2.0**20
"""Scores end here; positions that are added to twice as much are exact in fp32."""

_TILE = 2048
"""Keys that are scored at once."""


@scoped(offset="row", ranked="row")
class Placed(NamedTuple):
    """The score of each slot, and when it was found.

    Attributes:
        score: The expected product with later queries, [B, H, S] fp32.
        offset: Offset of the embedding's positions from those of the row, [B] int64.
        ranked: Tokens that the row had seen when its slots were ranked, [B] int64.
    """

    score: Tensor
    offset: Tensor
    ranked: Tensor


@strategy
class TriAttention(Selector):
    """Keep the tokens whose keys have the largest products with the mean query of a head, at the distances to come.

    Before the rotary embedding, the queries of a head lie close to their mean, whatever the text. How a key is attended
    to thus depends on its distance, by a trigonometric series that the mean query and the key determine. It is averaged
    over distances from 1 to `reach` tokens ahead, in powers of 2. What queries have beside their mean counts by its
    length alone.

    Args:
        file: File of mean queries from `kvpolicy calibrate triattention`, or the name of an embedded model, `tiny` or
            `tiny-4k`.
        reach: The largest distance ahead, in tokens.
        every: After how many generated tokens all kept tokens are ranked again; at most half the budget. Until then new
            tokens are kept.
        of_group: `max` or `mean` over the query heads of a KV head.
        normalize: Whether the scores of each query head are centered and scaled to a deviation of 1 before that.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `file` is empty, `reach` or `every` is below 1, or `of_group` is unknown.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("triattention:file=tiny:every=64@0.2"))
        'triattention:every=64@0.2'

    Source:
        TriAttention (arXiv:2604.04921), and its authors' code, in the mode in which each KV head of each layer chooses
        by itself; the modes with the same tokens in all layers are missing. Differences:

        - A prompt competes for the budget. The code keeps it whole unless asked otherwise.
        - One token, the lowest of the last ranking, is evicted for each generated one. The code lets the cache grow by
          128 tokens and then evicts as many.
        - The newest token is always kept, and no noise breaks ties.
        - The mean over distances is one rotation of the mean query, since rotations are linear. The code evaluates the
          cosines of each distance, or a factor of each frequency: the same numbers.
        - Channels that the embedding does not rotate, in some models all, count by their products with the mean query
          alone.
    """

    file: str = tiny_or("a file")
    reach: int = least(1, 65536)
    every: int = least(1, 128)
    of_group: Literal["max", "mean"] = "max"
    normalize: bool = False
    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The keys of all tokens after a prompt and now and then, and how the model rotates them."""
        return (Vectors(), Rotation())

    @property
    def rerank_every(self) -> int:
        """After `every` tokens."""
        return self.every

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the center file cannot be read, or is of another model."""
        CENTER_FILES.check(CENTER_FILES.load(self.file), self.file, model)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return Placed(
            score=torch.zeros(batch, heads, slots, dtype=torch.float32, device=device),
            offset=torch.zeros(batch, dtype=torch.int64, device=device),
            ranked=torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def observe(self, state: Placed, seen: Results, view: View) -> State:
        """Rank every candidate after a prompt."""
        offset = seen[Rotation].offset
        offset = state.offset if offset is None else offset.to(state.offset, copy=True)
        return self.rerank(state._replace(offset=offset), seen, view)

    def rerank(self, state: Placed, seen: Results, view: View) -> State:
        """Rank every token from where the row is now."""
        all_keys = seen[Vectors].keys
        rotation = seen[Rotation]
        batch, heads = all_keys.shape[:2]
        centers = self._centers(heads, view, all_keys.device)
        mean = centers.mean.expand(batch, -1, -1)[:, :, None]  # [B, Hq, 1, D]
        ahead = 2 ** torch.arange(self.reach.bit_length(), device=mean.device)
        placed = rotation.mean(mean, view.length + state.offset, ahead).squeeze(2).unflatten(1, (heads, -1))
        still = rotation.pair_lengths(rotation.mean(mean, torch.zeros_like(view.length), 1)).squeeze(2)
        spread = (centers.lengths - still).unflatten(1, (heads, -1))  # [B, H, G, F]
        parts: list[Tensor] = []
        for keys in all_keys.split(_TILE, 2):
            expected = placed @ keys.float().mT  # [B, H, G, n]
            parts.append(expected + spread @ rotation.pair_lengths(keys).mT)
        score = torch.cat(parts, -1)
        valid = view.valid[:, :, None]
        score = score.masked_fill(~valid, 0)
        if self.normalize:
            count = valid.sum(-1, keepdim=True).clamp_min(1)
            score = (score - score.sum(-1, keepdim=True) / count).masked_fill(~valid, 0)
            score = score / (score.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
        pooled = view.ranks.largest(score.amax(2)) if self.of_group == "max" else view.ranks.group_mean(score)
        return state._replace(score=pooled.clamp(-_MOST, _MOST), ranked=view.length.clone())

    def priority(self, state: Placed, view: View) -> Tensor:
        """The newest token is always kept, then tokens that were not ranked yet, by age: [B, H, N]."""
        priority = unranked_first(state.score, view, state.ranked, 2 * _MOST)
        return view.keep_newest(priority)

    def _centers(self, heads: int, view: View, device: torch.device) -> Centers:
        """The mean queries of this rank's query heads and their lengths, on a device."""
        found = CENTER_FILES.load(self.file).centers[view.layer_idx]
        if len(found.mean) == 1:  # all heads share it
            return Centers(*(t.to(device).expand(heads, -1) for t in found))
        return Centers(*(view.ranks.mine(t).to(device) for t in found))

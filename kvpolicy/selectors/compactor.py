"""Compactor: keep the tokens whose keys are unlike the others, and those that their neighborhood attends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.kernels.products import lengths
from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.selectors.blocks import BlockAttention
from kvpolicy.selectors.common import first_tokens, group_mean, keep_always
from kvpolicy.statistics import Results, Statistic, UnrotatedKeys, Vectors
from kvpolicy.text.strategy import AutoFloat, between, least, strategy

_TILE = 512
"""Keys that are taken at a time, so that only so many are in fp64."""


class Blend(NamedTuple):
    """The score of each slot, [B, H, S] fp32; 0 for a token that was not scored."""

    score: Tensor


@strategy
class Compactor(Selector):
    """Keep the tokens whose keys are unlike the others, and those that the tokens around them attend to.

    Two scores are added, each as a distance from its mean in standard deviations: the statistical leverage of the key
    without its rotation, and the attention inside blocks of the prompt, to later tokens too. The selection depends on
    no particular question. Tokens are scored once, with the prompt or chunk that brings them; generated tokens are not
    scored, and rank above what is.

    Args:
        sinks: How many of the first tokens are always kept, at most half the budget; they take no part in the scores.
        recent: How many of the newest tokens are always kept.
        block: Positions of a block in which tokens attend to each other.
        sketch: To how many numbers a key is projected at random before its leverage is computed.
        blend: The weight of the leverage beside the attention; `auto` for the share of the tokens that is evicted.
        regular: Added to the diagonal of the matrix that is inverted for the leverage.
        decode: `evict`: generated tokens replace the tokens of lowest score, and then the oldest generated ones.
            `grow`: they are kept in addition to the budget.

    Raises:
        KVPolicyError: If `sinks` is below 0, `recent`, `block` or `sketch` below 1, `blend` not between 0 and 100, or
            `regular` not between 1e-6 and 1e6.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("compactor:blend=0.5@0.2"))
        'compactor:blend=0.5@0.2'

    Source:
        Compactor (arXiv:2507.08143) and kvpress (CompactorPress, LeverageScorePress, NonCausalAttnPress). `blend` is as
        in kvpress. Differences:

        - Means and deviations are those of each row and KV head (kvpress: of the batch, all heads and all tokens at
          once).
        - Always-kept tokens stay apart from the scores. kvpress gives them the largest score, with which others may
          tie.
        - `recent` tokens are scored, because later tokens take their place. kvpress leaves them out of all scores.
        - Blocks are counted from position `sinks` of the row in every prompt, and a later prompt is scored by its own
          tokens alone. kvpress scores first prompts only.
        - Padding takes no part, and a last block of fewer tokens has no more than these. kvpress fills it with zeros,
          which take part in the softmax.
        - The random projection is the same for all heads of a layer, in every run and on every rank. kvpress draws it
          anew each time.
        - The leverage is computed in fp64 and the attention in fp32. Deviations that are only rounding count as 0, so
          that equal keys keep the earlier tokens.
        - A cap of scores (Gemma 2) and learned attention sinks (gpt-oss) are left out inside blocks.
    """

    sinks: int = least(0, 8)
    recent: int = least(1, 4)
    block: int = least(1, 256)
    sketch: int = least(1, 48)
    blend: AutoFloat = between(0, 100, "auto")
    regular: float = between(1e-6, 1e6, 0.01)
    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The attention inside blocks, and keys, without their rotation, and values."""
        return (Vectors(), UnrotatedKeys(), BlockAttention(self.block, self.sinks))

    @property
    def min_tokens(self) -> int:
        """The smallest budget of which the sinks, at most half of it, leave room for the recent tokens."""
        return min(self.sinks + self.recent, 2 * self.recent - 1)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return Blend(torch.zeros(batch, heads, slots, dtype=torch.float32, device=device))

    def observe(self, state: Blend, seen: Results, view: View) -> State:
        """Score the tokens of the prompt; others keep their score."""
        assert view.added is not None
        first = (view.length - view.added).clamp_min(self.sinks)
        scored = view.positions >= first[:, None, None]
        leverage = key_leverage(seen[UnrotatedKeys], scored, self.sketch, self.regular, view.layer_idx)
        attention = _attention(seen, scored, view)
        score = self._weight(view) * _standard(leverage, scored) + _standard(attention, scored)
        score = score.float().clamp(-_MOST, _MOST)
        # 0 says that a token was not scored.
        score = torch.where(score == 0, torch.finfo(torch.float32).tiny, score)
        return Blend(torch.where(scored, score, state.score))

    def priority(self, state: Blend, view: View) -> Tensor:
        """Sinks and recent tokens are always kept, then tokens that were not scored, by position, then by score."""
        protected = view.newest(self.recent) | first_tokens(view, self.sinks)
        unscored = view.positions.float() + _MOST
        return keep_always(torch.where(state.score == 0, unscored, state.score), protected)

    def _weight(self, view: View) -> Tensor | float:
        """The weight of the leverage, of each head where it is the evicted share: [B, H, 1]."""
        if self.blend != "auto":
            return self.blend
        candidates = view.valid.sum(-1, keepdim=True).clamp_min(1)
        return (1 - view.budget[:, None, None].float() / candidates).clamp_min(0)


_MOST = 2.0**20
"""No score is larger: above stand the tokens that were not scored, whose positions fp32 still tells apart."""

_FLAT = 1e-6
"""A deviation is 0 below this part of the mean, or of 1 if that is larger: then it is rounding."""


def _attention(seen: Results, scored: Tensor, view: View) -> Tensor:
    """The attention inside blocks times the length of the value, averaged with both neighbors: [B, H, N]."""
    length = lengths(seen[Vectors].values)
    # A neighbor that is not scored counts as 0, as in kvpress.
    return F.avg_pool1d((group_mean(seen[BlockAttention], view) * length).masked_fill(~scored, 0), 3, 1, 1)


def _standard(score: Tensor, scored: Tensor) -> Tensor:
    """Distances from the mean in standard deviations, of the scored tokens of each head; 0 if all are equal."""
    score = score.double().masked_fill(~scored, 0)
    count = scored.sum(-1, keepdim=True).clamp_min(1)
    mean = score.sum(-1, keepdim=True) / count
    away = (score - mean).masked_fill(~scored, 0)
    deviation = (away.square().sum(-1, keepdim=True) / count).sqrt()
    return torch.where(deviation <= _FLAT * mean.abs().clamp_min(1), 0, away / deviation)


def key_leverage(keys: Tensor, counts: Tensor, width: int, regular: float, layer_idx: int) -> Tensor:
    """The leverage of keys that were projected at random, after their mean was subtracted, [B, H, N] fp64.

    Args:
        keys: [B, H, N, D].
        counts: Which of them take part, [B, H, N] bool; numbers of others mean nothing.
        width: To how many numbers a key is projected.
        regular: See `leverage`.
        layer_idx: Index of the layer, which determines the projection.
    """
    matrix = projection(keys.shape[-1], width, layer_idx).to(keys.device)
    parts = [*zip(keys.split(_TILE, 2), counts[..., None].split(_TILE, 2), strict=True)]
    # Keys that do not count may hold inf, and 0 * inf is NaN.
    total = sum(part.double().masked_fill(~some, 0).sum(2, keepdim=True) for part, some in parts)
    mean = total / counts.sum(-1).clamp_min(1)[..., None, None]

    def projected(part: Tensor, some: Tensor) -> Tensor:
        return (part.double() - mean).masked_fill_(~some, 0) @ matrix

    # Projected twice, because all projected keys would take more memory than the keys.
    squares = sum(_squares(projected(*part)) for part in parts)
    factor = _factor(squares, regular)  # pyright: ignore[reportArgumentType]  # there is at least one part
    return torch.cat([_shares(projected(*part), factor) for part in parts], -1)


def projection(dim: int, width: int, layer_idx: int) -> Tensor:
    """Normal random numbers of variance 1 / width, [dim, width] fp64: the same for a layer in every process.

    Examples:
        >>> torch.equal(projection(4, 2, 7), projection(4, 2, 7))
        True
    """
    generator = torch.Generator("cpu").manual_seed(layer_idx)
    return torch.randn(dim, width, generator=generator, dtype=torch.float64, device="cpu") / width**0.5


def leverage(vectors: Tensor, regular: float) -> Tensor:
    """The diagonal of X (X' X + regular I)^-1 X' for vectors X [..., N, K], [..., N] fp64.

    Examples:
        >>> leverage(torch.tensor([[3.0], [-3.0], [0.0]]), 2.0)
        tensor([0.4500, 0.4500, 0.0000], dtype=torch.float64)
    """
    vectors = vectors.double()
    return _shares(vectors, _factor(_squares(vectors), regular))


def _squares(vectors: Tensor) -> Tensor:
    return vectors.mT @ vectors


def _factor(squares: Tensor, regular: float) -> Tensor:
    """The Cholesky factor of X' X + regular I."""
    unit = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    # Without a check, which would wait for the device: `regular` makes the matrix positive definite.
    return torch.linalg.cholesky_ex(squares + regular * unit).L


def _shares(vectors: Tensor, factor: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, vectors.mT, upper=False).square().sum(-2)

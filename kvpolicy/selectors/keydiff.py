"""KeyDiff: keep the tokens whose keys differ most from the others."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import SMALLEST_HEAD, DecodeMode, HeadShape, Selector, State, View, scoped
from kvpolicy.statistics import Results, Statistic, Vectors
from kvpolicy.text.strategy import least, strategy


@scoped(anchor="head")
class Differences(NamedTuple):
    """How much the key of each slot differs from the others, and what it is compared with.

    Attributes:
        score: Minus the cosine of the key and the anchor, [B, H, S] fp32.
        anchor: The sum of the keys of a head, each of length 1, [B, H, D] fp32.
    """

    score: Tensor
    anchor: Tensor


@strategy
class KeyDiff(Selector):
    """Keep the tokens whose keys differ most from the mean direction of all keys.

    Tokens with similar keys receive similar attention, so one of them can stand for the others. Nothing is needed but
    the keys: neither queries nor attention.

    Args:
        every: After how many generated tokens all kept tokens are compared again; at most half the budget. Until then
            a token keeps its score, and a new one is compared with all tokens since.
        decode: Whether generated tokens compete for the budget (`evict`) or are kept in addition to it (`grow`).

    Raises:
        KVPolicyError: If `every` is below 1.

    Examples:
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("keydiff:every=64@0.2"))
        'keydiff:every=64@0.2'

    Source:
        KeyDiff (arXiv:2504.15364), Section 3, and kvpress (KeyDiffPress). Differences:

        - The paper evicts from the cache and a block of 128 new tokens at a time. Here each generated token is scored
          when it is written, by an anchor to which it is added and from which evicted tokens are not yet taken, and one
          token is evicted. Every `every` tokens the anchor and all scores are computed again from the keys that are
          kept.
        - KeyDiffPress evicts nothing while decoding, as `decode=grow`.
        - The newest token is always kept.
        - Equal scores keep the earlier token (both leave them to `topk`), as do two keys alone, which are equally far
          from their mean direction, whatever they are.
        - A key of zeros has cosine 0.
        - A chunk or a later prompt is compared with the kept tokens, as in the paper.
        - With a codec, coded keys are compared as attention reads them.
    """

    every: int = least(1, 128)
    decode: DecodeMode = "evict"

    nested_from: ClassVar[int | None] = 1

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The keys, of all tokens after a prompt and now and then, and of each generated token."""
        return (Vectors(generated=True),)

    @property
    def rerank_every(self) -> int:
        """After `every` tokens."""
        return self.every

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        """Scores of zero, and an anchor of zeros."""
        score = torch.zeros(batch, heads, slots, dtype=torch.float32, device=device)
        return Differences(score, torch.zeros(batch, heads, head.head_dim, dtype=torch.float32, device=device))

    def observe(self, state: Differences, seen: Results, view: View) -> State:
        """Compare every candidate with the mean direction of all candidates."""
        keys = seen[Vectors].keys.float()
        if not bool(view.valid.all()):  # invalid tokens may hold inf, and 0 * inf is NaN
            keys = keys.masked_fill(~view.valid[..., None], 0)
        length = torch.linalg.vector_norm(keys, dim=-1)  # [B, H, N]
        inverse = length.clamp_min(_TINY).reciprocal()
        anchor = (inverse[:, :, None] @ keys).squeeze(2)
        cosine = (keys @ F.normalize(anchor, dim=-1)[..., None]).squeeze(-1) * inverse
        return Differences(-_settle_pairs(cosine, length > _TINY), anchor)

    def rerank(self, state: Differences, seen: Results, view: View) -> State:
        """Compare every kept token with the mean direction of the kept tokens."""
        return self.observe(state, seen, view)

    def step(self, state: Differences, row: Tensor, view: View) -> None:
        """Add a generated token to the anchor, and compare it with that."""
        assert view.token is not None
        unit = F.normalize(view.token.key.squeeze(2).float(), dim=-1, eps=_TINY)
        state.anchor.add_(unit)
        cosine = (unit * F.normalize(state.anchor, dim=-1)).sum(-1, keepdim=True)
        state.score.copy_(torch.where(view.newest(1), -cosine, state.score))

    def priority(self, state: Differences, view: View) -> Tensor:
        """The newest token is always kept, other tokens by the difference of their keys: [B, H, N]."""
        return view.keep_newest(state.score)


_TINY = 1e-12
"""Keys that are shorter count as zero."""


def _settle_pairs(cosine: Tensor, has_direction: Tensor) -> Tensor:
    """Make cosines [B, H, N] equal in the heads where only two keys have a direction.

    The sum of two vectors of length 1 has the same cosine with both, so that rounding would choose between them.
    """
    is_pair = has_direction & (has_direction.sum(-1, keepdim=True) == 2)
    return torch.where(is_pair, cosine.masked_fill(~is_pair, -torch.inf).amax(-1, keepdim=True), cosine)

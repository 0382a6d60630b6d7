"""What a layer knows of each row beside its slots, where a codec has stages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.slots import FAR
from kvpolicy.protocols import Codec, Traits
from kvpolicy.spec.errors import KVPolicyError


class Rows(NamedTuple):
    """Numbers of each row; no row depends on its neighbours.

    Attributes:
        full: Exact tokens (frozen slots not counted) at which a head's oldest block is coded, [B, 1] int64.
        room: Slots of each stage that the row may use, [B, stages] int64.
        pins: Positions that stay exact, [B, H or 1, pinned] int32, -1 where there is none.
        shift: What the rotary embedding adds to a row's positions, [B] int64; nothing unless keys are unrotated.
        query_absmax: Largest absolute query of each channel, [B, H, D] fp32; nothing unless the codec asks for it.
    """

    full: Tensor
    room: Tensor
    pins: Tensor
    shift: Tensor
    query_absmax: Tensor


def alloc_rows(codec: Codec, batch: int, heads: int, head_dim: int, device: torch.device | str) -> Rows | None:
    """Rows that know nothing yet; None where nothing is coded."""
    traits, stages = codec.traits, len(codec.stages)
    if not stages:
        return None
    apart = heads if traits.pins == "newest" else 1  # heads may have kept other tokens
    return Rows(
        torch.full((batch, 1), FAR, dtype=torch.int64, device=device),
        torch.zeros(batch, stages, dtype=torch.int64, device=device),
        torch.full((batch, apart, traits.pinned), -1, dtype=torch.int32, device=device),
        torch.zeros(batch if traits.key_space == "unrotated" else 0, dtype=torch.int64, device=device),
        torch.zeros(batch if traits.query_absmax else 0, heads, head_dim, device=device),
    )


def with_budget(rows: Rows, codec: Codec, tokens: list[int], frozen: int) -> Rows:
    """The same rows where each may hold so many tokens: each has the slots that it would have alone."""
    layouts = [codec.layout(own) for own in tokens]
    held = (rows.pins[:, 0] >= 0).any(-1).tolist() if frozen else [False] * len(layouts)
    full = [[at.exact - frozen * own if sum(at.coded) else FAR] for at, own in zip(layouts, held, strict=True)]
    room = [[*at.coded, *[0] * (rows.room.shape[1] - len(at.coded))] for at in layouts]
    return rows._replace(full=rows.full.new_tensor(full), room=rows.room.new_tensor(room))


def pin(rows: Rows, traits: Traits, positions: Tensor, massive: Tensor | None, first: Tensor) -> None:
    """Settle, in place, which tokens of the first prompt are never coded, but for the newest, which heads choose.

    Args:
        rows: Whose pins to set.
        traits: The codec's.
        positions: Of the prompt's tokens, [B, P] int32, -1 for padding.
        massive: Which of them hold the largest hidden numbers, [B, P] bool, where the codec asks for these.
        first: Rows that had no token before, [B] bool; the others keep what they have.
    """
    if traits.pins in ("none", "newest"):
        return
    if traits.pins == "massive":
        assert massive is not None, "the largest hidden numbers were not looked at"
        positions = positions.masked_fill(~massive, -1)
    else:
        positions = positions.masked_fill(positions >= traits.pinned, -1)
    pins = positions.sort(dim=-1, descending=True).values[:, : traits.pinned]
    held = rows.pins[:, 0, : pins.shape[1]]
    held.copy_(torch.where(first[:, None], pins, held))


def massive_tokens(hidden: Tensor, valid: Tensor | None, count: int) -> Tensor:
    """Which tokens hold the `count` largest absolute numbers of their row's hidden states [B, P, D], [B, P] bool."""
    size = hidden.detach().abs().float()
    if valid is not None:
        size = size.masked_fill(~valid[..., None], -1)
    best = size.flatten(1).topk(min(count, size[0].numel())).indices
    return torch.zeros(size.shape[:2], dtype=torch.bool, device=size.device).scatter_(1, best // size.shape[2], True)


def mean_cosine(before: Tensor, update: Tensor, valid: Tensor | None) -> Tensor:
    """Cosine of hidden states [B, P, D] and the same with an update, mean over each row's tokens, [B]; 0 for none."""
    before = before.detach().float()
    cosine = F.cosine_similarity(before, before + update.detach().float(), dim=-1)
    weight = torch.ones_like(cosine) if valid is None else valid.to(cosine)
    return (cosine * weight).sum(-1) / weight.sum(-1).clamp_min(1)


def rotary_shift(
    position_ids: Tensor | None, valid: Tensor | None, columns: int, seen: Tensor, new: int, known: Tensor | None
) -> Tensor:
    """What the rotary embedding adds to the rows' own positions, which count no padding, [B] int64.

    Args:
        position_ids: What the model was called with, [B or 1, P], or None.
        valid: Which of the P tokens are no padding, [B, P]; None where all are.
        columns: Tokens seen before, padding included.
        seen: Tokens that each row has seen before, [B] int64.
        new: P.
        known: What was added to those, [B].

    Raises:
        KVPolicyError: Where it is not the same for all tokens of a row, or the positions have several parts.
    """
    if position_ids is not None and position_ids.dim() != 2:
        raise KVPolicyError(
            "The model's positions have several parts (M-RoPE), and this codec undoes ordinary ones: "
            "use a codec that stores keys as attention sees them, such as tokenwise."
        )
    at = torch.arange(new, device=seen.device) + columns if position_ids is None else position_ids
    counted = torch.arange(new, device=seen.device) if valid is None else (valid.long().cumsum(-1) - 1).clamp_min(0)
    shifts = at - counted - seen[:, None]  # of each token, [B, P]
    first = torch.zeros_like(seen) if valid is None else valid.int().argmax(-1)
    shift = shifts.gather(1, first[:, None])[:, 0]
    if known is not None:
        shift = torch.where(seen > 0, known, shift)
    wrong = shifts != shift[:, None]
    if bool((wrong if valid is None else wrong & valid).any()):
        raise KVPolicyError(
            "A row's positions do not go on by one from token to token and from prompt to prompt, so that its keys "
            "cannot be unrotated: pass position_ids that count each row's own tokens."
        )
    return shift

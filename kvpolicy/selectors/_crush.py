"""The arithmetic of KVCrush: signatures, anchors, distances, buckets and representatives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Anchor = Literal["random", "mean", "alternate", "zeros", "ones"]
Pick = Literal["first", "random", "best"]
Buckets = Literal["rank", "distance"]


def signatures(statistic: Tensor, valid: Tensor, quantile: float) -> Tensor:
    """One bit per query head and token: is it among the head's `1 - quantile` highest? [B, Hq, N] bool.

    Args:
        statistic: Each query head's score of each token, [B, Hq, N], in ascending order of position.
        valid: Which tokens there are, [B, Hq, N] bool.
        quantile: Share of a head's tokens that get a 0.
    """
    order = statistic.masked_fill(~valid, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    ones = (valid.sum(-1, keepdim=True).double() * (1 - quantile) + 1e-9).floor()
    rank = torch.arange(statistic.shape[-1], device=statistic.device)
    return torch.zeros_like(valid).scatter_(-1, order, rank < ones)


def anchor_bits(kind: Anchor, bits: Tensor, valid: Tensor, seed: int) -> Tensor:
    """The signature that distances are measured from, [B, Hq] bool.

    `mean` is the majority bit of each head; where a head's quantile is a half or more, that is all zeros.
    """
    batch, heads, _ = bits.shape
    if kind == "mean":
        return (bits & valid).sum(-1) * 2 > valid.sum(-1)
    if kind == "random":
        drawn = torch.randint(0, 2, (heads,), generator=torch.Generator().manual_seed(seed))
        line = drawn.bool()
    elif kind == "alternate":
        line = torch.arange(heads) % 2 == 1
    else:
        line = torch.full((heads,), kind == "ones")
    return line.to(bits.device).expand(batch, -1)


def distances(bits: Tensor, anchor: Tensor, positions: Tensor) -> Tensor:
    """Hamming distance of each token's signature to the anchor, [B, H, N] int64.

    Heads that hold other tokens (after an earlier eviction) count a token that they dropped as a 0.

    Args:
        bits: [B, Hq, N].
        anchor: [B, Hq].
        positions: [B, H, N], -1 where there is no token.
    """
    heads = positions.shape[1]
    at = positions.long()
    size = int(at.max()) + 2  # the last place takes what is not valid
    at = at.where(at >= 0, size - 1)
    own = at.repeat_interleave(bits.shape[1] // heads, 1)
    # A dropped token is a 0 in every head; the sum of differences is |anchor| + sum over set bits of (1 - 2 anchor).
    change = torch.where(bits, 1 - 2 * anchor.long()[..., None], 0)
    table = anchor.long().sum(1, keepdim=True).repeat(1, size)
    table.scatter_add_(1, own.flatten(1), change.flatten(1))
    return table[:, None].expand(-1, heads, -1).gather(2, at)


def position_hash(positions: Tensor, seed: int) -> Tensor:
    """A number that looks random and depends on position and seed alone, so never on the batch; int64."""
    mask = 0xFFFFFFFF
    x = (positions.long() * 2654435761 + seed * 40503 + 12345) & mask
    x = x ^ (x >> 16)
    x = (x * 2246822519) & mask
    return x ^ (x >> 13)


def representatives(
    candidates: Tensor, distance: Tensor, rank_key: Tensor | None, want: Tensor, how: Buckets
) -> Tensor:
    """Which candidates stand in for their buckets, [B, H, N] bool.

    Args:
        candidates: [B, H, N] bool, in ascending order of position.
        distance: [B, H, N] int64.
        rank_key: What decides inside a bucket, the lowest first, [B, H, N]; None takes the first.
        want: How many, [B, H] int64; fewer where there are fewer candidates.
        how: `rank`: equal cuts of the order by distance; `distance`: one bucket a distance, quotas by size.
    """
    size = candidates.shape[-1]
    count = candidates.sum(-1)
    want = torch.minimum(want, count)
    by = distance.masked_fill(~candidates, torch.iinfo(torch.int64).max)
    order = by.argsort(dim=-1, stable=True)
    rank = torch.arange(size, device=order.device).expand_as(order)
    inside = rank < count[..., None]
    if how == "rank":
        bucket = ((rank + 1) * want[..., None] - 1).div(count.clamp_min(1)[..., None], rounding_mode="floor")
        quota = torch.ones_like(bucket)
    else:
        bucket = distance.gather(-1, order).masked_fill(~inside, 0)
        quota = _quotas(bucket, inside, want, count).gather(-1, bucket)
    bucket = bucket.masked_fill(~inside, torch.iinfo(torch.int64).max)
    if rank_key is not None:
        inner = rank_key.gather(-1, order).argsort(dim=-1, stable=True)
        inner = inner.gather(-1, bucket.gather(-1, inner).argsort(dim=-1, stable=True))
        order, bucket = order.gather(-1, inner), bucket.gather(-1, inner)
        quota = quota.gather(-1, inner)
    first = torch.searchsorted(bucket.contiguous(), bucket.contiguous())  # where a bucket begins
    chosen = inside & (rank - first < quota) & (want[..., None] > 0)
    return torch.zeros_like(candidates).scatter_(-1, order, chosen)


def _quotas(bucket: Tensor, inside: Tensor, want: Tensor, count: Tensor) -> Tensor:
    """Representatives per distance, in proportion to its tokens; largest remainder, the smaller distance first."""
    buckets = int(bucket.max()) + 1
    sizes = torch.zeros(*bucket.shape[:-1], buckets, dtype=torch.int64, device=bucket.device)
    sizes.scatter_add_(-1, bucket, inside.long())
    exact = sizes * want[..., None]
    quota = exact.div(count.clamp_min(1)[..., None], rounding_mode="floor")
    missing = want - quota.sum(-1)
    order = (exact % count.clamp_min(1)[..., None]).argsort(dim=-1, descending=True, stable=True)
    extra = torch.arange(buckets, device=bucket.device) < missing[..., None]
    return quota + torch.zeros_like(quota).scatter_(-1, order, extra.long())

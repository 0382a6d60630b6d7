"""The arithmetic of KVCrush: signatures, anchors, distances, buckets and representatives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.protocols import View
from kvpolicy.protocols.ranks import SINGLE_RANK, Ranks

Anchor = Literal["random", "mean", "alternate", "zeros", "ones"]
Pick = Literal["first", "random", "best"]
Buckets = Literal["rank", "distance"]


def top_mask(values: Tensor, count: Tensor) -> Tensor:
    """The `count` highest of each row, ties to the earlier, [..., N] bool; much faster than a stable sort.

    Args:
        values: [..., N].
        count: How many of each row, [...] int64, at most N.
    """
    least, most = (int(n) for n in count.aminmax())
    if not most:
        return torch.zeros_like(values, dtype=torch.bool)
    if least == most:
        edge = values.kthvalue(values.shape[-1] + 1 - most, dim=-1, keepdim=True).values
    else:
        edge = values.topk(most, dim=-1).values.gather(-1, (count - 1).clamp_min(0)[..., None])
    above, level = values > edge, values == edge
    spare = count[..., None] - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= spare))) & (count[..., None] > 0)


def signatures(statistic: Tensor, valid: Tensor, quantile: float) -> Tensor:
    """One bit per query head and token: is it among the head's `1 - quantile` highest? [B, Hq, N] bool.

    Args:
        statistic: Each query head's score of each token, [B, Hq, N], in ascending order of position.
        valid: Which tokens there are, [B, Hq, N] bool.
        quantile: Share of a head's tokens that get a 0.
    """
    ones = (valid.sum(-1).double() * (1 - quantile) + 1e-9).floor().long()
    return top_mask(statistic.masked_fill(~valid, -torch.inf), ones)


def anchor_bits(kind: Anchor, bits: Tensor, valid: Tensor, seed: int, ranks: Ranks = SINGLE_RANK) -> Tensor:
    """The signature that distances are measured from, its bits of this rank's heads, [B, Hq] bool.

    `mean` is the majority bit of each head; where a head's quantile is a half or more, that is all zeros.
    """
    batch, heads = bits.shape[0], ranks.query_heads(bits.shape[1])
    if kind == "mean":
        return (bits & valid).sum(-1) * 2 > valid.sum(-1)
    if kind == "random":
        drawn = torch.randint(0, 2, (heads,), generator=torch.Generator().manual_seed(seed))
        line = drawn.bool()
    elif kind == "alternate":
        line = torch.arange(heads) % 2 == 1
    else:
        line = torch.full((heads,), kind == "ones")
    return ranks.mine(line).to(bits.device).expand(batch, -1)


def distances(bits: Tensor, anchor: Tensor, view: View) -> Tensor:
    """Hamming distance of each token's signature to the anchor, int64 [B, H, N], or [B, 1, N] where heads agree.

    Heads that hold other tokens (after an earlier eviction) count a token that they dropped as a 0.

    Args:
        bits: [B, Hq, N].
        anchor: [B, Hq].
        view: The tokens; its ranks have the bits of the other heads.
    """
    if view.alike:  # then one order serves all heads
        return view.ranks.total((bits ^ anchor[..., None]).sum(1, keepdim=True, dtype=torch.int32)).long()
    heads = view.positions.shape[1]
    size = int(view.length.max()) + 1  # the last place takes what is not valid
    at = view.positions.long()
    at = at.where(at >= 0, size - 1)
    own = at.repeat_interleave(bits.shape[1] // heads, 1)
    # A dropped token is a 0 in every head; the sum of differences is |anchor| + sum over set bits of (1 - 2 anchor).
    change = torch.where(bits, 1 - 2 * anchor.int()[..., None], 0)
    table = anchor.sum(1, keepdim=True, dtype=torch.int32).repeat(1, size)
    table.scatter_add_(1, own.flatten(1), change.flatten(1))
    return view.ranks.total(table).long()[:, None].expand(-1, heads, -1).gather(2, at)


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
        distance: [B, H or 1, N] int64.
        rank_key: What decides inside a bucket, the lowest first, [B, H, N]; None takes the first.
        want: How many, [B, H] int64; fewer where there are fewer candidates.
        how: `rank`: equal cuts of the order by distance; `distance`: one bucket a distance, quotas by size.
    """
    count = candidates.sum(-1)
    want = torch.minimum(want, count)
    order = distance.argsort(dim=-1, stable=True).expand_as(candidates)
    inside = candidates.gather(-1, order) & (want > 0)[..., None]
    rank = inside.cumsum(-1) - 1
    if how == "rank":
        bucket, quota = _cut(rank, want, count), torch.ones_like(rank)
    else:
        bucket = distance.expand_as(order).gather(-1, order).masked_fill(~inside, 0)
        quota = _quotas(bucket, inside, want, count).gather(-1, bucket)
    if how == "rank" and rank_key is None:
        chosen = inside & (bucket > _cut(rank - 1, want, count))  # where a cut begins
    else:
        chosen = _first_of_each(bucket, quota, inside, None if rank_key is None else rank_key.gather(-1, order))
    return torch.zeros_like(candidates).scatter_(-1, order, chosen)


def _cut(rank: Tensor, want: Tensor, count: Tensor) -> Tensor:
    """Which of `want` equal cuts of `count` ranks a rank is in: cut i holds floor(i n / k) to floor((i + 1) n / k)."""
    return ((rank + 1) * want[..., None] - 1).div(count.clamp_min(1)[..., None], rounding_mode="floor")


def _first_of_each(bucket: Tensor, quota: Tensor, inside: Tensor, key: Tensor | None) -> Tensor:
    """The first `quota` of each bucket by `key`, ties as they stand; all [B, H, N]."""
    bucket = bucket.masked_fill(~inside, torch.iinfo(torch.int64).max)
    inner = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(bucket)
    if key is not None:
        inner = key.argsort(dim=-1, stable=True)
    inner = inner.gather(-1, bucket.gather(-1, inner).argsort(dim=-1, stable=True))
    bucket = bucket.gather(-1, inner).contiguous()
    begins = torch.searchsorted(bucket, bucket)
    place = torch.arange(bucket.shape[-1], device=bucket.device) - begins
    chosen = (place < quota.gather(-1, inner)) & inside.gather(-1, inner)
    return torch.zeros_like(inside).scatter_(-1, inner, chosen)


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

"""The arithmetic of KVCrush: signatures, anchors, distances, buckets and representatives."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvpolicy.protocols import SINGLE_RANK, Ranks, View

Anchor = Literal["random", "mean", "alternate", "zeros", "ones"]
Pick = Literal["first", "random", "best"]
Buckets = Literal["rank", "distance"]


def top_mask(values: Tensor, count: Tensor) -> Tensor:
    """The `count` highest values of each row, [..., N] bool; ties go to the lower index.

    This is much faster than a stable sort.

    Args:
        values: [..., N].
        count: The number of values of each row, [...] int64, at most N.
    """
    least, most = (int(n) for n in count.aminmax())
    if not most:
        return torch.zeros_like(values, dtype=torch.bool)
    # The lowest selected value of each row. One selection serves all rows if they have the same count.
    if least == most:
        threshold = values.kthvalue(values.shape[-1] + 1 - most, dim=-1, keepdim=True).values
    else:
        threshold = values.topk(most, dim=-1).values.gather(-1, (count - 1).clamp_min(0)[..., None])
    # All values above it are selected, and as many equal ones as the count still allows, from the left.
    above = values > threshold
    equal = values == threshold
    remaining = count[..., None] - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= remaining))) & (count[..., None] > 0)


def signatures(statistic: Tensor, valid: Tensor, quantile: float) -> Tensor:
    """One bit per query head and token: 1 if its score is among the `1 - quantile` highest of the head.

    Args:
        statistic: The score of each token for each query head, [B, Hq, N], in ascending order of position.
        valid: Which tokens exist, [B, Hq, N] bool.
        quantile: Fraction of the tokens of a head whose bit is 0.

    Returns:
        [B, Hq, N] bool.
    """
    # In floating point, (1 - 0.9) * 10 is slightly less than 1.
    ones = (valid.sum(-1).double() * (1 - quantile) + 1e-9).floor().long()
    return top_mask(statistic.masked_fill(~valid, -torch.inf), ones)


def anchor_bits(kind: Anchor, bits: Tensor, valid: Tensor, seed: int, ranks: Ranks = SINGLE_RANK) -> Tensor:
    """The signature that distances are measured from: its bits for the heads of this rank, [B, Hq] bool.

    `mean` is the majority bit of each head, which is 0 for all heads if the quantile is at least a half.
    """
    batch = bits.shape[0]
    if kind == "mean":
        return (bits & valid).sum(-1) * 2 > valid.sum(-1)
    # The other anchors are made for all query heads of the model, so that they do not depend on the number of ranks.
    heads = ranks.query_heads(bits.shape[1])
    if kind == "random":
        anchor = torch.randint(0, 2, (heads,), generator=torch.Generator().manual_seed(seed), device="cpu").bool()
    elif kind == "alternate":
        anchor = torch.arange(heads, device="cpu") % 2 == 1
    else:
        anchor = torch.full((heads,), kind == "ones", device="cpu")
    return ranks.mine(anchor).to(bits.device).expand(batch, -1)


def distances(bits: Tensor, anchor: Tensor, view: View) -> Tensor:
    """Hamming distance of the signature of each token to the anchor.

    If heads hold different tokens (after an earlier eviction), the bit of a head that does not hold a token is 0.

    Args:
        bits: [B, Hq, N].
        anchor: [B, Hq].
        view: The tokens; its ranks have the bits of the other heads.

    Returns:
        [B, H, N] int64; [B, 1, N] if all heads hold the same tokens.
    """
    if view.alike:
        return view.ranks.total((bits ^ anchor[..., None]).sum(1, keepdim=True, dtype=torch.int32)).long()
    heads = view.positions.shape[1]
    size = int(view.length.max()) + 1  # invalid tokens are counted in an additional position at the end
    at = view.positions.long()
    at = at.where(at >= 0, size - 1)
    at_query_head = at.repeat_interleave(bits.shape[1] // heads, 1)
    # The table holds the distance of each position. Without any token all bits are 0, and the distance is the number of
    # ones in the anchor; a bit of 1 changes it by +1 where the anchor is 0, and by -1 where it is 1.
    change = torch.where(bits, 1 - 2 * anchor.int()[..., None], 0)
    table = anchor.sum(1, keepdim=True, dtype=torch.int32).repeat(1, size)
    table.scatter_add_(1, at_query_head.flatten(1), change.flatten(1))
    return view.ranks.total(table).long()[:, None].expand(-1, heads, -1).gather(2, at)


def position_hash(positions: Tensor, seed: int) -> Tensor:
    """A pseudo-random number that depends on position and seed only, and so not on the batch; int64."""
    mask = 0xFFFFFFFF
    x = (positions.long() * 2654435761 + seed * 40503 + 12345) & mask
    x = x ^ (x >> 16)
    # The product may exceed int64 and wrap around, but its low 32 bits are right.
    x = (x * 2246822519) & mask
    return x ^ (x >> 13)


def representatives(
    candidates: Tensor, distance: Tensor, rank_key: Tensor | None, count: Tensor, how: Buckets
) -> Tensor:
    """Select candidates that represent their buckets, [B, H, N] bool.

    Args:
        candidates: [B, H, N] bool, in ascending order of position.
        distance: [B, H or 1, N] int64.
        rank_key: The order inside a bucket, lowest first, [B, H, N]; None for the order of positions.
        count: The number of representatives, [B, H] int64; fewer if there are fewer candidates.
        how: `rank` divides the order by distance into equal buckets of one representative each; `distance` makes a
            bucket of each distance, with representatives in proportion to its size.
    """
    total = candidates.sum(-1)
    count = torch.minimum(count, total)
    # Stable, so that equal distances stay in the order of positions.
    order = distance.argsort(dim=-1, stable=True).expand_as(candidates)
    inside = candidates.gather(-1, order) & (count > 0)[..., None]
    rank = inside.cumsum(-1) - 1
    if how == "rank":
        bucket = _bucket_of_rank(rank, count, total)
        quota = torch.ones_like(rank)
    else:
        bucket = distance.expand_as(order).gather(-1, order).masked_fill(~inside, 0)
        quota = _quotas(bucket, inside, count, total).gather(-1, bucket)
    if how == "rank" and rank_key is None:
        # The first of each bucket, without a sort: where the bucket differs from that of the rank before.
        chosen = inside & (bucket > _bucket_of_rank(rank - 1, count, total))
    else:
        chosen = _first_of_each(bucket, quota, inside, None if rank_key is None else rank_key.gather(-1, order))
    return torch.zeros_like(candidates).scatter_(-1, order, chosen)


def _bucket_of_rank(rank: Tensor, count: Tensor, total: Tensor) -> Tensor:
    """The bucket of each rank if `total` ranks n are divided into `count` buckets k.

    Bucket i holds the ranks from floor(i n / k) up to, but not including, floor((i + 1) n / k).
    """
    return ((rank + 1) * count[..., None] - 1).div(total.clamp_min(1)[..., None], rounding_mode="floor")


def _first_of_each(bucket: Tensor, quota: Tensor, inside: Tensor, key: Tensor | None) -> Tensor:
    """The first `quota` elements of each bucket by `key`; ties keep their order. All tensors are [B, H, N]."""
    bucket = bucket.masked_fill(~inside, torch.iinfo(torch.int64).max)
    order = torch.arange(bucket.shape[-1], device=bucket.device).expand_as(bucket)
    # Sorted by key, then stably by bucket: buckets are contiguous, and in the order of the key inside.
    if key is not None:
        order = key.argsort(dim=-1, stable=True)
    order = order.gather(-1, bucket.gather(-1, order).argsort(dim=-1, stable=True))
    bucket = bucket.gather(-1, order).contiguous()
    # Buckets are ascending, so each one is found at its first element.
    start = torch.searchsorted(bucket, bucket)
    position = torch.arange(bucket.shape[-1], device=bucket.device) - start
    chosen = (position < quota.gather(-1, order)) & inside.gather(-1, order)
    return torch.zeros_like(inside).scatter_(-1, order, chosen)


def _quotas(bucket: Tensor, inside: Tensor, count: Tensor, total: Tensor) -> Tensor:
    """Representatives per distance, in proportion to its tokens.

    Rounded by the largest remainder; ties go to the smaller distance.
    """
    buckets = int(bucket.max()) + 1
    sizes = torch.zeros(*bucket.shape[:-1], buckets, dtype=torch.int64, device=bucket.device)
    sizes.scatter_add_(-1, bucket, inside.long())
    exact = sizes * count[..., None]  # times `total`, so that the arithmetic is in integers
    quota = exact.div(total.clamp_min(1)[..., None], rounding_mode="floor")
    missing = count - quota.sum(-1)
    order = (exact % total.clamp_min(1)[..., None]).argsort(dim=-1, descending=True, stable=True)
    extra = torch.arange(buckets, device=bucket.device) < missing[..., None]
    return quota + torch.zeros_like(quota).scatter_(-1, order, extra.long())

"""The attention of a layer in a prompt, reduced for an allocator that measures layers by it.

The attention of the newest queries is computed for one KV head at a time, so that no more than those of its query heads
are held at once. What only the allocator needs of a prompt is dropped with it, before the prompt waits for its budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.kernels.mixed_values import read_values
from kvpolicy.protocols import AttentionNeeds, LayerAttention, Ranks
from kvpolicy.statistics.attention_sum import AttentionSum
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import Statistic, first_of
from kvpolicy.statistics.window_statistic import newest_of
from kvpolicy.statistics.windows import QueryWindow, ScoreTransform, window_attention

EPSILON = 1e-10
"""Added to attention weights inside a logarithm."""


def layer_attention(pending: PendingPrompt, needs: AttentionNeeds, ranks: Ranks, latent: int = 0) -> LayerAttention:
    """The attention of a prompt, reduced as an allocator needs it; of rows in their first prompt.

    Args:
        pending: The prompt, with keys and values.
        needs: The reductions.
        ranks: The ranks that hold the layer's other heads.
        latent: How many numbers of a key are its value, where none is held; else 0.
    """
    none = torch.zeros(pending.keys.shape[0], dtype=torch.int64, device=pending.keys.device)
    length = pending.lengths(none)
    found: dict[str, Any] = {}  # tensors, by the fields of `LayerAttention`
    queries = none
    if first_of(RecentQueries, needs.statistics) is not None:
        recent = first_of(RecentQueries, pending.statistics)
        assert recent is not None and recent.window is not None, "the allocator requested the newest queries"
        window = newest_of(recent.window, needs.queries)
        queries = (window.at >= 0).sum(-1)
        found |= _over_window(pending, window, needs)
    if "total" in needs.reductions:
        summed = first_of(AttentionSum, pending.statistics)
        assert summed is not None and summed.total is not None, "the allocator requested the sum of attention"
        found["total"] = summed.total[..., summed.total.shape[-1] - pending.columns :]  # behind slots of other rows
    if "value_size" in needs.reductions:
        found["value_size"] = _value_size(pending, read_values(pending.keys, pending.values, latent))
    positions = pending.positions(none).long()
    if pending.valid is not None:  # pooling must see the neighbors that a row has alone
        order = (~pending.valid).to(torch.uint8).argsort(dim=-1, stable=True)
        positions = positions.gather(1, order)
        found = {name: each if each.dim() == 2 else _in_order(each, order) for name, each in found.items()}
    return LayerAttention(positions, length, queries, ranks, pending.keys.shape[1], **found)


def without_measured(pending: PendingPrompt, wanted: tuple[Statistic[Any], ...]) -> PendingPrompt:
    """A prompt with what its selector and merger need of it, and nothing that only the allocator did."""
    kept: list[Statistic[Any]] = []
    recent = first_of(RecentQueries, wanted)
    for each in pending.statistics:
        if isinstance(each, RecentQueries):
            if recent is not None and each.window is not None:
                kept.append(replace(each, width=recent.width, window=newest_of(each.window, recent.width)))
        elif not isinstance(each, AttentionSum) or first_of(AttentionSum, wanted) is not None:
            kept.append(each)
    return pending._replace(statistics=tuple(kept))


def _over_window(pending: PendingPrompt, window: QueryWindow, needs: AttentionNeeds) -> Mapping[str, Tensor]:
    """The reductions over a window of queries, [B, Hq, N] each."""
    group = window.queries.shape[1] // pending.keys.shape[1]
    parts: dict[str, list[Tensor]] = {}
    for head in range(pending.keys.shape[1]):
        own = slice(head * group, (head + 1) * group)
        one = QueryWindow(window.queries[:, own], window.at)
        transform = _of_heads(pending.transform, own)
        weights = window_attention(one, pending.keys[:, head : head + 1], transform, None, pending.valid)
        for name, reduced in _reduced(weights, window.at >= 0, needs).items():
            parts.setdefault(name, []).append(reduced)
    return {name: torch.cat(part, 1) for name, part in parts.items()}


def _reduced(weights: Tensor, present: Tensor, needs: AttentionNeeds) -> dict[str, Tensor]:
    """Reductions of weights [B, G, W, N], whose queries are `present` [B, W]."""
    found: dict[str, Tensor] = {}
    count = present.sum(-1)[:, None, None]
    is_query = present[:, None, :, None]
    mean = weights.sum(2) / count.clamp_min(1)
    if "mean" in needs.reductions:
        found["mean"] = mean
    if "variance" in needs.reductions:
        spread = ((weights - mean[:, :, None]) * is_query).square_().sum(2)
        found["variance"] = spread / (count - 1).clamp_min(1)
    if "entropy" in needs.reductions:
        found["entropy"] = -(weights * (weights + EPSILON).log_()).sum(2)
    return found


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """The columns of x [B, Hq, N] in an order [B, N]."""
    return x.gather(-1, order[:, None].expand_as(x))


def _of_heads(transform: ScoreTransform, heads: slice) -> ScoreTransform:
    """The transform of some query heads."""
    return transform if transform.sinks is None else transform._replace(sinks=transform.sinks[heads])


def _value_size(pending: PendingPrompt, values: Tensor) -> Tensor:
    """The largest L1 norm of the value of a token, [B, H] fp32, of one KV head at a time."""
    sizes: list[Tensor] = []
    for head in range(values.shape[1]):
        size = values[:, head].abs().sum(-1, dtype=torch.float32)
        sizes.append((size if pending.valid is None else size * pending.valid).amax(-1))
    return torch.stack(sizes, 1)

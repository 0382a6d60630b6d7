"""Attention to some of the keys, with the normalizer of its weights, and how it is joined to attention to others.

Keys that all queries see need no mask then, and the normalizer of some keys alone is known besides the output of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.engine.columns import Columns
from kvpolicy.kernels.mixed_values import mixed_values
from kvpolicy.kernels.products import matmul
from kvpolicy.statistics.windows import ScoreTransform

_FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The operation of `scaled_dot_product_attention` on a CPU, which returns the normalizer besides the output."""


def has_parts(q: Tensor, k: Tensor, v: Tensor, transform: ScoreTransform) -> bool:
    """Whether attention of these tensors can be computed in parts.

    In half precision, parts would be rounded before they are joined.
    """
    fused = transform.softcap is None and transform.sinks is None and q.shape[-1] == mixed_values(k, v).shape[-1]
    return _FUSED is not None and fused and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (q, k, v))


def attend_part(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part | None:
    """Attend from all queries to all of some keys; None if there are none.

    Args:
        queries: [B, H, G, T, D].
        keys: [B, H, N, D].
        values: [B, H, N, D].
        scale: The factor on the products.
    """
    if not keys.shape[2]:
        return None
    grouped = queries.shape[2:4]
    output, normalizer = _FUSED(queries.flatten(2, 3), keys, mixed_values(keys, values), 0.0, False, scale=scale)
    return Part(output.unflatten(2, grouped), normalizer.unflatten(2, grouped))


def attend_causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Attend causally from queries to their own keys; arguments as in `attend_part`, with N = T."""
    # One query head of each group at a time, since the fused function would need copies of the keys.
    values = mixed_values(keys, values)
    parts = [_FUSED(queries[:, :, g], keys, values, 0.0, True, scale=scale) for g in range(queries.shape[2])]
    output, normalizer = (torch.stack(each, 2) for each in zip(*parts, strict=True))
    return Part(output, normalizer)


def attend_occupied(
    queries: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: Sequence[Columns],
    occupied: Tensor | None,
    transform: ScoreTransform,
    counts: Tensor | None = None,
) -> Part:
    """Attend from queries to all slots that hold a token. Every head must hold at least one.

    Args:
        queries: [B, H, M, D].
        exact: Keys and values of the full-precision slots, each [B, H, E, D].
        coded: The coded slots, which follow them; S slots in all.
        occupied: Which slots hold a token, [B, H, S] bool; None if all do.
        transform: From products to scores; without sinks.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one.

    Returns:
        The output [B, H, M, D], in fp32 or in the dtype of the values, and the normalizer [B, H, M].
    """
    keys = exact[0]
    values = mixed_values(*exact)
    if not coded and occupied is None and counts is None and has_parts(queries, keys, values, transform):
        return Part(*_FUSED(queries, keys, values, 0.0, False, scale=transform.scale))
    scores = [transform.scores(queries, keys), *(transform.finish(part.score(queries)) for part in coded)]
    score = torch.cat(scores, -1) if coded else scores[0]
    if counts is not None:
        score = score + counts[:, :, None]
    if occupied is not None:
        score = score.masked_fill(~occupied[:, :, None], -torch.inf)
    normalizer = score.logsumexp(-1)
    weights = torch.exp(score - normalizer[..., None])
    first, *others = weights.to(values.dtype).split([part.shape[-1] for part in scores], -1)
    mixed = matmul(first, values).float()
    return Part(sum((part.mix(own) for part, own in zip(coded, others, strict=True)), mixed), normalizer)

"""Probes of a policy on a few prompts: the cosine of each layer, its budget, and the positions that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument

BINS = 48
"""Equal parts of a prompt in which kept positions are counted."""


def prompts(samples: Mapping[str, list[dict[str, Any]]], count: int) -> list[str]:
    """The first distinct prompts of a task, as the model compressed them: without a question that is fed later."""
    rows = next(iter(samples.values()), [])
    texts = [_compressed(row) for row in sorted(rows, key=lambda row: row["doc_id"])]
    return list(dict.fromkeys(texts))[:count]


def _compressed(row: Mapping[str, Any]) -> str:
    """The prompt of an example before the text that its document holds back."""
    text = str(row["arguments"][0][0])
    held_back = str(row["doc"].get("held_back") or "").rstrip()
    return text[: text.rfind(held_back)] if held_back and held_back in text else text


def tokens(lm: Any, texts: Sequence[str]) -> list[Tensor]:
    """Token ids of the prompts, [1, P] each, truncated on the left to the model's length as lm-eval does."""
    rows = [lm.tok_encode(text)[-lm.max_length :] for text in texts]
    return [torch.tensor([row], device=lm.device) for row in rows if len(row) > 1]


def cosines(lm: Any, rows: Sequence[Tensor]) -> list[float] | None:
    """Mean cosine between each layer's residual stream before and after attention; None if it cannot be measured."""
    try:
        with torch.inference_mode(), kvpolicy.attach(lm.model, "squeeze+window@1.0"):
            by_row = [_prefill(lm, None, row).cosines().mean(0) for row in rows]
    except ValueError:
        return None
    return [round(float(value), 5) for value in torch.stack(by_row).mean(0)] if by_row else None


def layers(lm: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
    """Budget of each layer, and the share that it keeps of each part of the prompt, under the model's policy.

    Args:
        lm: lm-eval's model.
        rows: Token ids of prompts, [1, P].

    Returns:
        `layers`: indices of the layers in the model; `budget`: mean tokens of each; `kept`: percent of KV heads that
        keep a position, for each layer and part; `prompt`: mean length. Empty if every token is kept.
    """
    if lm.is_full or not rows:
        return {}
    with torch.inference_mode(), kvpolicy.attach(lm.model, lm.policy):
        caches = [_prefill(lm, lm.policy, row) for row in rows]
    kept = torch.stack([_kept(cache, row.shape[1]) for cache, row in zip(caches, rows, strict=True)]).mean(0)
    budget = torch.stack([_mean_budgets(cache) for cache in caches])
    return {
        "layers": [layer.layer_idx for layer in caches[0].policy_layers],
        "prompt": round(sum(row.shape[1] for row in rows) / len(rows), 1),
        "budget": [round(float(mean), 1) for mean in budget.mean(0)],
        "kept": [[round(100 * float(share)) for share in layer] for layer in kept],
    }


def _prefill(lm: Any, policy: Any, row: Tensor) -> Any:
    cache = kvpolicy.PolicyCache(lm.model, policy, new=1)
    lm.model(row, **cache_argument(lm.model, cache))
    return cache


def _mean_budgets(cache: Any) -> Tensor:
    """Budget of each layer, averaged over its rows, [L]."""
    return torch.stack([layer.budget.float().mean().cpu() for layer in cache.policy_layers])


def _kept(cache: Any, length: int) -> Tensor:
    """Share of KV heads that keep a position, averaged over each part of the prompt, [L, BINS]."""
    part = torch.arange(length) * BINS // length
    size = torch.zeros(BINS).index_add_(0, part, torch.ones(length)).clamp_min(1)
    by_layer: list[Tensor] = []
    for layer in cache.policy_layers:
        positions = layer.positions[0].cpu().long()  # [H, S]
        occupied = positions[positions >= 0]
        count = torch.zeros(BINS).index_add_(0, part[occupied], torch.ones(len(occupied)))
        by_layer.append(count / (size * positions.shape[0]))
    return torch.stack(by_layer)

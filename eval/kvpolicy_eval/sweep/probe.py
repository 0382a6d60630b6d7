"""What a policy does inside: on a few prompts, each layer's cosine, its budget, and which positions it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import kvpolicy

BINS = 48
"""Parts of a prompt in which kept positions are counted."""


def prompts(samples: Mapping[str, list[dict[str, Any]]], count: int) -> list[str]:
    """The first contexts of a task, as they were put to the model."""
    rows = next(iter(samples.values()), [])
    texts = [str(row["arguments"][0][0]) for row in sorted(rows, key=lambda row: row["doc_id"])]
    return list(dict.fromkeys(texts))[:count]


def tokens(lm: Any, texts: Sequence[str]) -> list[Tensor]:
    """The prompts' tokens, [1, P] each, of which lm-eval cuts the beginning where the model is shorter."""
    rows = [lm.tok_encode(text)[-lm.max_length :] for text in texts]
    return [torch.tensor([row], device=lm.device) for row in rows if len(row) > 1]


def cosines(lm: Any, rows: Sequence[Tensor]) -> list[float] | None:
    """The mean cosine of each layer's input and output of attention; None where it cannot be measured."""
    try:
        with torch.inference_mode(), kvpolicy.attach(lm.model, "squeeze+window@1.0"):
            found = [_prefilled(lm, None, row).cosines().mean(0) for row in rows]
    except ValueError:
        return None
    return [round(float(value), 5) for value in torch.stack(found).mean(0)] if found else None


def layers(lm: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
    """Each layer's budget and kept share of each part of the prompt, under the model's policy.

    Args:
        lm: lm-eval's model.
        rows: Tokens of prompts, [1, P].

    Returns:
        `layers` their numbers in the model, `budget` the mean tokens of each, `kept` in percent for each layer and
        part, `prompt` the mean length; nothing where every token is kept.
    """
    if lm.is_full or not rows:
        return {}
    with torch.inference_mode(), kvpolicy.attach(lm.model, lm.policy):
        caches = [_prefilled(lm, lm.policy, row) for row in rows]
    kept = torch.stack([_kept(cache, row.shape[1]) for cache, row in zip(caches, rows, strict=True)]).mean(0)
    budget = torch.stack([torch.stack([layer.budget.float().mean().cpu() for layer in c.slots]) for c in caches])
    return {
        "layers": [layer.layer_idx for layer in caches[0].slots],
        "prompt": round(sum(row.shape[1] for row in rows) / len(rows), 1),
        "budget": [round(float(tokens), 1) for tokens in budget.mean(0)],
        "kept": [[round(100 * float(share)) for share in layer] for layer in kept],
    }


def _prefilled(lm: Any, policy: Any, row: Tensor) -> Any:
    cache = kvpolicy.PolicyCache(lm.model, policy, new=1)
    lm.model(row, past_key_values=cache)
    return cache


def _kept(cache: Any, length: int) -> Tensor:
    """Share of heads that keep a position, mean over each part of the prompt, [L, BINS]."""
    part = torch.arange(length) * BINS // length
    size = torch.zeros(BINS).index_add_(0, part, torch.ones(length)).clamp_min(1)
    found: list[Tensor] = []
    for layer in cache.policy_layers:
        where = layer.positions[0].cpu().long()  # [H, S]
        held = where[where >= 0]
        count = torch.zeros(BINS).index_add_(0, part[held], torch.ones(len(held)))
        found.append(count / (size * where.shape[0]))
    return torch.stack(found)

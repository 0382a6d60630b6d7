"""How the newest tokens alone do on a window: one dense forward with a mask, and sums written out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def newest(model: Any, prompt: Tensor, question: Tensor, answer: Tensor, keep: int) -> tuple[float, float, float]:
    """Divergence in nats, agreement and right answer of a cache that holds the `keep` newest tokens.

    The prompt attends to itself. A question of several tokens attends to what is held of the prompt and to its own
    past; one token, of a question or an answer, is one of the `keep` that it attends to.

    Args:
        model: A causal language model, as it is, with a dense attention mask.
        prompt: [N].
        question: [Q], maybe empty.
        answer: [M].
        keep: Tokens held.
    """
    ids = [*prompt.tolist(), *question.tolist(), *answer.tolist()]
    start = len(prompt)
    asked = len(prompt) + len(question)
    end = len(ids)
    seen = [[False] * end for _ in range(end)]
    for i in range(end):
        for j in range(i + 1):
            if i < start:
                seen[i][j] = True
            elif i < asked and len(question) > 1:
                seen[i][j] = j >= start - keep
            else:
                seen[i][j] = j > i - keep
    full = _logits(model, ids, [[j <= i for j in range(end)] for i in range(end)])
    held = _logits(model, ids, seen)
    divergence = agreed = 0.0
    for i in range(start, end):
        p = _log_probabilities(full[i])
        q = _log_probabilities(held[i])
        divergence += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        agreed += p.index(max(p)) == q.index(max(q))
    right = all(held[i - 1].index(max(held[i - 1])) == ids[i] for i in range(asked, end))
    return divergence / (end - start), agreed / (end - start), float(right)


def _logits(model: Any, ids: list[int], seen: list[list[bool]]) -> list[list[float]]:
    mask = torch.tensor(seen)[None, None]
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0].tolist()


def _log_probabilities(logits: list[float]) -> list[float]:
    most = max(logits)
    total = most + math.log(sum(math.exp(x - most) for x in logits))
    return [x - total for x in logits]

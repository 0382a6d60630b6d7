"""Run a model through a short conversation: a prompt, decode steps, a continuation, decode steps."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from tests.conformance.models import VOCABULARY
from tests.conformance.replay import Recorder, Tape, recording

ROWS = {"one": [26], "padded": [26, 11]}
TURNS = [26, 1, 1, 1, 1, 6, 1, 1]


def make_batch(lengths: list[int], turns: list[int] = TURNS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a whole conversation, [B, sum of turns], padded on the left of the prompt."""
    ids = torch.randint(3, VOCABULARY, (len(lengths), sum(turns)), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : turns[0] - length] = 0
    return ids.where(mask.bool(), 0), mask


def forward(model: Any, ids: Tensor, mask: Tensor, start: int, stop: int, cache: Any) -> Tensor:
    """Logits of columns `start` to `stop`, as a loop of one's own gets them."""
    places = (mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]
    original = getattr(model, "_orig_mod", model)  # of a compiled model
    given = {"position_ids": places} if "position_ids" in inspect.signature(original.forward).parameters else {}
    full = bool(mask.all())
    with torch.no_grad():
        return model(
            ids[:, start:stop],
            attention_mask=None if full else mask[:, :stop],
            cache=cache,
            use_cache=True,
            **given,
        ).logits


def talk(
    model: Any, ids: Tensor, mask: Tensor, turns: list[int], cache: Any, recorder: Recorder | None = None
) -> Tensor:
    """Logits of the whole conversation, turn by turn over one cache, [B, N, V]."""
    start = 0
    logits = []
    for size in turns:
        logits.append(forward(model, ids, mask, start, start + size, cache))
        start += size
        if recorder is not None:
            recorder.close()
    return torch.cat(logits, 1)


def play(
    model: Any, policy: Policy | str, lengths: list[int], turns: list[int] = TURNS, seed: int = 0
) -> tuple[Tape, PolicyCache, Tensor]:
    """The tape, the cache and the logits of a conversation under a policy."""
    ids, mask = make_batch(lengths, turns, seed)
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    with kvpolicy.attach(model, policy), recording() as recorder:
        cache = PolicyCache(model, new=sum(turns[1:]))
        logits = talk(model, ids, mask, turns, cache, recorder)
    return recorder.tape, cache, logits

"""What a case puts a model and a policy through."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from tests.golden import access
from tests.golden.digests import Fields, cache_fields, digest
from tests.golden.families import VOCABULARY

LENGTHS = (40, 27, 11)
CHUNKS = (24, 16)
STEPS = 40
"""Tokens of each row of the padded batch; columns of its chunks, of which the last row is absent from the first."""

SECOND_TURN = (6, 0, 3)
LAST_STEPS = 5
"""Tokens of each row in the second turn, and decode steps behind it."""

_GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16}


def turns(model: Any, policy: Policy, *, told: bool = True) -> Fields:
    """A padded batch in two chunks, 40 decode steps, a second turn without one row, and more steps.

    Args:
        model: The model.
        policy: The policy.
        told: Whether the cache is told beforehand how long the prompts are.
    """
    found: Fields = {}
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=list(LENGTHS) if told else None)
        mask = torch.zeros(len(LENGTHS), 0, dtype=torch.int64)
        parts = [
            ("prompt", CHUNKS, LENGTHS),
            ("steps", (1,) * STEPS, (STEPS,) * len(LENGTHS)),
            ("turn", (max(SECOND_TURN),), SECOND_TURN),
            ("end", (1,) * LAST_STEPS, (LAST_STEPS,) * len(LENGTHS)),
        ]
        for moment, sizes, lengths in parts:
            mask, logits = _forwards(model, cache, mask, sizes, lengths, draw)
            found[f"{moment}.logits"] = digest(logits)
            found |= cache_fields(cache, moment) if moment != "turn" else {}
    return found


def rows(model: Any, policy: Policy) -> Fields:
    """A padded batch and more steps than the cache was told of, other rows, more steps, and another prompt."""
    found: Fields = {}
    draw = torch.Generator().manual_seed(7)
    chosen = torch.tensor([2, 0, 1, 0])
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=3)
        mask = torch.zeros(3, 0, dtype=torch.int64)
        mask, first = _forwards(model, cache, mask, (30,), (30, 21, 10), draw)
        mask, second = _forwards(model, cache, mask, (1,) * 9, (9,) * 3, draw)
        found |= {"steps.logits": digest([*first, *second]), **cache_fields(cache, "steps")}
        cache.batch_select_indices(chosen)
        mask, third = _forwards(model, cache, mask[chosen], (1,) * 7, (7,) * 4, draw)
        cache.batch_repeat_interleave(2)
        mask, fourth = _forwards(model, cache, mask.repeat_interleave(2, 0), (1,) * 4, (4,) * 8, draw)
        found |= {"chosen.logits": digest([*third, *fourth]), **cache_fields(cache, "chosen")}
        cache.reset()
        mask, last = _forwards(model, cache, mask[:2, :0], (22, *(1,) * 5), (27, 19), draw)
        found |= {"end.logits": digest(last), **cache_fields(cache, "end")}
    return found


def long(model: Any, policy: Policy) -> Fields:
    """A prompt of several tiles of queries, whose codes fill several chunks, and a few steps."""
    found: Fields = {}
    draw = torch.Generator().manual_seed(8)
    larger = dataclasses.replace(policy, budget=1.0 if policy.budget == 1.0 else 0.9)
    with torch.no_grad(), kvpolicy.attach(model, larger):
        cache = PolicyCache(model, new=LAST_STEPS)
        mask = torch.zeros(2, 0, dtype=torch.int64)
        _, logits = _forwards(model, cache, mask, (1300, *(1,) * LAST_STEPS), (1300 + LAST_STEPS, 700), draw)
        found |= {"end.logits": digest(logits), **cache_fields(cache, "end")}
    return found


def prompt(model: Any, policy: Policy) -> Fields:
    """One row without padding, where the model makes its cache itself; and what was planned for it."""
    plan = kvpolicy.plan(model.config, policy, batch=1, prompt=33, new=16, dtype=model.dtype)
    return {"planned": access.plan_numbers(plan)} | _generate(model, policy, (33,))


def beams(model: Any, policy: Policy) -> Fields:
    """Three beams of each row of a padded batch."""
    return _generate(model, policy, (30, 17), num_beams=3)


def _generate(model: Any, policy: Policy, lengths: tuple[int, ...], **how: Any) -> Fields:
    draw = torch.Generator().manual_seed(6)
    tokens, mask = _draw(lengths, max(lengths), draw)
    with kvpolicy.attach(model, policy) as handle:
        out = model.generate(tokens, attention_mask=mask, **_GREEDY, **how)
        return {"tokens": digest([out]), **cache_fields(handle.cache, "end")}


def _draw(lengths: tuple[int, ...], columns: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and their mask, [B, columns], padded on the left."""
    mask = (torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]).long()
    tokens = torch.randint(3, VOCABULARY, mask.shape, generator=draw)
    return tokens * mask, mask


def _forwards(
    model: Any, cache: Any, mask: Tensor, sizes: tuple[int, ...], lengths: tuple[int, ...], draw: torch.Generator
) -> tuple[Tensor, list[Tensor]]:
    """Feed tokens in forwards of `sizes` columns; the mask after them, and logits of all but padding."""
    tokens, new = _draw(lengths, sum(sizes), draw)
    logits: list[Tensor] = []
    start = 0
    for size in sizes:
        own = new[:, start : start + size]
        mask = torch.cat([mask, own], 1)
        given: dict[str, Any] = {}
        if "position_ids" in inspect.signature(model.forward).parameters:
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -size:]
        out = model(tokens[:, start : start + size], attention_mask=mask, cache=cache, use_cache=True, **given)
        logits.append(out.logits[own.bool()])
        start += size
    return mask, logits

"""The stock model with a mask that hides, by layer and KV head, what a policy does not hold: both must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy_eval.families.conversation import held_by
from kvpolicy_eval.families.oracle import Held, oracle


def logits_of(
    model: Any, ids: Tensor, mask: Tensor, turns: list[int], held: list[Held], first: Mapping[str, Any]
) -> list[Tensor]:
    """Logits of a conversation turn by turn, each of which sees of the columns before it what is held at that turn.

    A single token sees what is held when it has been written; several tokens see what was held before them.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    found: list[Tensor] = []
    start = 0
    with torch.no_grad(), oracle(model) as read:
        for turn, seen in zip(turns, held, strict=True):
            read(seen)
            stop = start + turn
            places = (mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]
            more = {} if start else first
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places, cache=cache, **more)
            found.append(out.logits)
            start = stop
    return found


def largest_difference(found: list[Tensor], expected: list[Tensor], mask: Tensor) -> float:
    """The largest difference of logits, in standard deviations, where a row has a token."""
    flags = mask.bool()
    one = torch.cat(found, 1)[flags]
    two = torch.cat(expected, 1)[flags]
    return float((one - two).abs().max() / two.std())


def differences(
    model: Any, policy: str, ids: Tensor, mask: Tensor, turns: list[int], **first: Any
) -> Mapping[str, float]:
    """How far a policy is from the masked stock model, and the stock model without the mask from that one.

    Args:
        model: A model without a policy.
        policy: The spec.
        ids: Tokens of the conversation, [B, N].
        mask: Which are not padding, [B, N].
        turns: Tokens of each forward.
        **first: Further arguments of the first forward, such as a picture.
    """
    held: list[Held] = []
    found: list[Tensor] = []
    starts = mask.argmax(-1)
    start = 0
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, prompt=mask[:, : turns[0]].sum(-1), new=sum(turns[1:]))
        for turn in turns:
            before = held_by(cache, starts) if start else {}
            stop = start + turn
            places = (mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]
            more = {} if start else first
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places, cache=cache, **more)
            found.append(out.logits)
            held.append(held_by(cache, starts) if turn == 1 else before)
            start = stop
    expected = logits_of(model, ids, mask, turns, held, first)
    blind = logits_of(model, ids, mask, turns, [{} for _ in turns], first)
    return {"policy": largest_difference(found, expected, mask), "unmasked": largest_difference(blind, expected, mask)}

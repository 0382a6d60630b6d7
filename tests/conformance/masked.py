"""The stock model with a mask that hides, by layer and KV head, what a policy does not hold: both must be equal."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvpolicy.hf.config_swap import configs_of
from kvpolicy.hf.discovery import home

Seen = dict[int, Tensor]
"""Which of the first n columns each KV head of a layer may read, [B, H, n] bool."""

_seen: Seen = {}


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
    """The model's own eager attention, with a mask that hides more."""
    eager = vars(sys.modules[home(module).__module__])["eager_attention_forward"]
    if not isinstance(getattr(module, "layer_idx", None), int):  # of a part that looks at pictures
        return eager(module, query, key, value, mask, **others)
    size, new = key.shape[2], query.shape[2]
    least = torch.finfo(query.dtype).min
    if mask is None:
        mask = torch.full((new, size), least).triu(size - new + 1)[None, None]
    seen = _seen.get(module.layer_idx)
    if seen is not None:
        every = torch.ones(*seen.shape[:2], size, dtype=torch.bool)
        every[..., : seen.shape[2]] = seen
        hidden = ~every.repeat_interleave(query.shape[1] // seen.shape[1], 1)[:, :, None]
        mask = mask.expand(-1, query.shape[1], -1, -1).masked_fill(hidden, least)
    return eager(module, query, key, value, mask, **others)


AttentionInterface.register("masked", _attend)
AttentionMaskInterface.register("masked", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@contextmanager
def masking(model: Any) -> Generator[None]:
    """Let a model without a policy use this attention."""
    found = [config for config in configs_of(model)]
    before = [config._attn_implementation_internal for config in found]
    for config in found:
        config._attn_implementation_internal = "masked"
    try:
        yield
    finally:
        for config, own in zip(found, before, strict=True):
            config._attn_implementation_internal = own
        _seen.clear()


def columns_held(cache: Any, starts: Tensor) -> Seen:
    """The columns that each head of a cache holds.

    Args:
        cache: A `PolicyCache`.
        starts: The column of each row's first token, [B].
    """
    found: Seen = {}
    for layer in cache.policy_layers:
        positions = layer.head_positions
        rows, heads, _ = positions.shape
        seen = torch.zeros(rows, heads, cache.get_seq_length(layer.layer_idx) + 1, dtype=torch.bool)
        at = torch.where(positions >= 0, positions + starts[:, None, None], seen.shape[2] - 1)
        found[layer.layer_idx] = seen.scatter(2, at.long(), True)[..., :-1]
    return found


def logits_of(
    model: Any, ids: Tensor, mask: Tensor, turns: list[int], held: list[Seen], first: Mapping[str, Any]
) -> list[Tensor]:
    """Logits of a conversation turn by turn, each of which sees of the columns before it what is held at that turn.

    A single token sees what is held when it has been written; several tokens see what was held before them.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    found: list[Tensor] = []
    start = 0
    with torch.no_grad(), masking(model):
        for turn, seen in zip(turns, held, strict=True):
            _seen.clear()
            _seen.update(seen)
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
    one, two = torch.cat(found, 1)[flags], torch.cat(expected, 1)[flags]
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
    import kvpolicy

    held: list[Seen] = []
    found: list[Tensor] = []
    starts = mask.argmax(-1)
    start = 0
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, prompt=mask[:, : turns[0]].sum(-1), new=sum(turns[1:]))
        for turn in turns:
            before = columns_held(cache, starts) if start else {}
            stop = start + turn
            places = (mask.cumsum(-1) - 1).clamp_min(0)[:, start:stop]
            more = {} if start else first
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=places, cache=cache, **more)
            found.append(out.logits)
            held.append(columns_held(cache, starts) if turn == 1 else before)
            start = stop
    expected = logits_of(model, ids, mask, turns, held, first)
    blind = logits_of(model, ids, mask, turns, [{} for _ in turns], first)
    return {"policy": largest_difference(found, expected, mask), "unmasked": largest_difference(blind, expected, mask)}

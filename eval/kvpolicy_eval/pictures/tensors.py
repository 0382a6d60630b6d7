"""Keys and values of the embedded model on held-out text, as they are and as a codec reconstructs them."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.rotary_lookup import rope_of
from kvpolicy_eval.common.conversation import run
from kvpolicy_lm_eval.data.text import held_out

PROMPT = 448
"""Tokens of the prompt."""
LAYER = 5
HEAD = 2
"""KV head that is drawn: some channels of its keys are much larger than the others, as in large models."""


class Originals(NamedTuple):
    """Tensors of one layer without a policy, [H, n, D] fp32.

    Attributes:
        keys: Rotated keys, which attention uses.
        unrotated: Keys without the rotary embedding.
        values: Values.
    """

    keys: Tensor
    unrotated: Tensor
    values: Tensor


@cache
def embedded() -> tuple[Any, Tensor]:
    """The model, and the token ids of the text, [1, N]."""
    model, tokenizer = kvpolicy.tiny()
    return model, tokenizer(held_out()[:1600], return_tensors="pt").input_ids


@cache
def originals(layer_idx: int = LAYER) -> Originals:
    """Tensors of a layer after the prompt, from the full cache."""
    model, ids = embedded()
    full = DynamicCache(config=model.config)
    sites = find_sites(model)
    with torch.inference_mode():
        model(ids[:, :PROMPT], **cache_argument(model, full))
    layers: Any = full.layers
    keys = layers[layer_idx].keys
    values = layers[layer_idx].values
    site = next(site for site in sites.layers if site.layer_idx == layer_idx)
    unrotated = rope_of(sites.decoder, site).unrotate(keys, torch.arange(PROMPT).expand(*keys.shape[:2], -1))
    return Originals(keys[0], unrotated[0], values[0])


@cache
def after(policy: str, steps: int = 0, new: int = 1) -> LayerStore:
    """A layer of a cache under a policy, after the prompt and decode steps.

    Args:
        policy: Spec of the policy.
        steps: Decode steps.
        new: New tokens that the cache has capacity for.
    """
    model, ids = embedded()
    pieces = ids[:, : PROMPT + steps].split([PROMPT] + [1] * steps, 1)
    layers: Any = run(model, policy, pieces, prompt=PROMPT, new=new).cache.layers
    return layers[LAYER].store


def by_position(layer: LayerStore, per_slot: Tensor, head: int = HEAD, missing: float = torch.nan) -> Tensor:
    """Scatter a tensor of slots to the positions of their tokens.

    Args:
        layer: The layer.
        per_slot: One element per slot, [1, H, S, ...].
        head: KV head.
        missing: Value at positions without a slot.

    Returns:
        [positions, ...]
    """
    positions = layer.tensors.positions[0, head].long()
    occupied = positions >= 0
    out = per_slot.new_full((int(layer.tensors.length[0]), *per_slot.shape[3:]), missing)
    out[positions[occupied]] = per_slot[0, head][occupied]
    return out


def stage_of(layer: LayerStore, head: int = HEAD) -> Tensor:
    """Stage of each token, [positions]: 0 in full precision, 1 and more for encoded stages, -1 if evicted."""
    slots = torch.zeros(layer.tensors.positions.shape, dtype=torch.int64)
    for number, start in enumerate(layer.layout.starts(), 1):
        slots[..., start:] = number
    return by_position(layer, slots, head, -1)


def read(layer: LayerStore, head: int = HEAD) -> tuple[Tensor, Tensor]:
    """Decoded keys and values of one head, [positions, D] fp32 each; NaN if a token is not encoded.

    Keys are unrotated if the codec encodes unrotated keys.
    """
    assert layer.slots is not None
    not_encoded = torch.full_like(layer.tensors.keys, torch.nan, dtype=torch.float32)
    keys = [not_encoded]
    values = [not_encoded]
    for number, (stage, slots) in enumerate(zip(layer.spec.codec.stages, layer.layout.coded, strict=True)):
        store = layer.slots.codes.stage_store(number)
        keys.append(stage.keys(store, slice(0, slots)))
        values.append(stage.values(store, slice(0, slots)))
    return by_position(layer, torch.cat(keys, 2), head), by_position(layer, torch.cat(values, 2), head)


def relative_error(decoded: Tensor, original: Tensor) -> float:
    """Squared error over squared norm, of the vectors that are not NaN."""
    encoded = ~decoded.isnan().any(-1)
    return float((decoded - original)[encoded].square().sum() / original[encoded].square().sum())


def relative_error_of_each(decoded: Tensor, original: Tensor) -> Tensor:
    """The same for every vector, [positions]; NaN for vectors that are NaN."""
    return (decoded - original).square().sum(-1) / original.square().sum(-1)

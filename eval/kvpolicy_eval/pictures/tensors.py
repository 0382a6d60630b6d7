"""Keys and values of the embedded model on held-out text: as they are, and as a codec gives them back."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy.engine.codec_view import store_of
from kvpolicy.engine.rotary import Rope
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy_eval.data.text import held_out

PROMPT = 448
"""Tokens of the text that are read as a prompt."""
LAYER, HEAD = 5, 2
"""Whose keys are drawn: some of its channels are much larger than the others, as in large models."""


class Originals(NamedTuple):
    """One layer's tensors without a policy, [H, n, D] fp32.

    Attributes:
        keys: As attention sees them.
        unrotated: Keys without their rotary embedding.
        values: Values.
    """

    keys: Tensor
    unrotated: Tensor
    values: Tensor


@cache
def _embedded() -> tuple[Any, Tensor]:
    """The model, and the token numbers of the text, [1, N]."""
    model, tokenizer = kvpolicy.tiny()
    return model, tokenizer(held_out()[:1600], return_tensors="pt").input_ids


@cache
def originals(layer_idx: int = LAYER) -> Originals:
    """Tensors of a layer after the prompt, every token as it is."""
    model, ids = _embedded()
    full, sites = DynamicCache(config=model.config), find_sites(model)
    with torch.inference_mode():
        model(ids[:, :PROMPT], past_key_values=full)
    layers: Any = full.layers
    keys, values = layers[layer_idx].keys, layers[layer_idx].values
    site = next(site for site in sites.layers if site.layer_idx == layer_idx)
    unrotated = Rope.of(sites.decoder, site).undo(keys, torch.arange(PROMPT).expand(*keys.shape[:2], -1))
    return Originals(keys[0], unrotated[0], values[0])


@cache
def after(policy: str, steps: int = 0, new: int = 1) -> PolicyLayer:
    """A layer of a cache under `policy`, after the prompt and `steps` of `new` more tokens that it is made for."""
    model, ids = _embedded()
    with kvpolicy.attach(model, policy), torch.inference_mode():
        held = kvpolicy.PolicyCache(model, policy, prompt=PROMPT, new=new)
        model(ids[:, :PROMPT], past_key_values=held)
        for place in range(PROMPT, PROMPT + steps):
            model(ids[:, place : place + 1], past_key_values=held)
        layers: Any = held.layers
        return layers[LAYER]


def by_position(layer: PolicyLayer, per_slot: Tensor, head: int = HEAD, missing: float = torch.nan) -> Tensor:
    """What each slot [1, H, S, ...] has of one head, put where its token stands in the text: [positions, ...]."""
    places, length = layer.positions[0, head].long(), int(layer.length[0])
    held = places >= 0
    out = per_slot.new_full((length, *per_slot.shape[3:]), missing)
    out[places[held]] = per_slot[0, head][held]
    return out


def stage_of(layer: PolicyLayer, head: int = HEAD) -> Tensor:
    """Where the token of each position is: 0 in the exact part, 1 or more in a stage, -1 nowhere; [positions]."""
    slots = torch.zeros(layer.positions.shape, dtype=torch.int64)
    for number, start in enumerate(layer.layout.starts(), 1):
        slots[..., start:] = number
    return by_position(layer, slots, head, -1)


def read(layer: PolicyLayer, head: int = HEAD) -> tuple[Tensor, Tensor]:
    """Keys, in the codec's frame, and values of one head as they are read back; nan where a token is not coded.

    Returns:
        Twice [positions, D] fp32.
    """
    exact = layer.keys
    assert exact is not None
    nowhere = torch.full_like(exact, torch.nan, dtype=torch.float32)
    keys, values = [nowhere], [nowhere]
    for number, (stage, slots) in enumerate(zip(layer.policy.codec.stages, layer.layout.coded, strict=True)):
        store = store_of(layer, number)
        keys.append(stage.keys(store, slice(0, slots)))
        values.append(stage.values(store, slice(0, slots)))
    return by_position(layer, torch.cat(keys, 2), head), by_position(layer, torch.cat(values, 2), head)


def lost(got: Tensor, want: Tensor) -> float:
    """Squared error over squared norm of the vectors that are there (not nan)."""
    there = ~got.isnan().any(-1)
    return float((got - want)[there].square().sum() / want[there].square().sum())


def lost_each(got: Tensor, want: Tensor) -> Tensor:
    """The same of every vector, [positions], nan where it is not there."""
    return (got - want).square().sum(-1) / want.square().sum(-1)

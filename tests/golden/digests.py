"""Hashes of tensors, and of what a cache holds at one moment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tests.golden import access

Fields = dict[str, Any]
"""By name, a hash or numbers: what JSON gives back as it was."""

REFUSED = "refused"
FAILED = "failed"
"""The only field of a case that was refused, or that ended with another error."""

_LAST = torch.iinfo(torch.int32).max


def digest(tensors: Iterable[Tensor]) -> str:
    """The first 12 digits of the SHA-256 of tensors, with their dtypes and shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {[*tensor.shape]};".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def cache_fields(cache: Any, moment: str) -> Fields:
    """What a cache holds: bytes, the plan, and the tensors of each layer."""
    found: Fields = {f"{moment}.nbytes": int(cache.nbytes), f"{moment}.full_nbytes": int(cache.full_nbytes)}
    if cache.plan is not None:
        found[f"{moment}.plan"] = access.plan_numbers(cache.plan)
    for number, layer in enumerate(access.policy_layers(cache)):
        parts = layer_digests(layer)
        found |= {f"{moment}.{quantity}.{number}": value for quantity, value in parts.items()}
    return found


def layer_digests(layer: Any) -> dict[str, str]:
    """By quantity, the hash of what one layer holds; `kept`, `keys` and `values` whatever the order of its slots."""
    slots = access.slot_positions(layer)
    keys, values = access.exact_tensors(layer)
    exact = slots[..., : keys.shape[2]]
    order = exact.masked_fill(exact < 0, _LAST).argsort(dim=-1, stable=True)
    occupied = exact.gather(-1, order) >= 0
    by_position = [tensor.gather(2, order[..., None].expand_as(tensor))[occupied] for tensor in (keys, values)]
    sorted_slots = slots.sort(dim=-1).values
    return {
        "kept": digest([sorted_slots[sorted_slots >= 0], (slots >= 0).sum(-1)]),
        "slots": digest([slots]),
        "keys": digest([occupied.sum(-1), by_position[0]]),
        "values": digest([occupied.sum(-1), by_position[1]]),
        **{quantity: digest(tensors) for quantity, tensors in access.other_tensors(layer).items()},
    }

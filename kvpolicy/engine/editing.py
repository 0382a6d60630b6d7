"""Edits of a text that is in the cache: tokens that are removed, and those behind them at other positions.

A rotary embedding depends on distances alone, so a key that was computed at one position can be rotated to another one
exactly. What the token's hidden state took from the text before the edit stays as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.kernels.rotary import Rope
from kvpolicy.statistics import Moments
from kvpolicy.statistics.statistic import first_of
from kvpolicy.text.errors import KVPolicyError


def check_movable(store: LayerStore) -> None:
    """Refuse a layer that holds more than keys by position, such as codes of rotated keys.

    Raises:
        KVPolicyError: Naming the part of the policy.
    """
    codec = store.spec.codec
    selector = store.spec.selector
    if codec.stages and codec.traits.key_space != "unrotated":
        raise KVPolicyError(
            f"The codec must store unrotated keys for tokens to be moved, got {codec}, whose codes are of keys "
            "at their positions; try csr, kvquant or no codec."
        )
    spec = store.spec
    if spec.step_vectors or spec.undoes_rotation or first_of(Moments, spec.statistics) is not None:
        raise KVPolicyError(
            f"The selector must rank tokens by attention or position for them to be moved, got {selector}, which "
            "keeps statistics of their keys; try snapkv or h2o."
        )
    if store.spec.merger_traits.when != "never":
        raise KVPolicyError(
            f"Tokens must not be merged to be moved, got the merger {store.spec.merger}, whose slots stand for several "
            "positions; remove it."
        )


def move_tokens(store: LayerStore, start: int, by: int, rope: Rope) -> None:
    """Give every token from position `start` on the position that is `by` larger.

    Args:
        store: The slots of a layer, which `check_movable` accepted.
        start: The first position that moves; every row has seen as many tokens.
        by: How far. If it is negative, the tokens at the positions in between are removed first.
        rope: The rotary embedding of the layer.
    """
    tensors = store.tensors
    positions = tensors.positions
    if by < 0:
        positions.masked_fill_((positions >= start + by) & (positions < start), -1)
    # In full precision only: codes are of unrotated keys, which say nothing of positions.
    at = _key_positions(store)
    here = at.clamp_min(max(0, -by))  # an arbitrary position for empty slots
    keys = tensors.keys.to(tensors.device)
    rotated = rope.rotate(rope.unrotate(keys, here), here + by).to(keys.dtype)
    tensors.keys.copy_(torch.where((at >= start)[..., None], rotated, keys))
    positions.add_(by * (positions >= start))
    if tensors.limits is not None:
        pins = tensors.limits.pins
        pins.add_(by * (pins >= start))
    note_move(store, by)


def _key_positions(store: LayerStore) -> Tensor:
    """The position that each key of the full-precision buffer is rotated to, [B, H, E], -1 for an empty slot."""
    layer = store.contents
    tensors = store.tensors
    positions = tensors.positions[..., : tensors.keys.shape[-2]]
    if not layer.reserved or tensors.limits is None:
        return positions
    # Codes refer to the key of a dictionary slot even after its own token was evicted.
    pins = tensors.limits.pins
    first = torch.where(pins >= 0, pins, positions[..., : layer.reserved])
    return torch.cat([first, positions[..., layer.reserved :]], -1)


def note_move(store: LayerStore, by: int) -> None:
    """Note that the newest tokens were given positions larger by `by`, and that others may be gone."""
    store.tensors.length.add_(by)
    store.contents.add_columns(by)
    store.contents.schedule.move(by)
    if store.slots is not None:
        store.slots.index.rebuild()
    store.recount()

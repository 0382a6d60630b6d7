"""Edits of a text that is in the cache: tokens that are removed, and those behind them at other positions.

A rotary embedding depends on distances alone, so a key that was computed at one position can be rotated to another one
exactly. What the token's hidden state took from the text before the edit stays as it was.

The newest tokens are taken back from a layer from which nothing was evicted: slot n of each head then holds its row's
token n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.sizes import Sizes
from kvpolicy.engine.state import map_slots, slot_tensors
from kvpolicy.kernels.rotary import Rope
from kvpolicy.protocols import Layout
from kvpolicy.statistics import Moments
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import ScoreTransform
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


def keeps_all(store: LayerStore) -> bool:
    """Whether every head holds every token of its row, in order."""
    tensors = store.tensors
    slot = torch.arange(tensors.positions.shape[-1], device=tensors.positions.device)
    length = tensors.length[:, None, None]
    return bool((tensors.positions == torch.where(slot < length, slot, -1)).all() & (length <= len(slot)).all())


def crop(store: LayerStore, columns: int, length: Tensor) -> None:
    """Leave a layer as it was after so many columns, which end no later than a prompt begins.

    Args:
        store: The layer, which keeps all of its tokens.
        columns: Columns to keep.
        length: Tokens of each row that these hold, [B] int64.
    """
    layer = store.contents
    tensors = store.tensors
    sizes = layer.sizes.back_to(columns)
    if sizes is not None:
        _truncate(store.contents, sizes)
    layer.set_columns(columns)
    tensors.length.copy_(length)
    slot = torch.arange(layer.layout.exact, device=tensors.positions.device)
    beyond = (slot >= tensors.length[:, None])[:, None]
    tensors.positions.masked_fill_(beyond, -1)
    for tensor in slot_tensors(tensors.state):
        tensor.masked_fill_(beyond, 0)
    for vectors in (tensors.keys, tensors.values):
        vectors.masked_fill_(beyond[..., None], 0)
    store.recount()
    store.geometry.fix_addresses()


def _truncate(layer: LayerContents, sizes: Sizes) -> None:
    """Truncate a layer to an earlier size."""
    tensors = layer.tensors
    layer.layout = Layout(sizes.exact)
    layer.capacity = sizes.capacity
    layer.expected_len = list(sizes.expected_len)
    tensors.keys = tensors.keys[:, :, : sizes.exact].clone()
    tensors.values = tensors.values[:, :, : sizes.exact].clone()
    tensors.positions = tensors.positions[..., : sizes.exact].clone()
    tensors.state = map_slots(lambda t: t[..., : sizes.exact].clone(), tensors.state)
    layer.set_budget(tensors.budget.new_tensor(sizes.budget))


def newest_tokens(store: LayerStore, length: Tensor, count: int, valid: Tensor | None) -> PendingPrompt:
    """The tokens behind the first `length` [B] of each row, as a prompt of `count` columns that was attended to.

    Args:
        store: The layer, which keeps all of its tokens.
        length: Tokens of each row before it.
        count: Its columns.
        valid: Which of these are not padding, [B, count] bool; None if all are.
    """
    tensors = store.tensors
    place = torch.arange(1, count + 1, device=length.device) if valid is None else valid.long().cumsum(-1)
    slots = (length[:, None] + place - 1).clamp_min(0)  # of padding, that of any token
    rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
    keys, values = (t.transpose(1, 2)[rows, slots].transpose(1, 2).contiguous() for t in (tensors.keys, tensors.values))
    return PendingPrompt(keys, values, valid, ScoreTransform(store.contents.scale))

"""Edits of a cache: which rows it has, and tokens that move to other positions."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.engine.editing import check_movable, move_tokens
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.key_probe import adds_positions
from kvpolicy.hf.rotary_lookup import first_not_undone
from kvpolicy.hf.seen_text import extend_digest, remove_from_digest
from kvpolicy.kernels.rotary import Rope
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError, KVPolicyTypeError
from kvpolicy.text.tables import shorten
from kvpolicy.text.validation import has_integers


def check_rows(given: Any, batch: int) -> Tensor:
    """Refuse rows that a cache does not have.

    Returns:
        The rows, [B'] int64.

    Raises:
        KVPolicyTypeError: If they are no numbers.
        KVPolicyError: If there is none, or one is out of range.
        KVPolicyStateError: If the cache has no rows yet.
    """
    if batch < 1:
        raise KVPolicyStateError(
            "A cache must have seen a prompt for its rows to be chosen, got an empty one; try to run a prompt first."
        )
    try:
        rows = torch.as_tensor(given)
        if rows.numel() and not has_integers(rows):
            raise TypeError  # a mask is no list of numbers, though it can be read as one
        rows = rows.to(torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise KVPolicyTypeError(
            f"rows must be a list of numbers from 0 to {batch - 1}, got {shorten(repr(given))}; try [0]."
        ) from None
    if rows.dim() != 1 or not len(rows) or not bool(((rows >= 0) & (rows < batch)).all()):
        raise KVPolicyError(f"rows must be a list of numbers from 0 to {batch - 1}, got {shorten(str(rows.tolist()))}.")
    return rows


def shift(cache: CacheForward, from_position: int, by: int) -> None:
    """Move every token of a cache from a position on; see `PolicyCache.shift`.

    Raises:
        KVPolicyError: See `_check_shift`.
    """
    from_position, by = _check_shift(cache, from_position, by)
    if not by:
        return
    cache.journal.forget()
    with torch.no_grad():
        for layer in cache.policy_layers:
            layer.leave_inference_mode()
            move_tokens(layer.store, from_position, by, cache.attachment.rotations[layer.layer_idx])
    digest = cache.policy_layers[0].mask_digest
    assert digest is not None
    if by > 0:
        extend_digest(digest, None, by)
    else:
        remove_from_digest(digest, -by)
    cache.announced.shift(by)


def _check_shift(cache: CacheForward, start: int, by: int) -> tuple[int, int]:
    """Refuse a shift before anything is changed.

    Args:
        cache: The cache.
        start: The first position that moves.
        by: How far.

    Returns:
        Both numbers as plain ones.

    Raises:
        KVPolicyError: If the cache has no complete prompt, a part of the policy or the model does not allow it, or a
            position is out of range.
    """
    # Keys are rotated by one angle, so that their rotation must depend on the position alone ...
    attachment = cache.attachment
    if not cache.has_prompt:
        raise KVPolicyError("A cache must have compressed its prompt for tokens to be moved, got one that has not yet.")
    if not attachment.rotations:
        raise KVPolicyError(
            "The model must have rotary embeddings whose angles do not depend on the length for tokens to be moved, "
            "got another kind; compute the cache again."
        )
    # ... in layers that hold a key for each token, and nothing else that depends on where it stood.
    if attachment.model_shape.unmanaged:
        raise KVPolicyError(
            "Every layer must be under the policy for tokens to be moved, got layers with a sliding window, whose mask "
            "counts columns; compute the cache again."
        )
    if attachment.model_shape.states:
        raise KVPolicyError(
            "Every layer must have attention alone for tokens to be moved, got layers with a state, which keeps what "
            "it took from them; compute the cache again."
        )
    for layer in cache.policy_layers:
        check_movable(layer.store)
    # Tokens may move behind the end, which `start` may be too, but not before position 0.
    for name, number in (("from_position", start), ("by", by)):
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise KVPolicyTypeError(f"{name} must be an integer, got {shorten(repr(number))}; try shift(30, -10).")
    shortest = int(cache.policy_layers[0].length.min())
    if not 0 <= start <= shortest:
        raise KVPolicyError(f"from_position must be between 0 and {shortest}, got {start}.")
    if start + by < 0:
        raise KVPolicyError(f"by must be at least {-start} for the position {start}, got {by}.")
    # Last, since it runs a layer of the model.
    if obstacle := attachment.move_obstacle():
        raise KVPolicyError(
            f"Positions must enter a model by rotations of its keys alone for tokens to be moved, got {obstacle}; try "
            "to compute the cache again."
        )
    return int(start), int(by)


def move_obstacle(reference: weakref.ref[nn.Module], rotations: Mapping[int, Rope]) -> str:
    """Why rotating keys does not move a model's tokens, as a clause behind "got"; empty if it does.

    Args:
        reference: The model.
        rotations: The rotary embedding of each layer under the policy.
    """
    model = reference()
    if model is None or not rotations:
        return ""
    sites = find_sites(model)
    added = adds_positions(model, sites)
    # Where it cannot be measured, a model with rotary embeddings is taken to have no others.
    if added or (added is None and not any(rope.rotates for rope in rotations.values())):
        return f"{type(model).__name__}, which adds them to hidden states"
    other = first_not_undone(sites.decoder, [site for site in sites.layers if site.layer_idx in rotations], rotations)
    if other is None:
        return ""
    return f"{type(other.attention).__name__}, whose keys depend on them in another way"

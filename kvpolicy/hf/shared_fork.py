"""A cache whose rows share the slots of another one, which are held once for all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.hf.editing import check_rows
from kvpolicy.hf.layer import LayerPrefix, PolicyLayer
from kvpolicy.hf.model_spec import resolve_for
from kvpolicy.hf.plan import check_own, check_readable
from kvpolicy.hf.states import States
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError


def check_shareable(cache: CacheForward) -> None:
    """Refuse a cache whose slots cannot be shared; nothing is changed.

    Raises:
        KVPolicyError: If it has several rows, or a part of its policy does not allow it.
        KVPolicyStateError: If it is in the middle of something, or shares a prefix itself.
    """
    cache.forward.check_idle("fork()")
    cache.journal.refuse_marked("fork(shared=True)")
    if not cache.is_initialized or not cache.has_prompt or cache.holds_next:
        raise KVPolicyStateError(
            "A cache must hold a whole prompt for its slots to be shared, got one that does not; try to run the prompt "
            "first."
        )
    if cache.policy_layers[0].prefix_columns:
        raise KVPolicyStateError(
            "A cache must hold all its tokens itself for its slots to be shared, got one with a shared prefix; try "
            "fork() for a copy of it, which shares the same prefix."
        )
    if cache.batch_size != 1:
        raise KVPolicyError(
            f"A cache must have one row for its slots to be shared, got {cache.batch_size}; try "
            "cache.fork([0]).fork(rows, shared=True), for each row."
        )
    check_readable(cache.policy)


def refuse_prefix(cache: CacheForward, what: str) -> None:
    """Refuse the call `what` on a cache behind a shared prefix.

    Raises:
        KVPolicyStateError: If it has one.
    """
    if cache.policy_layers[0].prefix_columns:
        raise KVPolicyStateError(
            f"{what} must be called on a cache that holds all its tokens itself, got one with a shared prefix; try it "
            "on the cache that was forked, or fork() without shared=True."
        )


def refuse_windows(cache: CacheForward) -> None:
    """Refuse a reset to the end of a shared prefix where layers have windows or states, which have moved on.

    Raises:
        KVPolicyStateError: If a cache behind a shared prefix has such layers.
    """
    shape = cache.attachment.model_shape
    if cache.policy_layers[0].prefix_columns and (shape.unmanaged or shape.states):
        kind = "a sliding window" if shape.unmanaged else "a state"
        raise KVPolicyStateError(
            f"Every layer must be under the policy for a reset to the end of a shared prefix, got layers with {kind}, "
            "which has moved on; try fork(rows, shared=True) again."
        )


OWN = "full"
"""The policy of what rows add behind a shared prefix: they keep all of it, in full precision."""


def own_policy(cache: CacheForward, own: Policy | str | None) -> Policy:
    """The policy of what rows add behind the slots of a cache.

    Raises:
        KVPolicyError: If the slots of the cache cannot be shared, or the policy cannot be that of tokens behind them.
        KVPolicyStateError: If the cache is in the middle of something, or shares a prefix itself.
    """
    check_shareable(cache)
    attachment = cache.attachment
    wanted = resolve_for(Policy.of(OWN if own is None else own), attachment.model_shape, attachment.info)
    check_own(wanted)
    attachment.check(wanted, waits=False)  # no token behind a prefix is ranked, so that few ever wait
    return wanted


def share(cache: CacheForward, other: CacheForward, rows: Tensor | Sequence[int] | None) -> None:
    """Let an empty cache begin behind the slots of a cache with one row, which may not change from now on.

    Args:
        cache: The cache.
        other: The empty one.
        rows: Its rows, all of them 0; one by default.

    Raises:
        KVPolicyError: If there is no such row.
    """
    indices = check_rows([0] if rows is None else rows, 1)
    count = len(indices)
    for index, layer in enumerate(cache.layers):
        # Windows and states move on in every row, so that they are copied.
        if isinstance(layer, DynamicSlidingWindowLayer):
            other.layers[index] = _window(layer, count)
        own: Any = other.layers[index]
        if isinstance(layer, PolicyLayer):
            _share_slots(cache, layer, own, count)
        if isinstance(layer, States):  # last, since slots that begin behind a prefix forget everything else
            own.adopt_states(layer, count)
    known = cache.journal.known
    other.journal.known = None if known is None else known.map_rows(lambda rows: rows[indices.to(rows.device)])
    cache.journal.is_shared = True


def _share_slots(cache: CacheForward, layer: PolicyLayer, own: PolicyLayer, rows: int) -> None:
    """Let a layer of another cache begin behind the slots of one of this cache."""
    store = layer.store
    slots = SharedPrefix(store.contents, store.geometry)
    seen = None if layer.mask_digest is None else int(layer.mask_digest[0])
    deltas = None if layer.rope_deltas is None else layer.rope_deltas * rows
    own.share(LayerPrefix(store, slots, rows, layer.get_seq_length(), seen, deltas))


def _window(layer: DynamicSlidingWindowLayer, rows: int) -> DynamicSlidingWindowLayer:
    """A copy of the sliding window of one row for each of several rows."""
    window = copy.copy(layer)
    if layer.keys is not None and layer.values is not None:
        window.keys, window.values = (t.expand(rows, -1, -1, -1).clone() for t in (layer.keys, layer.values))
    return window


def behind(prompt: Tensor | None, layer: PolicyLayer) -> Tensor | None:
    """The tokens of an announced prompt, [B] or [], behind the shared prefix; None if it is unknown."""
    if prompt is None or layer.prefix is None:
        return prompt
    return (prompt - layer.prefix.slots.length).clamp_min(0)

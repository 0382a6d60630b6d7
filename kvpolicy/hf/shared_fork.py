"""A cache whose rows share the slots of another one, which are held once for all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.hf.edit_checks import check_rows
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.layer_prefix import SHARED, LayerPrefix
from kvpolicy.hf.model_spec import resolve_for
from kvpolicy.planning.memory import DIGEST_NBYTES, layer_spec
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.protocols import Needs
from kvpolicy.spec.errors import KVPolicyError, KVPolicyStateError

OWN = "full"
"""The policy of what rows add behind a shared prefix: they keep all of it, in full precision."""


def check_own(own: Policy) -> None:
    """Refuse a policy that cannot be that of tokens behind a shared prefix.

    Raises:
        KVPolicyError: Naming the part.
    """
    part = next(filter(None, map(_obstacle, own.distinct)), "") if not own.differs_by_layer else "a policy by layer"
    if part:
        raise KVPolicyError(
            "own must be a policy that keeps tokens for their position alone, in the same way in every layer, since "
            f"their attention is known beside the prefix only, got {part}; try 'full', 'full+kivi' or 'window@256'."
        )


def _obstacle(own: Policy) -> str:
    spec = layer_spec(own, 0)
    if own.layer_metric or own.heads is not None or spec.allocator_needs != Needs():
        return f"the allocator {own.allocator!r}"
    if spec.needs != Needs():
        return f"the selector {own.selector!r}"
    if spec.merger_traits.when != "never":
        return f"the merger {own.merger!r}"
    return f"the reader {own.reader!r}" if own.reads_part else ""


def check_shareable(cache: Any) -> None:
    """Refuse a cache whose slots cannot be shared; nothing is changed.

    Raises:
        KVPolicyError: If it has several rows, or a part of its policy does not allow it.
        KVPolicyStateError: If it is in the middle of something, or shares a prefix itself.
    """
    cache.guard.check_idle("fork()")
    cache.history.refuse_marked("fork(shared=True)")
    if not cache.is_initialized or not cache.has_prompt or cache.holds_next:
        raise KVPolicyStateError(
            "A cache must hold a whole prompt for its slots to be shared, got one that does not; try to run the prompt "
            "first."
        )
    if cache.policy_layers[0].prefix_columns:
        raise KVPolicyStateError(
            "A cache must hold all its tokens itself for its slots to be shared, got one behind a shared prefix; try "
            "fork() for a copy of it, which shares the same prefix."
        )
    if cache.batch_size != 1:
        raise KVPolicyError(
            f"A cache must have one row for its slots to be shared, got {cache.batch_size}; try "
            "cache.fork([0]).fork(rows, shared=True), for each row."
        )
    check_readable(cache.policy)


def check_readable(policy: Policy) -> None:
    """Refuse a policy whose slots several rows cannot read together.

    Raises:
        KVPolicyError: If a part chooses which slots a step reads, or layers store tokens together.
    """
    if policy.layer_groups:
        raise KVPolicyError(
            "Every layer must store its tokens by itself for its slots to be shared, got a codec that stores those of "
            f"several layers together, {policy.codec!r}; try another codec, or shared=False."
        )
    readers = [own.reader for own in policy.distinct if own.reads_part]
    choosers = [*readers, *(own.codec for own in policy.distinct if own.codec.traits.searches)]
    if choosers:
        raise KVPolicyError(
            "Every slot must be read in a step for slots to be shared, since a choice depends on the queries of one "
            f"row, got {choosers[0]!r}; try a policy that reads everything, or shared=False."
        )


def refuse_prefix(cache: Any, what: str) -> None:
    """Refuse the call `what` on a cache behind a shared prefix.

    Raises:
        KVPolicyStateError: If it has one.
    """
    if cache.policy_layers[0].prefix_columns:
        raise KVPolicyStateError(
            f"{what} must be called on a cache that holds all its tokens itself, got one behind a shared prefix; try "
            "it on the cache that was forked, or fork() without shared=True."
        )


def refuse_windows(cache: Any) -> None:
    """Refuse a reset to the end of a shared prefix where layers have windows, which have moved on.

    Raises:
        KVPolicyStateError: If a cache behind a shared prefix has such layers.
    """
    if cache.policy_layers[0].prefix_columns and cache.attachment.model_shape.unmanaged:
        raise KVPolicyStateError(
            "Every layer must be under the policy for a reset to the end of a shared prefix, got layers with a sliding "
            "window, which has moved on; try fork(rows, shared=True) again."
        )


def own_policy(cache: Any, own: Policy | str | None) -> Policy:
    """The policy of what rows add behind the slots of a cache.

    Raises:
        KVPolicyError: If the slots of the cache cannot be shared, or the policy cannot be that of tokens behind them.
        KVPolicyStateError: If the cache is in the middle of something, or shares a prefix itself.
    """
    check_shareable(cache)
    attachment = cache.attachment
    wanted = resolve_for(Policy.of(OWN if own is None else own), attachment.model_shape, attachment.info)
    check_own(wanted)
    attachment.check(wanted)
    return wanted


def share(cache: Any, other: Any, rows: Tensor | Sequence[int] | None) -> None:
    """Let an empty cache begin behind the slots of a cache with one row, which may not change from now on.

    Args:
        cache: The cache.
        other: The empty one.
        rows: Its rows, all of them 0; one by default.

    Raises:
        KVPolicyError: If there is no such row.
    """
    indices = torch.as_tensor([0] if rows is None else rows, dtype=torch.int64)
    check_rows(indices, 1)
    count = len(indices)
    columns = cache.policy_layers[0].get_seq_length()
    digest = cache.mask_digest
    assert digest is not None
    for index, (layer, own) in enumerate(zip(cache.layers, other.layers, strict=True)):
        if isinstance(layer, DynamicSlidingWindowLayer):
            # A window moves on in every row, so that it is copied.
            other.layers[index] = _window(layer, count)
            continue
        store = layer.store
        slots = SharedPrefix(store.contents, store.geometry)
        seen = int(digest[0]) if layer is cache.policy_layers[0] else None
        own.share(LayerPrefix(store, slots, count, columns, seen))
    other.guard.columns = columns
    cache.history.is_shared = True


def _window(layer: DynamicSlidingWindowLayer, rows: int) -> DynamicSlidingWindowLayer:
    """A copy of the sliding window of one row for each of several rows."""
    window = copy.copy(layer)
    if layer.keys is not None and layer.values is not None:
        window.keys, window.values = (t.expand(rows, -1, -1, -1).clone() for t in (layer.keys, layer.values))
    return window


def with_prefix(plan: CachePlan, layers: list[PolicyLayer], rows: int) -> CachePlan:
    """A plan of what rows add, and of the prefix that they share; as it is without one.

    Args:
        plan: The plan.
        layers: The layers under the policy.
        rows: Rows of the cache.
    """
    prefixes = [layer.prefix for layer in layers]
    if prefixes[0] is None or SHARED in plan.layers[0].nbytes:
        return plan
    slots = [prefix.slots for prefix in prefixes if prefix is not None]
    full = sum(map(full_prefix_nbytes, layers)) * rows
    return beside(plan, [each.nbytes for each in slots], [each.step_nbytes for each in slots], full, slots[0].length)


def beside(plan: CachePlan, shared: list[int], moved: list[int], full: int, length: int) -> CachePlan:
    """A plan of what rows add, beside a prefix that they share.

    Args:
        plan: The plan of what they add.
        shared: Bytes of the prefix in each layer under the policy.
        moved: Bytes of it that a decode step reads.
        full: Bytes of its tokens in the stock cache, of all rows.
        length: Its tokens.
    """
    note = f"{length:,} tokens of a shared prefix are held once for all rows"
    return replace(
        plan,
        layers=tuple(
            replace(own, nbytes=own.nbytes | {SHARED: held}, moved=own.moved + read)
            for own, held, read in zip(plan.layers, shared, moved, strict=True)
        ),
        full_nbytes=plan.full_nbytes + full,
        peak_nbytes=plan.peak_nbytes + sum(shared),
        full_peak_nbytes=plan.full_peak_nbytes + full,
        note="; ".join(filter(None, (plan.note, note))),
    )


def full_prefix_nbytes(layer: PolicyLayer) -> int:
    """Bytes of the prefix's tokens in a stock cache, of one row; 0 without a prefix."""
    return 0 if layer.prefix is None else layer.prefix.slots.length * layer.store.shape.token_nbytes


def behind(prompt: Tensor | None, layer: PolicyLayer) -> Tensor | None:
    """The tokens of an announced prompt, [B] or [], behind the shared prefix; None if it is unknown."""
    if prompt is None or layer.prefix is None:
        return prompt
    return (prompt - layer.prefix.slots.length).clamp_min(0)


def planned_behind(plan: CachePlan, text: CachePlan) -> CachePlan:
    """A plan of what rows add behind a text, whose plan is that of one row."""
    shared = [sum(layer.nbytes.values()) for layer in text.layers]
    shared[0] -= DIGEST_NBYTES  # of the mask, of which each row has its own
    length = text_length(text)
    assert text.prefill is not None
    full = plan.batch * length * text.prefill.shape.token_nbytes * len(shared)
    return beside(plan, shared, [layer.moved for layer in text.layers], full, length)


def text_length(text: CachePlan | None) -> int:
    """The tokens that the plan of a text is of; 0 without one."""
    return 0 if text is None or text.prefill is None else text.prefill.columns


def check_text(text: CachePlan, own: Policy, layers: int) -> None:
    """Refuse the plan of a text whose slots rows cannot share.

    Raises:
        KVPolicyError: If it is not of one row of the same model, or a part of either policy does not allow it.
    """
    if not isinstance(text, CachePlan) or text.batch != 1 or len(text.layers) != layers:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = f"{text.batch} row(s) and {len(text.layers)} layers" if isinstance(text, CachePlan) else repr(text)  # pyright: ignore
        raise KVPolicyError(
            f"prefix must be the plan of one row of the same model, with {layers} layers under the policy, got {got}; "
            "try kvpolicy.plan(config, policy, prompt=4096)."
        )
    check_readable(text.policy)
    check_own(own)

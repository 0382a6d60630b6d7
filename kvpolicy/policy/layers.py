"""Which policies may be those of the layers of one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpolicy.allocators.uniform import Uniform
from kvpolicy.protocols import GroupsLayers, differs_by_layer
from kvpolicy.text.budget import Share
from kvpolicy.text.errors import KVPolicyError


def check_layers(layers: Sequence[Any]) -> None:
    """Refuse policies that cannot be those of the layers of one model.

    Args:
        layers: The policy of each layer.

    Raises:
        KVPolicyError: Naming the layers, and why.
    """
    if not layers:
        raise KVPolicyError("A policy by layer must have at least one layer, got none.")
    for index, policy in enumerate(layers):
        if not isinstance(policy.allocator, Uniform):
            raise KVPolicyError(
                f"The policy of a layer must have the allocator uniform, since its budget is the share of the layer, "
                f"got {policy} for layer {index}; try to leave the allocator out."
            )
        if isinstance(policy.codec, GroupsLayers):
            raise KVPolicyError(
                f"The codec of a layer must encode it by itself, got {policy} for layer {index}, whose codec shares "
                "codes between two layers; try tokenwise."
            )
        if differs_by_layer(policy.codec):
            raise KVPolicyError(
                f"The codec of a layer must not depend on the other layers, got {policy} for layer {index}, whose "
                "codec divides ranks over them; try ranks=same with a rank for this layer."
            )
        if isinstance(policy.budget, str | Share):
            raise KVPolicyError(
                f"The budget of a layer must be a relative share, a fraction or tokens, got {policy} for layer "
                f"{index}; try 0.2."
            )
    _check_same(layers, "be fractions, or all tokens", lambda policy: type(policy.budget).__name__, _is_share)
    _check_same(layers, "have the same decode mode", lambda policy: policy.decode)
    _check_same(layers, "replay their prompts alike, or none may", lambda policy: policy.replay)
    for index, policy in enumerate(layers):
        _check_reuse(layers, index, policy)


def _is_share(policy: Any) -> bool:
    return not policy.keeps_whole


def _check_same(layers: Sequence[Any], must: str, what: Any, counts: Any = None) -> None:
    found: dict[Any, int] = {}
    for index, policy in enumerate(layers):
        if counts is None or counts(policy):
            found.setdefault(what(policy), index)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise KVPolicyError(
            f"The policies of the layers must {must}, got {layers[first]} for layer {first} and {layers[second]} for "
            f"layer {second}."
        )


def _check_reuse(layers: Sequence[Any], index: int, policy: Any) -> None:
    """Refuse a layer that reads what another one chose which reads otherwise."""
    source = policy.reader.traits.source(index)
    if source in (None, index) or source >= len(layers):
        return
    chooser = layers[source]
    if (chooser.reader, chooser.codec) != (policy.reader, policy.codec):
        raise KVPolicyError(
            f"A layer that reuses the choice of another one must have the same reader and codec, got {policy} for "
            f"layer {index} and {chooser} for layer {source}."
        )

"""The sources of plots: a handle, a cache, its report, or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.reporting.report import Report, cache_of, make_report
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError

Source: TypeAlias = HandleSource | CacheSource | Report | CachePlan
"""Objects that have the tokens and bytes of a cache."""

UNMANAGED = "unmanaged"
"""The kind of the bytes of layers that are not under the policy."""


class LayerTokens(NamedTuple):
    """Budgets of a cache.

    Attributes:
        policy: The policy.
        tokens: The most tokens of each row, by layer; for a plan, those of its longest row.
        unmanaged: Layers that are not under the policy.
    """

    policy: Policy
    tokens: dict[int, tuple[int, ...]]
    unmanaged: tuple[int, ...]


def resolve(source: Any) -> Report | CachePlan:
    """A plan or a report as it is, or the report of a handle or a cache.

    Raises:
        KVPolicyError: If the cache has seen no prompt yet.
        KVPolicyTypeError: If the source is of another type.
    """
    if isinstance(source, CachePlan):
        return source
    if not isinstance(source, Report):
        try:
            return make_report(cache_of(source))
        except TypeError:
            raise KVPolicyTypeError(
                "The source must be a Handle, a PolicyCache, a Report, a CachePlan or a dictionary of these, got a "
                f"{type(source).__name__}."
            ) from None
    if all(layer.note == "empty" for layer in source.layers):
        raise KVPolicyError("The cache of the report must have seen a prompt; run the model first.")
    return source


def named(source: Any) -> dict[str, Report | CachePlan]:
    """The sources by name; a single one has its policy as its name.

    Raises:
        KVPolicyError: If there is none.
    """
    if not isinstance(source, Mapping):
        one = resolve(source)
        return {str(one.policy): one}
    if not source:
        raise KVPolicyError("The dictionary of sources must not be empty.")
    return {str(name): resolve(one) for name, one in source.items()}


def layer_tokens(source: Report | CachePlan) -> LayerTokens:
    """The budgets of a plan or a report."""
    if isinstance(source, CachePlan):
        tokens = {layer.layer_idx: (layer.tokens,) for layer in source.layers}
        return LayerTokens(source.policy, tokens, tuple(source.unmanaged))
    tokens = {layer.layer_idx: layer.budget for layer in source.layers if layer.budget}
    return LayerTokens(source.policy, tokens, tuple(layer.layer_idx for layer in source.layers if not layer.budget))


def by_kind(source: Report | CachePlan) -> dict[str, int]:
    """Bytes by kind, without kinds that have none."""
    if isinstance(source, CachePlan):
        return {kind: size for kind, size in source.by_kind().items() if size}
    kinds: dict[str, int] = {}
    for layer in source.layers:
        for kind, size in layer.nbytes.items():
            name = UNMANAGED if kind == "window" else kind
            kinds[name] = kinds.get(name, 0) + size
    return {kind: size for kind, size in kinds.items() if size}

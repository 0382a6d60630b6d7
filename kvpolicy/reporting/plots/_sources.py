"""What pictures and tables are made of: a handle, a cache, its report, or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.reporting.report import Report, cache_of, make_report
from kvpolicy.reporting.sources import CacheSource, HandleSource
from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError

Source: TypeAlias = HandleSource | CacheSource | Report | CachePlan
"""Whatever knows the tokens and bytes of a cache."""

UNMANAGED = "left alone"
"""The kind of the bytes of layers that a policy leaves as they are."""


class LayerTokens(NamedTuple):
    """Budgets of a cache.

    Attributes:
        policy: Whose.
        tokens: By layer, the most tokens of each row; of a plan, those of its longest row.
        alone: Layers that the policy leaves as they are.
    """

    policy: Policy
    tokens: dict[int, tuple[int, ...]]
    alone: tuple[int, ...]


def settled(source: Any) -> Report | CachePlan:
    """A plan or a report, that of a handle's or of a cache's where one of these is given.

    Raises:
        KVPolicyError: Where the cache has seen no prompt yet.
        KVPolicyTypeError: Where the source is none of these.
    """
    if isinstance(source, CachePlan):
        return source
    if not isinstance(source, Report):
        try:
            return make_report(cache_of(source))
        except TypeError:
            raise KVPolicyTypeError(
                f"A {type(source).__name__} has no budgets: give a Handle, a PolicyCache, a Report, a CachePlan, or a "
                "dictionary of these by name."
            ) from None
    if all(layer.note == "empty" for layer in source.layers):
        raise KVPolicyError("The report is of a cache that has seen no prompt yet: run the model first.")
    return source


def named(source: Any) -> dict[str, Report | CachePlan]:
    """Every source by its name, which is its policy where it is given alone.

    Raises:
        KVPolicyError: Where there is none.
    """
    if not isinstance(source, Mapping):
        one = settled(source)
        return {str(one.policy): one}
    if not source:
        raise KVPolicyError("There is nothing to draw: the dictionary is empty.")
    return {str(name): settled(one) for name, one in source.items()}


def layer_tokens(source: Report | CachePlan) -> LayerTokens:
    """Budgets by layer."""
    if isinstance(source, CachePlan):
        tokens = {layer.layer_idx: (layer.tokens,) for layer in source.layers}
        return LayerTokens(source.policy, tokens, tuple(source.left_alone))
    tokens = {layer.layer_idx: layer.budget for layer in source.layers if layer.budget}
    return LayerTokens(source.policy, tokens, tuple(layer.layer_idx for layer in source.layers if not layer.budget))


def by_kind(source: Report | CachePlan) -> dict[str, int]:
    """Bytes by kind; kinds that take none are left out."""
    if isinstance(source, CachePlan):
        return {kind: size for kind, size in source.by_kind().items() if size}
    kinds: dict[str, int] = {}
    for layer in source.layers:
        for kind, size in layer.nbytes.items():
            name = UNMANAGED if kind == "window" else kind
            kinds[name] = kinds.get(name, 0) + size
    return {kind: size for kind, size in kinds.items() if size}

"""A policy for a known model, whose layers have codecs of their own, or with a least number of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvpolicy.allocators.skipped import SkippedLayers
from kvpolicy.codecs.plain import Plain
from kvpolicy.policy.combination import PROTOCOLS
from kvpolicy.policy.policy import Policy
from kvpolicy.protocols import Codec, ModelInfo
from kvpolicy.text.budget import Budget, with_least
from kvpolicy.text.errors import KVPolicyError

Groups = tuple[tuple[int, ...], ...]


class ModelPolicy(Policy):
    """A policy whose layers differ in their codecs, since its codec groups them or differs by layer.

    `kvpolicy.attach` and `kvpolicy.plan` make it of the policy, which it equals; see `kvpolicy.protocols.GroupsLayers`
    and `kvpolicy.protocols.DiffersByLayer`.

    Args:
        policy: The policy.
        codecs: The codec of each layer that has one of its own, by its index in the model.
        other: The codec of other layers.
        groups: Layers that store a part of what they hold together, by their indices in the model.
    """

    __slots__ = ("_codecs", "_groups", "_other", "_places")
    _codecs: dict[int, Codec]
    _groups: Groups
    _other: Policy
    _places: dict[int, Policy]

    def __init__(self, policy: Policy, codecs: Mapping[int, Codec], other: Codec, groups: Groups = ()) -> None:
        """Make the policy of every layer."""
        for name in (*PROTOCOLS, "budget"):
            object.__setattr__(self, name, getattr(policy, name))
        own = self._without_model()  # of a policy that is for another model, perhaps
        places = {index: dataclasses.replace(own, codec=codec) for index, codec in codecs.items()}
        object.__setattr__(self, "_codecs", dict(codecs))
        object.__setattr__(self, "_groups", groups)
        object.__setattr__(self, "_other", dataclasses.replace(own, codec=other))
        object.__setattr__(self, "_places", places)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by construction."""
        return ModelPolicy, (self._without_model(), self._codecs, self._other.codec, self._groups)

    def at(self, layer_idx: int) -> Policy:
        """The policy of a layer, by its index in the model."""
        return self._places.get(layer_idx, self._other)

    @property
    def layer_groups(self) -> Groups:
        """Layers that store a part of what they hold together."""
        return self._groups

    @property
    def distinct(self) -> tuple[Policy, ...]:
        """The policies of all layers, each once."""
        return tuple(dict.fromkeys([self._other, *self._places.values()]))

    def with_budget(self, budget: Budget) -> Policy:
        """The same policy with another budget."""
        return ModelPolicy(self._without_model().with_budget(budget), self._codecs, self._other.codec, self._groups)

    def _without_model(self) -> Policy:
        return Policy(**{kind: getattr(self, kind) for kind in PROTOCOLS}, budget=self.budget)


def for_model(policy: Policy, model: ModelInfo) -> Policy:
    """A policy for the layers of a model, if its codec is not the same in all of them; else the policy as it is.

    Layers that are skipped store tokens in full precision.

    Raises:
        KVPolicyError: If the codec cannot be used with the model.
    """
    if policy.differs_by_layer:
        return policy
    codec = policy.codec
    grouping = codec.traits.groups
    differing = codec.traits.by_layer
    if grouping is not None:
        groups = grouping.groups(model)
        places = {index: grouping.codec_at(number) for group in groups for number, index in enumerate(group)}
        return ModelPolicy(policy, places, grouping.codec_at(None), groups)
    plain = _plain_layers(policy, model)
    if differing is not None:
        codecs = differing.by_layer(model)
        return ModelPolicy(policy, {**codecs, **plain}, codecs[model.indices[0]])
    return ModelPolicy(policy, plain, codec) if plain else policy


def _plain_layers(policy: Policy, model: ModelInfo) -> dict[int, Codec]:
    """The codec of layers that are skipped, by index."""
    allocator = policy.allocator
    if not isinstance(allocator, SkippedLayers) or not policy.codec.stages:
        return {}
    if dataclasses.replace(policy, codec=Plain()).decode != policy.decode:
        raise KVPolicyError(
            f"The selector must keep generated tokens in addition to the budget if layers are skipped that "
            f"{policy.codec} does not rank, got {policy}; try decode=grow, or a budget below 1.0."
        )
    return dict.fromkeys(allocator.skipped(model.indices), Plain())


def keep_at_least(policy: Policy, least: int) -> Policy:
    """A policy with a least number of tokens, if its budget is a fraction without one; others are returned unchanged.

    Args:
        policy: The policy.
        least: The least number of tokens per layer on average; 0 for none.

    Examples:
        >>> [str(keep_at_least(Policy.parse(spec), 1024)) for spec in ("h2o@0.5", "h2o@0.5:least=64", "h2o@64")]
        ['h2o@0.5:least=1024', 'h2o@0.5:least=64', 'h2o@64']
    """
    budget = with_least(policy.budget, least)
    return policy if budget == policy.budget else policy.with_budget(budget)

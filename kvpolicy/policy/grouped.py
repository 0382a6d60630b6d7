"""A policy whose codec stores a part of several layers once, for the layers of a known model."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvpolicy.policy.parts import PROTOCOLS
from kvpolicy.policy.policy import Policy
from kvpolicy.protocols import GroupsLayers, ModelInfo
from kvpolicy.spec.budget import Budget


class GroupedPolicy(Policy):
    """A policy whose codec groups the layers of a model; see `kvpolicy.protocols.GroupsLayers`.

    `kvpolicy.attach` and `kvpolicy.plan` make it of the policy, which it equals. The layers differ in their codecs.

    Args:
        policy: The policy.
        groups: The groups of layers, by their indices in the model.
    """

    __slots__ = ("_alone", "_groups", "_places")
    _alone: Policy
    _groups: tuple[tuple[int, ...], ...]
    _places: dict[int, Policy]

    def __init__(self, policy: Policy, groups: tuple[tuple[int, ...], ...]) -> None:
        """Make the policy of every layer."""
        for name in (*PROTOCOLS, "budget"):
            object.__setattr__(self, name, getattr(policy, name))
        alone = self._ungrouped()  # of a policy that is grouped already, for another model perhaps
        codec: Any = policy.codec
        places = {
            index: dataclasses.replace(alone, codec=codec.codec_at(number))
            for group in groups
            for number, index in enumerate(group)
        }
        object.__setattr__(self, "_groups", groups)
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_alone", dataclasses.replace(alone, codec=codec.codec_at(None)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by construction."""
        return GroupedPolicy, (self._ungrouped(), self.layer_groups)

    def at(self, layer_idx: int) -> Policy:
        """The policy of a layer, by its index in the model."""
        return self._places.get(layer_idx, self._alone)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers that store a part of what they hold together."""
        return self._groups

    @property
    def distinct(self) -> tuple[Policy, ...]:
        """The policies of all layers, each once."""
        return tuple(dict.fromkeys([self._alone, *self._places.values()]))

    def with_budget(self, budget: Budget) -> Policy:
        """The same policy with another budget."""
        return GroupedPolicy(self._ungrouped().with_budget(budget), self.layer_groups)

    def _ungrouped(self) -> Policy:
        return Policy(**{kind: getattr(self, kind) for kind in PROTOCOLS}, budget=self.budget)


def grouped(policy: Policy, model: ModelInfo) -> Policy:
    """A policy for the layers of a model, if its codec groups them; else the policy as it is."""
    if policy.differs_by_layer or not isinstance(policy.codec, GroupsLayers):
        return policy
    return GroupedPolicy(policy, policy.codec.groups(model))

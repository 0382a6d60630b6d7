"""What joins a cache to the attachment that made it."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch import Tensor, nn

from kvpolicy.engine.rotary import Rope
from kvpolicy.hf.model_spec import ModelShape
from kvpolicy.parallel.runtime import Sharing
from kvpolicy.policy import Policy
from kvpolicy.protocols import ModelInfo
from kvpolicy.protocols.ranks import SINGLE_RANK, Ranks
from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError

links: weakref.WeakKeyDictionary[nn.Module, Link] = weakref.WeakKeyDictionary()
"""The attachment of every model that has one."""


class Link:
    """What a cache knows of the attachment it belongs to."""

    policy: Policy
    model_shape: ModelShape
    info: ModelInfo
    ropes: dict[int, Rope]
    rotary: nn.Module | None
    layers: int
    active: bool
    trained: int | None

    def __init__(
        self,
        policy: Policy,
        model_shape: ModelShape,
        info: ModelInfo,
        ropes: dict[int, Rope],
        sharing: Sharing | None,
        rotary: nn.Module | None = None,
        trained: int | None = None,
    ) -> None:
        """Describe an attachment.

        Args:
            policy: What is attached.
            model_shape: What to.
            info: The same, as codecs are told.
            ropes: By layer; empty unless the policy's codec undoes the rotary embedding.
            sharing: The ranks that divide the model, if any.
            rotary: The module that makes the rotary embedding, if there is one.
            trained: The positions that it was trained for, where it does not reach further by itself.
        """
        self.policy, self.model_shape, self.info, self.ropes = policy, model_shape, info, ropes
        self.rotary, self.trained = rotary, trained
        self.layers = len(model_shape.evictable) + len(model_shape.left_alone)
        self.active = True
        self._sharing, self._ranks = sharing, dict[int, Ranks]()

    def check(self, policy: Policy) -> None:
        """Raise KVPolicyError where `policy` must measure what this attachment does not."""
        if policy.allocator.layer_metric and not self.policy.allocator.layer_metric:
            raise KVPolicyError(
                f"The cache's policy {policy} measures every layer, and the attached {self.policy} does not: "
                "attach a policy with the same allocator."
            )
        if policy.codec.traits.key_space == "unrotated" and not self.ropes:
            raise KVPolicyError(
                f"The cache's policy {policy} undoes the rotary embedding, and the attached {self.policy} does not: "
                "attach a policy with the same codec."
            )
        if policy.codec.traits.pins == "massive" and self.policy.codec.traits.pins != "massive":
            raise KVPolicyError(
                f"The cache's policy {policy} looks at hidden states, and the attached {self.policy} does not: "
                "attach a policy with the same codec."
            )
        policy.codec.check(self.info)

    def meet(self, layer_idx: int, queries: Tensor, keys: Tensor) -> Ranks:
        """The ranks that share a layer, whose heads are counted once, at its first prompt; [B, heads, P, D] each."""
        if self._sharing is None:
            return SINGLE_RANK
        if layer_idx not in self._ranks:
            self._ranks[layer_idx] = self._sharing.meet(queries.shape[1], keys.shape[1], keys.device)
        return self._ranks[layer_idx]

    def __reduce__(self) -> NoReturn:
        """Refuse: what is loaded elsewhere belongs to no attachment."""
        raise KVPolicyTypeError(
            "A cache under a policy cannot be pickled, since it belongs to its model: keep the tokens."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        """Copies of a cache belong to the same attachment."""
        return self


def link_of(model: nn.Module) -> Link:
    """The attachment of a model.

    Raises:
        KVPolicyError: Where no policy is attached.
    """
    link = links.get(model)
    if link is None:
        raise KVPolicyError("No policy is attached to this model: call kvpolicy.attach(model, policy) first.")
    return link

"""Sources of reports and plots: the members of a cache, of its layers and of a handle that they use.

The classes that satisfy these protocols are `kvpolicy.PolicyCache` and `kvpolicy.Handle`. They live in `kvpolicy.hf`,
which imports this package, so they are described here and recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvpolicy.engine.link import StepBytes
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy


class LayerSource(Protocol):
    """A layer under a policy; the tensors exist once it has seen a prompt."""

    @property
    def layer_idx(self) -> int:
        """Index of the layer in the model."""
        ...

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has seen a prompt."""
        ...

    @property
    def head_positions(self) -> Tensor:
        """Positions of the tokens of each head, [B, H, N]; negative where there is none."""
        ...

    @property
    def owner(self) -> Tensor | None:
        """KV head of each page, [B, NB]; None if all heads have the same budget."""
        ...

    @property
    def budget(self) -> Tensor:
        """The most tokens of each row, [B]."""
        ...

    @property
    def length(self) -> Tensor:
        """Tokens that each row has seen, [B]."""
        ...

    @property
    def prefix_kept(self) -> float:
        """Tokens of a shared prefix that a head holds, as a mean; 0 without one."""
        ...

    @property
    def step_bytes(self) -> StepBytes:
        """Bytes that a decode step moves."""
        ...

    def held(self) -> dict[str, int]:
        """Bytes by kind."""
        ...


@runtime_checkable
class CacheSource(Protocol):
    """A cache under a policy."""

    @property
    def policy(self) -> Policy:
        """The policy of the cache."""
        ...

    @property
    def plan(self) -> CachePlan | None:
        """The plan of the last prompt; None before it."""
        ...

    @property
    def layers(self) -> Sequence[Any]:
        """All layers, those that are not under the policy included."""
        ...

    @property
    def policy_layers(self) -> Sequence[LayerSource]:
        """The layers under the policy."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first forward."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        ...

    @property
    def full_nbytes(self) -> int:
        """Bytes of a stock cache of the same tokens."""
        ...

    @property
    def resident_nbytes(self) -> int:
        """Bytes of calibration tensors, which belong to the model."""
        ...

    def unmanaged_bytes(self) -> dict[int, int]:
        """Bytes of the layers that are not under the policy, by layer."""
        ...

    def cosines(self) -> Tensor:
        """The cosines that the allocator measured for the last prompt, [B, L]."""
        ...


@runtime_checkable
class HandleSource(Protocol):
    """The handle of an attached policy."""

    @property
    def policy(self) -> Policy:
        """The attached policy."""
        ...

    @property
    def cache(self) -> CacheSource | None:
        """The newest cache that the model made; None before the first."""
        ...


class ShapeSource(Protocol):
    """The layers of a model."""

    @property
    def evictable(self) -> Sequence[int]:
        """Layers that a policy can manage."""
        ...

    @property
    def unmanaged(self) -> Mapping[int, int]:
        """Layers that are not under the policy, and their sliding windows."""
        ...

    @property
    def states(self) -> Mapping[int, object]:
        """Layers with states."""
        ...

    @property
    def owners(self) -> Mapping[int, int]:
        """Layers that read the keys of earlier ones, and these."""
        ...

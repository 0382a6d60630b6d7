"""Tensor parallelism: the ranks that a model's heads are divided over, and what a policy must ask all of them.

A rank holds its own KV heads and knows nothing of the others'. Only what looks at all heads at once goes through here;
on one rank every method gives back what it was given.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvpolicy.protocols.ranks import Ranks, gather
from kvpolicy.spec.errors import KVPolicyError

Group = Any
"""A `torch.distributed.ProcessGroup`, which is not importable in builds of PyTorch without it."""


class Sharing(NamedTuple):
    """How a model is divided, before its heads are counted.

    Attributes:
        group: The ranks.
        replicas: How many of them hold each KV head.
        twins: Name of the group that holds the same KV heads as this rank; nothing where it alone does.
        weights: 64 numbers of the whole model, by which calibrations know it; None where they are not known.
    """

    group: Group
    replicas: int = 1
    twins: str = ""
    weights: Tensor | None = None

    @property
    def size(self) -> int:
        """How many ranks."""
        return dist.get_world_size(self.group)

    def resolve_ranks(self, queries: int, heads: int, device: torch.device) -> Ranks:
        """Ask every rank for its heads: all ranks must call this.

        Args:
            queries: Query heads on this rank.
            heads: KV heads on this rank.
            device: Where the group communicates.
        """
        size, name = self.size, self.group.group_name
        found = gather(torch.tensor([queries, heads], device=device), size, name).tolist()
        return Ranks(
            rank=dist.get_rank(self.group),
            size=size,
            group=name,
            replicas=self.replicas,
            twins=self.twins,
            queries=tuple(pair[0] for pair in found),
            heads=tuple(pair[1] for pair in found),
        )


_shared: weakref.WeakKeyDictionary[nn.Module, Sharing] = weakref.WeakKeyDictionary()


def share(model: nn.Module, group: Group = None, *, replicas: int = 1, weights: Tensor | None = None) -> None:
    """Tell `kvpolicy.attach` that a model is one rank's part of a larger one; a loader's last act, on every rank.

    What DeepSpeed or transformers divided is recognised without it. It is needed where KV heads are replicated, or
    where a calibrated codec must know the whole model again.

    Args:
        model: The part of this rank.
        group: The `torch.distributed` group of the ranks; all by default.
        replicas: How many ranks hold each KV head; they stand next to each other.
        weights: `kvpolicy.hf.discovery.sample_weights` of the whole model, [64].

    Raises:
        KVPolicyError: Where the ranks are no multiple of `replicas`.
    """
    group = dist.group.WORLD if group is None else group
    size = dist.get_world_size(group)
    if replicas < 1 or size % replicas:
        raise KVPolicyError(f"{size} ranks cannot hold each KV head {replicas} times: give a divisor of {size}.")
    _shared[model] = Sharing(group, replicas, _twins(group, size, replicas), weights)


def _twins(group: Group, size: int, replicas: int) -> str:
    if replicas == 1:
        return ""
    found = ""
    everyone = dist.get_process_group_ranks(group)
    for first in range(0, size, replicas):  # every rank must take part in making every group
        some = everyone[first : first + replicas]
        made: Any = dist.new_group(some)
        if dist.get_rank() in some:
            found = made.group_name
    return found


def sharing_of(model: nn.Module) -> Sharing | None:
    """How a model is divided over ranks; None where it is whole."""
    if model in _shared:
        sharing = _shared[model]
    else:
        group = _group_of(model)
        sharing = None if group is None else Sharing(group)
    return None if sharing is None or sharing.size == 1 else sharing


def _group_of(model: nn.Module) -> Group:
    """The group that DeepSpeed's or transformers' tensor parallelism divided a model over."""
    for module in model.modules():
        group = vars(module).get("mp_group")  # DeepSpeed's layers
        if group is not None:
            return group
    mesh: Any = getattr(model, "_device_mesh", None)  # transformers'
    if mesh is None or (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    return mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group()

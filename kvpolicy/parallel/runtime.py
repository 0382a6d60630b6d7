"""Tensor parallelism at run time: the ranks of a sharded model, the heads that each of them holds, and its weights."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvpolicy.statistics.ranks import Ranks, gather
from kvpolicy.text.errors import KVPolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Bytes of weights on the rank that holds the most; `kvpolicy.weights_per_rank` counts them.

    Attributes:
        backend: Backend that shards the model, `deepspeed` or `hf`.
        tp: The tensor parallel size.
        replicated: Bytes of parameters that every rank holds whole.
        sharded: Bytes of this rank's shards.

    Examples:
        >>> Weights(backend="hf", tp=2, replicated=640, sharded=4177920).nbytes
        4178560
    """

    backend: str
    tp: int
    replicated: int
    sharded: int

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.replicated + self.sharded


Group = Any
"""A `torch.distributed.ProcessGroup`, which is not importable in builds of PyTorch without it."""


class Sharing(NamedTuple):
    """How a model is sharded, before its heads are counted.

    Attributes:
        group: The process group of the ranks.
        replicas: How many ranks hold each KV head.
        twins: Name of the group of ranks that hold the same KV heads as this one; empty if it is the only one.
        weights: Weight fingerprint of the whole model, [64], which calibrations are compared with; None if unknown.
    """

    group: Group
    replicas: int = 1
    twins: str = ""
    weights: Tensor | None = None

    def repeated(self) -> Sharing:
        """The same ranks, of which each holds all KV heads."""
        return self._replace(replicas=self.size, twins=self.group.group_name)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self.group)

    def resolve_ranks(self, queries: int, heads: int, device: torch.device) -> Ranks:
        """Gather the heads of every rank; all ranks must call this.

        Args:
            queries: Query heads on this rank.
            heads: KV heads on this rank.
            device: The device on which the group communicates.
        """
        size = self.size
        name = self.group.group_name
        # Counted from tensors, because the config of a sharded model still has the heads of the whole model.
        found = gather(torch.tensor([queries, heads], device=device), size, name).tolist()
        return Ranks(
            rank=self.rank,
            size=size,
            group=name,
            replicas=self.replicas,
            twins=self.twins,
            queries=tuple(pair[0] for pair in found),
            heads=tuple(pair[1] for pair in found),
        )


_shared: weakref.WeakKeyDictionary[nn.Module, Sharing] = weakref.WeakKeyDictionary()


def share(model: nn.Module, group: Group = None, *, replicas: int = 1, weights: Tensor | None = None) -> None:
    """Declare that a model is one rank's shard of a larger one; every rank calls this at the end of loading.

    Models that DeepSpeed or transformers sharded are recognized without it. It is required if KV heads are replicated,
    or if a calibrated codec must identify the whole model.

    Args:
        model: The shard of this rank.
        group: The `torch.distributed` group of the ranks; all ranks by default.
        replicas: How many consecutive ranks hold each KV head.
        weights: `kvpolicy.hf.discovery.sample_weights` of the whole model, [64].

    Raises:
        KVPolicyError: If the number of ranks is not a multiple of `replicas`.
    """
    group = dist.group.WORLD if group is None else group
    size = dist.get_world_size(group)
    if replicas < 1 or size % replicas:
        raise KVPolicyError(f"replicas must be a divisor of the number of ranks, {size}, got {replicas}.")
    _shared[model] = Sharing(group, replicas, _twins(group, size, replicas), weights)


def _twins(group: Group, size: int, replicas: int) -> str:
    if replicas == 1:
        return ""
    name = ""
    everyone = dist.get_process_group_ranks(group)
    for first in range(0, size, replicas):  # new_group is collective: every rank creates every group
        members = everyone[first : first + replicas]
        subgroup: Any = dist.new_group(members)
        if dist.get_rank() in members:
            name = subgroup.group_name
    return name


def sharing_of(model: nn.Module) -> Sharing | None:
    """How a model is sharded over ranks; None if it is whole."""
    if model in _shared:
        sharing = _shared[model]
    else:
        group = _group_of(model)
        sharing = None if group is None else Sharing(group)
    return None if sharing is None or sharing.size == 1 else sharing


def follows_plan(model: nn.Module) -> bool:
    """Whether transformers sharded a model, by the plan of its config."""
    return getattr(model, "_device_mesh", None) is not None and (getattr(model, "_tp_size", None) or 1) > 1


def _group_of(model: nn.Module) -> Group:
    """The process group over which DeepSpeed or transformers sharded a model."""
    for module in model.modules():
        group = vars(module).get("mp_group")  # the layers of DeepSpeed AutoTP
        if group is not None:
            return group
    if not follows_plan(model):
        return None
    mesh: Any = model._device_mesh
    return mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group()

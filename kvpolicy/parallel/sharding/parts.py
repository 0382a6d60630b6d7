"""Which shard of every parameter a rank holds."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from kvpolicy.parallel.sharding.families import SUMMED, Family, Kind
from kvpolicy.parallel.sharding.heads import Heads, aligned, even


class Part(NamedTuple):
    """A shard of a tensor: ranges of one of its dimensions, concatenated."""

    dim: int
    ranges: list[range]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the shard of a tensor with the shape `whole`."""
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])


def part(kind: Kind, whole: tuple[int, ...], heads: Heads, rank: int, size: int) -> Part:
    """The shard of a matrix, a bias, or a fused tensor of all experts, that a rank holds."""
    fused_experts = len(whole) == 3  # [experts, outputs, inputs]
    outputs = 1 if fused_experts else 0
    divided = aligned if fused_experts else even
    if kind == "from_queries":
        return Part(1, [_rows(heads.queries, heads.dim)])
    if kind == "from_even":
        return Part(outputs + 1, [divided(whole[outputs + 1], rank, size)])
    if kind == "even":
        return Part(outputs, [divided(whole[outputs], rank, size)])
    if kind == "halves":
        half = whole[outputs] // 2  # gate and up, each sharded for itself
        own = divided(half, rank, size)
        return Part(outputs, [own, range(own.start + half, own.stop + half)])
    return Part(outputs, [_rows(units, heads.dim) for units in _units(kind, heads)])


def _rows(units: range, dim: int) -> range:
    return range(units.start * dim, units.stop * dim)


def _units(kind: Kind, heads: Heads) -> list[range]:
    """The heads of a fused or plain projection that a rank holds, in the order of the projection."""
    if kind == "queries":
        return [heads.queries]
    if kind == "keys":
        return [heads.keys]
    if kind == "stacked":
        first_key = heads.all_queries
        first_value = heads.all_queries + heads.all_keys
        keys = [range(first + heads.keys.start, first + heads.keys.stop) for first in (first_key, first_value)]
        return [heads.queries, *keys]
    found: list[range] = []
    for key in heads.keys:  # by_group: each KV head has its queries, then its key, then its value
        first = key * heads.group
        base = key * (heads.group + 2)
        # If KV heads are replicated, a rank has only some of the queries of its group.
        own = range(max(heads.queries.start, first) - first, min(heads.queries.stop, first + heads.group) - first)
        found += [range(base + own.start, base + own.stop), range(base + heads.group, base + heads.group + 2)]
    return found


class Slot(NamedTuple):
    """Shape of a parameter of the sharded model, and its shard on this rank.

    Attributes:
        whole: Shape of the whole tensor.
        part: The shard that this rank holds; None if it holds the whole tensor.
    """

    whole: tuple[int, ...]
    part: Part | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter on this rank."""
        return self.part.shape(self.whole) if self.part else self.whole


def kinds(model: nn.Module, family: Family) -> dict[str, Kind]:
    """How each sharded matrix of the model is sharded, by its full name."""
    found: dict[str, Kind] = {}
    for name, _ in model.named_modules():
        inner = re.fullmatch(r".+?\.\d+\.(.+)", name)
        if inner and inner[1] in family.matrices:
            found[name] = family.matrices[inner[1]]
    for name, kind in family.matrices.items():  # fused experts are parameters, and not modules
        if "experts." in name:
            ends = f".{name}"
            found |= {full: kind for full, _ in model.named_parameters() if full.endswith(ends)}
    return found


def slots(model: Any, family: Family, heads: Heads, rank: int, size: int) -> dict[str, Slot]:
    """The shard of every parameter on a rank; a head that is tied to the embedding is a separate parameter.

    Args:
        model: The whole model; its parameters may be on the meta device.
        family: How its layers are sharded.
        heads: The heads of the rank.
        rank: Which rank.
        size: The tensor parallel size.
    """
    divided = kinds(model, family)
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    found: dict[str, Slot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = tuple(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        kind = divided.get(name) or divided.get(owner)
        if name == f"{head_name}.weight":  # AutoTP shards the head over its inputs
            found[name] = Slot(whole, Part(1, [even(whole[1], rank, size)]))
        elif kind is None or (leaf == "bias" and kind in SUMMED):
            found[name] = Slot(whole, None)
        else:
            found[name] = Slot(whole, part(kind, whole, heads, rank, size))
    return found

"""Which part of every parameter a rank holds."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from kvpolicy.parallel.sharding.families import SUMMED, Family, Kind
from kvpolicy.parallel.sharding.heads import Heads, aligned, even


class Part(NamedTuple):
    """A part of a tensor: some ranges of one of its dimensions, one behind the other."""

    dim: int
    ranges: list[range]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of a shape."""
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])


def part(kind: Kind, whole: tuple[int, ...], heads: Heads, rank: int, size: int) -> Part:
    """The part of a matrix, of its bias, or of all experts' matrices, that a rank holds."""
    outputs, divided = (1, aligned) if len(whole) == 3 else (0, even)  # of all experts' matrices, experts come first
    if kind == "from_queries":
        return Part(1, [_rows(heads.queries, heads.dim)])
    if kind == "from_even":
        return Part(outputs + 1, [divided(whole[outputs + 1], rank, size)])
    if kind == "even":
        return Part(outputs, [divided(whole[outputs], rank, size)])
    if kind == "halves":
        half = whole[outputs] // 2
        own = divided(half, rank, size)
        return Part(outputs, [own, range(own.start + half, own.stop + half)])
    return Part(outputs, [_rows(units, heads.dim) for units in _units(kind, heads)])


def _rows(units: range, dim: int) -> range:
    return range(units.start * dim, units.stop * dim)


def _units(kind: Kind, heads: Heads) -> list[range]:
    """Which heads of a projection a rank holds, in the order in which the projection has them."""
    if kind == "queries":
        return [heads.queries]
    if kind == "keys":
        return [heads.keys]
    if kind == "stacked":
        keys = [range(heads.keys.start + more, heads.keys.stop + more) for more in (0, heads.all_keys)]
        return [heads.queries, *(range(k.start + heads.all_queries, k.stop + heads.all_queries) for k in keys)]
    found: list[range] = []
    for key in heads.keys:  # by_group: the queries of a KV head, its key, its value
        first, base = key * heads.group, key * (heads.group + 2)
        own = range(max(heads.queries.start, first) - first, min(heads.queries.stop, first + heads.group) - first)
        found += [range(base + own.start, base + own.stop), range(base + heads.group, base + heads.group + 2)]
    return found


class Slot(NamedTuple):
    """What a parameter of the divided model is to hold.

    Attributes:
        whole: Shape of the undivided tensor.
        part: What this rank holds of it; None for all.
    """

    whole: tuple[int, ...]
    part: Part | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        return self.part.shape(self.whole) if self.part else self.whole


def kinds(model: nn.Module, family: Family) -> dict[str, Kind]:
    """Of every matrix in the model's layers that is divided, how."""
    found: dict[str, Kind] = {}
    for name, _ in model.named_modules():
        inner = re.fullmatch(r".+?\.\d+\.(.+)", name)
        if inner and inner[1] in family.matrices:
            found[name] = family.matrices[inner[1]]
    for name, kind in family.matrices.items():  # experts' matrices are parameters of their module
        if "experts." in name:
            ends = f".{name}"
            found |= {full: kind for full, _ in model.named_parameters() if full.endswith(ends)}
    return found


def slots(model: Any, family: Family, heads: Heads, rank: int, size: int) -> dict[str, Slot]:
    """What a rank holds of every parameter; a head that is tied to the embedding is a parameter of its own.

    Args:
        model: The undivided model; its parameters may be on the meta device.
        family: How its layers are divided.
        heads: The rank's heads.
        rank: Which rank.
        size: How many there are.
    """
    divided, head = kinds(model, family), model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    found: dict[str, Slot] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = tuple(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        kind = divided.get(name) or divided.get(owner)
        if name == f"{head_name}.weight":
            found[name] = Slot(whole, Part(1, [even(whole[1], rank, size)]))
        elif kind is None or (leaf == "bias" and kind in SUMMED):
            found[name] = Slot(whole, None)
        else:
            found[name] = Slot(whole, part(kind, whole, heads, rank, size))
    return found

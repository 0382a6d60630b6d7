"""Filling a divided model with this rank's parts of the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.parallel.sharding import Family, Part, Slot, aligned
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy_deepspeed.checkpoint import Piece
from kvpolicy_deepspeed.launch import World


class _Goal(NamedTuple):
    """Where a tensor of the checkpoint goes: whose it is, the place in it, and what a slot of its own would say."""

    name: str
    place: Tensor
    slot: Slot


@torch.no_grad()
def fill(model: Any, family: Family, slots: dict[str, Slot], pieces: Iterable[tuple[str, Piece]], place: World) -> None:
    """Copy this rank's part of every tensor into the divided model.

    Raises:
        KVPolicyError: Where a tensor is missing, or has another shape than the config says.
    """
    parameters = dict(model.named_parameters())
    left = {name: parameter.numel() for name, parameter in parameters.items()}
    head, base = _tied_head(model), model.base_model_prefix
    embedding = _name_of(model, model.get_input_embeddings())
    for key, piece in pieces:
        key = family.rename(key)
        for goal in _goals(key, family, slots, parameters, base, place):
            if goal.name == head:  # what is tied comes from the embedding, whatever else is stored
                continue
            left[goal.name] -= _copy(goal, key, piece)
            if head and goal.name == embedding:
                left[head] -= _copy(_Goal(head, parameters[head], slots[head]), key, piece)
    missing = [name for name, count in left.items() if count]
    if missing:
        raise KVPolicyError(
            f"The checkpoint lacks {len(missing)} of the model's tensors, such as {missing[0]}: "
            "check that it is whole and that its config.json belongs to it."
        )
    model.config.tie_word_embeddings = False  # a part of the head is not the embedding: nobody is to tie them again


def _tied_head(model: Any) -> str | None:
    return _name_of(model, model.get_output_embeddings()) if model.config.tie_word_embeddings else None


def _name_of(model: Any, module: Any) -> str:
    return next(name for name, other in model.named_modules() if other is module) + ".weight"


def _goals(
    key: str, family: Family, slots: dict[str, Slot], parameters: dict[str, Any], base: str, place: World
) -> Iterator[_Goal]:
    """Where a tensor goes; nowhere if the model has no use for it, such as a buffer of an older version."""
    for prefix in ("", f"{base}."):  # a checkpoint of the model without its head has no prefix
        found = family.expert(prefix + key)
        if found and f"{found[0]}.down_proj" in slots:
            yield _expert(*found, slots, parameters, place)
            return
        if prefix + key in slots:
            yield _Goal(prefix + key, parameters[prefix + key].data, slots[prefix + key])
            return


def _expert(
    module: str, index: int, which: int, slots: dict[str, Slot], parameters: dict[str, Any], place: World
) -> _Goal:
    """Where one expert's gate (0), up (1) or down (2) matrix goes."""
    _, hidden, inner = slots[f"{module}.down_proj"].whole
    own = aligned(inner, place.rank, place.size)
    if which == 2:
        name = f"{module}.down_proj"
        return _Goal(name, parameters[name].data[index], Slot((hidden, inner), Part(1, [own])))
    name = f"{module}.gate_up_proj"
    rows = parameters[name].data[index].narrow(0, which * len(own), len(own))
    return _Goal(name, rows, Slot((inner, hidden), Part(0, [own])))


def _copy(goal: _Goal, key: str, piece: Piece) -> int:
    """Copy a part of a tensor, range by range; returns how many numbers."""
    if piece.shape != goal.slot.whole:
        raise KVPolicyError(
            f"The checkpoint's {key} is {list(piece.shape)}, and the config asks for {list(goal.slot.whole)}: "
            "check that its config.json belongs to it."
        )
    if goal.slot.part is None:
        goal.place.copy_(piece.take())
        return goal.place.numel()
    dim, filled = goal.slot.part.dim, 0
    for own in goal.slot.part.ranges:
        if own:
            index = (*[slice(None)] * dim, slice(own.start, own.stop))
            goal.place.narrow(dim, filled, len(own)).copy_(piece.take(*index))
            filled += len(own)
    return goal.place.numel()

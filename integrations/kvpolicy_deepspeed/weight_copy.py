"""Copy of this rank's shard of each tensor of a checkpoint into a sharded model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.parallel.launch import World
from kvpolicy.parallel.sharding import Family, ShardedPart, Slot, aligned
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_deepspeed.checkpoint import Piece


class _Goal(NamedTuple):
    """The destination of a tensor of the checkpoint.

    Attributes:
        name: The parameter.
        target: The part of the parameter that is filled; for the matrix of one expert, not all of it.
        slot: The slot of the target: the shape of the whole tensor, and this rank's part of it.
    """

    name: str
    target: Tensor
    slot: Slot


@torch.no_grad()
def fill(model: Any, family: Family, slots: dict[str, Slot], pieces: Iterable[tuple[str, Piece]], place: World) -> None:
    """Copy this rank's shard of each tensor into the model.

    Args:
        model: The sharded model, with uninitialized parameters.
        family: The table of the model family.
        slots: The slot of each parameter.
        pieces: The names and tensors of the checkpoint.
        place: This rank.

    Raises:
        KVPolicyError: If a tensor is missing, or its shape is not that of the config.
    """
    parameters = dict(model.named_parameters())
    left = {name: parameter.numel() for name, parameter in parameters.items()}  # numbers that are still to be filled
    head = _tied_head(model)
    base = model.base_model_prefix
    embedding = _name_of(model, model.get_input_embeddings())
    for key, piece in pieces:
        key = family.rename(key)
        for goal in _goals(key, family, slots, parameters, base, place):
            if goal.name == head:  # a tied head is filled from the embedding, even if it is stored too
                continue
            left[goal.name] -= _copy(goal, key, piece)
            if head and goal.name == embedding:
                left[head] -= _copy(_Goal(head, parameters[head], slots[head]), key, piece)
    missing = [name for name, count in left.items() if count]
    if missing:
        raise KVPolicyError(
            f"The checkpoint must contain every tensor of the model, got one that lacks {len(missing)}, such as "
            f"{missing[0]}; try downloading it again together with its config.json."
        )
    model.config.tie_word_embeddings = False  # the shard of the head is not the embedding, and must not be tied again


def _tied_head(model: Any) -> str | None:
    return _name_of(model, model.get_output_embeddings()) if model.config.tie_word_embeddings else None


def _name_of(model: Any, module: Any) -> str:
    return next(name for name, other in model.named_modules() if other is module) + ".weight"


def _goals(
    key: str, family: Family, slots: dict[str, Slot], parameters: dict[str, Any], base: str, place: World
) -> Iterator[_Goal]:
    """Yield the destination of a tensor; nothing if the model does not use it, such as a buffer of an old version."""
    for prefix in ("", f"{base}."):  # the checkpoint of a base model, without the head, has no prefix
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
    """Return the destination of the gate (0), up (1) or down (2) matrix of one expert."""
    _, hidden, inner = slots[f"{module}.down_proj"].whole
    own = aligned(inner, place.rank, place.size)
    if which == 2:
        name = f"{module}.down_proj"
        return _Goal(name, parameters[name].data[index], Slot((hidden, inner), ShardedPart(1, [own])))
    name = f"{module}.gate_up_proj"
    rows = parameters[name].data[index].narrow(0, which * len(own), len(own))
    return _Goal(name, rows, Slot((inner, hidden), ShardedPart(0, [own])))


def _copy(goal: _Goal, key: str, piece: Piece) -> int:
    """Copy this rank's part of a tensor, range by range; return the size of the target."""
    if piece.shape != goal.slot.whole:
        raise KVPolicyError(
            f"The tensor {key} of the checkpoint must have the shape {list(goal.slot.whole)} of the config, got "
            f"{list(piece.shape)}; try the config.json of this checkpoint."
        )
    if goal.slot.part is None:
        goal.target.copy_(piece.take())
        return goal.target.numel()
    dim = goal.slot.part.dim
    filled = 0
    for own in goal.slot.part.ranges:
        if own:
            index = (*[slice(None)] * dim, slice(own.start, own.stop))
            goal.target.narrow(dim, filled, len(own)).copy_(piece.take(*index))
            filled += len(own)
    return goal.target.numel()

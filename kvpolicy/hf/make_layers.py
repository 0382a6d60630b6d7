"""The layers of an empty cache under a policy."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.layer_group import places
from kvpolicy.engine.reading import Board
from kvpolicy.hf.attachment import CODES, Attachment
from kvpolicy.hf.layer import PolicyLayer, make_store
from kvpolicy.policy import Policy


def make_layers(attachment: Attachment, policy: Policy) -> list[Any]:
    """A layer for each of the model: stock ones where a window slides, others under the policy."""
    windows = attachment.model_shape.unmanaged
    boards: dict[int, Board] = {}  # by the layer that chooses what others read too
    groups = places(policy.layer_groups)

    def made(index: int) -> Any:
        if index in windows:
            return DynamicSlidingWindowLayer(sliding_window=windows[index])
        own = policy.at(index)
        rope = attachment.ropes.get(index) if own.undoes_rotation else None
        chooser = own.reader.traits.source(index)
        board = None if chooser is None else boards.setdefault(chooser, Board())
        projection = attachment.projections.get(index)
        return PolicyLayer(
            lambda: make_store(own, index, rope, projection),
            board,
            groups.get(index),
            holds_codes=attachment.hold == CODES,
        )

    return [made(index) for index in range(attachment.layers)]

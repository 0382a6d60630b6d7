"""The layers of an empty cache under a policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpolicy.engine.layer_group import places
from kvpolicy.engine.reading import Board
from kvpolicy.hf.attachment import CODES, Attachment
from kvpolicy.hf.cache_names import DummyLayer
from kvpolicy.hf.latent import LatentSlots
from kvpolicy.hf.layer import PolicyLayer, make_store
from kvpolicy.hf.model_spec import LayerStates
from kvpolicy.hf.shared_keys import ReadingLayer
from kvpolicy.hf.states import SlotsAndState, StateLayer, WindowAndState
from kvpolicy.policy import Policy
from kvpolicy.protocols.codec import fits_pages


def make_layers(attachment: Attachment, policy: Policy) -> list[Any]:
    """A layer for each of the model: under the policy where it attends to all tokens, as in a stock cache elsewhere."""
    shape = attachment.model_shape
    managed = {*shape.evictable}
    boards: dict[int, Board] = {}  # by the layer that chooses what others read too
    groups = places(policy.layer_groups)
    last = {owner: index for index, owner in sorted(shape.owners.items())}

    def kind(states: LayerStates | None) -> Callable[..., PolicyLayer]:
        if states is not None:
            return partial(SlotsAndState, number_of_states=states.number)
        return LatentSlots if shape.shape.latent else PolicyLayer

    def made(index: int) -> Any:
        states = shape.states.get(index)
        if index in shape.owners:
            owner = shape.owners[index]
            return ReadingLayer(owner, is_last=index == last[owner], is_sliding=owner in shape.unmanaged)
        if index not in managed:
            return _unmanaged(shape.unmanaged.get(index), None if states is None else states.number)
        own = policy.at(index)
        rope = attachment.ropes.get(index) if own.undoes_rotation else None
        chooser = own.reader.traits.source(index)
        board = None if chooser is None else boards.setdefault(chooser, Board())
        projection = attachment.projections.get(index)
        return kind(states)(
            lambda: make_store(own, index, rope, projection, shape.shape),
            board,
            groups.get(index),
            is_read=index in last,
            holds_codes=attachment.hold == CODES and fits_pages(own.codec),
        )

    return [made(index) for index in range(shape.depth)]


def _unmanaged(window: int | None, states: int | None) -> Any:
    """A layer that no policy manages, with a sliding window, a number of states, both, or neither."""
    if window is None:
        return DummyLayer() if states is None else StateLayer(states)
    return DynamicSlidingWindowLayer(window) if states is None else WindowAndState(window, states)

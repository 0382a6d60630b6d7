"""A text that is fed in pieces, where the angles of rotary embeddings depend on the length of a forward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvpolicy.hf.rotary_lookup import adapting_embeddings, changing_kind, least_with_angles
from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.hf.cache import PolicyCache

_HELD = threading.local()
"""The length of the text whose angles this thread's forwards have."""


@contextmanager
def angles_of(model: nn.Module, length: int) -> Generator[None]:
    """Give each forward of this thread the angles of one forward of the whole text.

    Nothing is changed where the angles depend on no length.

    Args:
        model: The model, or its decoder.
        length: Tokens of the text. No forward may reach behind it.

    Raises:
        KVPolicyError: If the angles depend on the length, and no rotary embedding is found.
    """
    config: Any = model.config
    length = least_with_angles(config, length)
    tables = adapting_embeddings(model)
    if length == 1:
        yield
        return
    if not tables:
        raise KVPolicyError(
            "The rotary embedding must be a module of the model for a text in pieces to have the angles of the whole, "
            f"got a config with the kind {changing_kind(config, 1, length)} alone; try the text in one forward."
        )
    # Tables compute their angles by the largest position that they see, so that a call gets the last one of the text.
    # Other threads may run the same modules meanwhile.
    thread = threading.get_ident()

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_end(module, args, kwargs, length) if threading.get_ident() == thread else None

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return _without_end(output) if threading.get_ident() == thread else None

    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in tables]
    hooks += [module.register_forward_hook(after) for module in tables]
    outer = getattr(_HELD, "length", 0)
    _HELD.length = length
    try:
        yield
    finally:
        _HELD.length = outer
        for hook in hooks:
            hook.remove()


def _with_end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> Any:
    """The arguments of a rotary embedding with a column behind, whose position is the last one of the text."""
    given: dict[str, Any] = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    places: Tensor = given["position_ids"]
    # `dynamic` keeps the angles of the longest text so far; those of one token are the model's own.
    module.forward(**given | {"position_ids": torch.zeros_like(places[..., :1])})
    end = torch.full_like(places[..., :1], length - 1)
    return (), given | {"position_ids": torch.cat([places, end], -1)}


def _without_end(output: Any) -> Any:
    """Cosines and sines [..., P + 1, D], or one tensor of both, without the column that `_with_end` added."""
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return type(output)(part[..., :-1, :] for part in output)


def check_pieces(model_or_config: Any, first: int, last: int, what: str) -> None:
    """Refuse a text whose pieces would have other angles than the whole.

    Args:
        model_or_config: The model, or its config.
        first: Tokens of the first piece.
        last: Tokens of the whole text.
        what: What is fed in pieces, as the subject of the message.

    Raises:
        KVPolicyError: Naming the kind of rotary embedding.
    """
    kind = changing_kind(getattr(model_or_config, "config", model_or_config), first, last)
    if kind:
        raise KVPolicyError(
            f"{what} must have the angles that the tokens before it have, got a rotary embedding of type {kind}, which "
            f"changes them between {first} and {last} tokens; try the whole text in one forward, on a new cache."
        )


def check_angles(config: Any, cache: PolicyCache, end: int) -> None:
    """Refuse several tokens behind a cache whose keys have other angles than these would have.

    Args:
        config: The model's config.
        cache: The cache.
        end: The position behind the last token.

    Raises:
        KVPolicyError: As `check_pieces`.
    """
    first = cache.policy_layers[0]
    if getattr(_HELD, "length", 0) or not first.is_initialized:
        return
    seen = int(first.length.max()) + first.prefix_columns
    if seen:
        check_pieces(config, seen, end, "A text behind a cache")

"""What a calibration needs of a model and of token ids, said before the model runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from kvpolicy.hf.discovery import lacks_weights, vocabulary_of
from kvpolicy.hf.model_spec import describe
from kvpolicy.protocols import LayerShape
from kvpolicy.text.errors import KVPolicyError


def check_weights(model: nn.Module) -> None:
    """Refuse a model without weights.

    Raises:
        KVPolicyError: If some are on the device meta, and nothing loads them.
    """
    if lacks_weights(model):
        raise KVPolicyError(
            "The model must have weights to be measured, got some on the device meta; try from_pretrained."
        )


def check_tokens(model: nn.Module, windows: Sequence[Tensor]) -> None:
    """Refuse token ids that a model does not have, which stop a GPU for good.

    Args:
        model: The model.
        windows: Token ids, of any shape.

    Raises:
        KVPolicyError: Naming the first one.
    """
    limit = vocabulary_of(model)
    for ids in windows:
        wrong = ids[(ids < 0) | (ids >= limit)]
        if len(wrong):
            raise KVPolicyError(
                f"Token ids must be from 0 to {limit - 1}, as the model has {limit} of them, got {int(wrong[0])}; try "
                "the tokenizer of the model."
            )


def check_sizes(model: nn.Module, method: str) -> None:
    """Refuse a model whose keys and values are not vectors of one size, which a method encodes alike.

    Raises:
        KVPolicyError: If it has latent attention, or values of another size than keys.
    """
    shape = shape_of(model)
    if shape.value_dim is not None:
        raise KVPolicyError(
            f"Keys and values must have one size to calibrate {method}, got {described(shape)}; try tokenwise, kivi, "
            "turboquant or bfp, which need no calibration."
        )


def check_measurable(model: nn.Module) -> None:
    """Refuse a model of which no candidate can be measured in one layer alone.

    Raises:
        KVPolicyError: If values have another size than keys, as with latent attention.
    """
    if shape_of(model).value_dim is not None:
        raise KVPolicyError(
            "Values must have the size of keys to be measured, got a model with latent attention (MLA) or with values "
            "of another size; try kvpolicy compare."
        )


def check_vectors(shape: LayerShape, *, squares: bool) -> None:
    """Refuse layers whose stock cache has other vectors than those that a policy stores.

    Args:
        shape: The shape of the layers.
        squares: Whether squared gradients of keys and values are to be held side by side.

    Raises:
        KVPolicyError: If they have latent attention, or with `squares` values of another size than keys.
    """
    if shape.latent or (squares and shape.value_dim is not None):
        raise KVPolicyError(
            f"Keys and values must have {'one size for gradients' if squares else 'heads of their own'} to be "
            f"collected, got {described(shape)}; try another model{', or leave fisher out' if squares else ''}."
        )


def check_heads(model: nn.Module) -> None:
    """Refuse a model whose heads have no keys of their own.

    Raises:
        KVPolicyError: If it has latent attention.
    """
    shape = shape_of(model)
    if shape.latent:
        raise KVPolicyError(
            f"Heads must have keys of their own to be scored, got {described(shape)}, which all query heads share; try "
            "a policy without budgets of heads."
        )


def check_unrotated(model: nn.Module, what: str, remedy: str) -> None:
    """Refuse a model whose rotary embedding is not undone.

    Args:
        model: The model.
        what: What is found without it, in words.
        remedy: Advice for the user.

    Raises:
        KVPolicyError: If it has latent attention.
    """
    shape = shape_of(model)
    if shape.latent:
        raise KVPolicyError(
            f"The rotary embedding must not be undone for {described(shape)}, got {what}, which needs it; {remedy}."
        )


def shape_of(model: nn.Module) -> LayerShape:
    """The shape of a layer that a policy manages."""
    return describe(model.config).shape


def described(shape: LayerShape) -> str:
    """A shape of which keys and values differ, in words."""
    if shape.latent:
        return "latent attention (MLA)"
    return f"values of {shape.value_dim} and keys of {shape.head_dim} channels"

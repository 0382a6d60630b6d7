"""Selectors that wrap another one, their base, and rank its tokens by more than it does."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvpolicy.protocols import (
    ALL_HEADS,
    ChecksModel,
    DecodeMode,
    Gate,
    HoldsAttention,
    ModelInfo,
    ScoresInputs,
    Seen,
    Selector,
    State,
    View,
    compares_heads,
    joint_decode,
    whole_heads,
)
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError


class Wrapper(Selector, Protocol):
    """A selector with a base, from which it has what it does not say itself.

    Attributes:
        base: The selector that it wraps.
    """

    __slots__ = ()

    base: Selector

    @property
    def decode(self) -> DecodeMode:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The mode of the base."""
        return self.base.decode

    @property
    def compares_heads(self) -> bool:
        return compares_heads(self.base)

    @property
    def whole_heads(self) -> bool:
        return whole_heads(self.base)

    @property
    def min_tokens(self) -> int:
        return self.base.min_tokens

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """The statistic of the base."""
        return self.base.statistic(seen, view)

    def check(self, model: ModelInfo) -> None:
        if isinstance(self.base, ChecksModel):
            self.base.check(model)

    def load_gate(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Gate:
        assert isinstance(self.base, ScoresInputs)
        return self.base.load_gate(layer_idx, device, heads)

    def score_inputs(self, gate: Gate, inputs: Tensor) -> Tensor:
        assert isinstance(self.base, ScoresInputs)
        return self.base.score_inputs(gate, inputs)

    def with_scores(self, state: State, scores: Tensor) -> State:
        """With the scores in the state of the base, the field `base`."""
        assert isinstance(self.base, ScoresInputs)
        return state._replace(base=self.base.with_scores(state.base, scores))


def check_base(name: str, base: object) -> None:
    """Refuse what is no selector.

    Raises:
        KVPolicyTypeError: With the name of the field.
    """
    if not isinstance(base, Selector):
        raise KVPolicyTypeError(f"{name} must be a selector, got {base!r}; try SnapKV().")


def check_attention_base(name: str, base: Selector) -> None:
    """Refuse a base that does not say how much attention each token of each head has received.

    Raises:
        KVPolicyTypeError: If it is no selector.
        KVPolicyError: If it holds no attention, or ranks a token by all heads.
    """
    check_base(name, base)
    if not isinstance(base, HoldsAttention):
        raise KVPolicyError(
            f"{name} must hold the attention of each token (HoldsAttention), got {base}; try snapkv, h2o or probe."
        )
    if joint_decode(base):
        raise KVPolicyError(
            f"{name} must decide for every head alone, got {base}, which ranks a token by all heads of a layer; "
            "try snapkv, h2o or probe."
        )


def attention_of(base: Selector, state: object) -> Tensor:
    """The attention that a base holds of each token, [B, H, N]; see `check_attention_base`."""
    assert isinstance(base, HoldsAttention)
    return base.attention(state)

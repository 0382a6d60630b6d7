"""Selectors that wrap another one, their base, and rank its tokens by more than it does."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from kvpolicy.protocols import (
    ChecksModel,
    DecodeMode,
    HoldsAttention,
    ModelInfo,
    Reranks,
    Selector,
    State,
    View,
    compares_heads,
    joint_decode,
    rerank_every,
    whole_heads,
)
from kvpolicy.statistics import Results, Statistic
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError


class Wrapper(Selector, Protocol):
    """A selector with a base, from which it has what it does not say itself.

    Its state is a named tuple with the state of the base in the field `base`.

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
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """The needs of the base."""
        return self.base.statistics

    @property
    def min_tokens(self) -> int:
        return self.base.min_tokens

    def step(self, state: State, row: Tensor, view: View) -> None:
        """Update the base."""
        self.base.step(state.base, row, view)

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        """The statistic of the base."""
        return self.base.statistic(seen, view)

    def check(self, model: ModelInfo) -> None:
        if isinstance(self.base, ChecksModel):
            self.base.check(model)

    @property
    def rerank_every(self) -> int:
        """As the base."""
        return rerank_every(self.base)

    def rerank(self, state: State, seen: Results, view: View) -> State:
        """Let the base rank all tokens again; the rest of the state stays."""
        assert isinstance(self.base, Reranks)  # only called if the base asks for it
        return state._replace(base=self.base.rerank(state.base, seen, view))


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

"""Staircase: precision that falls with age."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.kivi import KIVI
from kvpolicy.protocols import Codec, Layout, ModelInfo, Stage, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy


@strategy
class Staircase(Codec):
    """Store tokens in 8 bits, then in 4, then in 2 as they age.

    Every stage is a KIVI. A block of tokens from the full-precision buffer is encoded in 8 bits. If that stage is full,
    its oldest tokens are decoded and re-encoded in 4 bits, and those of the next stage in 2. So the newest tokens are
    in full precision, and the oldest ones take the fewest bytes.

    Args:
        tokens_8bit: The maximum number of tokens in 8 bits, rounded up to whole groups.
        tokens_4bit: The maximum number of tokens in 4 bits, rounded up to whole groups. All older ones are in 2 bits.
        group_size: Tokens per key group and the maximum number of channels per value group, in each stage.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, at most 32.

    Raises:
        KVPolicyError: If a parameter is out of range.

    Examples:
        >>> Staircase().layout(1000)
        Layout(exact=63, coded=(128, 512, 352))

    Source:
        SAQ, a staircase quantization that builds on KIVI. Only SAQ's abstract and a summary were read, so all details
        are unverified. The stages are KIVI's (arXiv:2402.02750, the paper of KIVI, not of SAQ). Differences:

        - The number of tokens per stage is our choice.
        - A token is re-encoded from its decoded form once per stage, because nothing else of it is stored, so it
          accumulates the errors of earlier stages. Tokens of a prompt are encoded directly in their stage.
        - The differences between KIVI and its paper apply here too.
        - Under eviction, a stage with free slots takes new tokens before it demotes its oldest ones, so a stage holds a
          number of tokens and not those of a fixed age.
    """

    ALIASES: ClassVar[dict[str, str]] = {"eight": "tokens_8bit", "four": "tokens_4bit"}

    tokens_8bit: int = least(1, 128)
    tokens_4bit: int = least(1, 512)
    group_size: int = least(1, 32)
    residual_length: AutoInt = least(0, "auto")

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks of one key group."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(
            tokens, residual=self.residual_length, block=self.group_size, largest_residual=32
        )
        return Traits(block=block, group_size=self.group_size, residual=residual)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Three stages: 8, 4 and 2 bits."""
        return (
            KIVI(bits=8, group_size=self.group_size, residual_length=self.residual_length),
            KIVI(bits=4, group_size=self.group_size, residual_length=self.residual_length),
            KIVI(bits=2, group_size=self.group_size, residual_length=self.residual_length),
        )

    def layout(self, tokens: int) -> Layout:
        """Full-precision slots for the residual and one group; whole groups fill the stages in order."""
        residual = self.traits_for(tokens).residual
        exact = residual + self.group_size
        if tokens < exact:  # too few tokens to ever fill a group
            return Layout(tokens)
        left = -(-(tokens - residual) // self.group_size)
        groups: list[int] = []
        for most in (self.tokens_8bit, self.tokens_4bit):
            groups.append(min(-(-most // self.group_size), left))
            left -= groups[-1]
        return Layout(exact, tuple(count * self.group_size for count in (*groups, left)))

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the codes of a vector do not fill whole bytes in every stage."""
        if model.head_dim % 4:
            raise KVPolicyError(
                f"The head dimension must be a multiple of 4 for Staircase, got {model.head_dim}; try kivi with bits=8."
            )

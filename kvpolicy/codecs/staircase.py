"""Precision that falls with age."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.codecs._common import check_least
from kvpolicy.codecs.kivi import KIVI
from kvpolicy.protocols import Layout, ModelInfo, Stage, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Staircase:
    """StageStore tokens in 8 bits, then in 4, then in 2 as they age.

    Every stage is a KIVI. A block of tokens that leaves the exact part is coded in 8 bits. Where that stage is full,
    its oldest tokens are decoded and coded again in 4 bits, and those of that stage in 2. So attention has the newest
    tokens exact, and old ones cost least.

    Args:
        eight: The most tokens in 8 bits, rounded up to groups.
        four: The most tokens in 4 bits, rounded up to groups. All older ones are in 2 bits.
        group_size: Tokens of a key group and the most channels of a value group, in each stage.
        residual_length: How many of the newest tokens always stay exact.

    Raises:
        KVPolicyError: Where a parameter is out of its range.

    Examples:
        >>> Staircase().layout(1000)
        Layout(exact=64, coded=(128, 512, 352))

    Source: SAQ, a staircase quantization that builds on KIVI. Only SAQ's abstract and a summary were read, so all
    details are unverified. The stages are KIVI's (arXiv:2402.02750, the paper of KIVI, not of SAQ).
    Differences: how many tokens a stage holds is our choice. A token is coded anew from what was decoded, once per
    stage, since nothing else is left of it; so it carries the errors of the stages before. What differs between KIVI
    and its paper differs here too. A stage that tokens are evicted from takes new ones before it hands its oldest on,
    so with eviction a stage holds its newest tokens in number, not by an age that is fixed.
    """

    eight: int = 128
    four: int = 512
    group_size: int = 32
    residual_length: int = 32

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        check_least(self, eight=(1, 128), four=(1, 512), group_size=(1, 32), residual_length=(0, 32))

    @property
    def traits(self) -> Traits:
        """A group of keys is coded at a time."""
        return Traits(block=self.group_size, group_size=self.group_size, residual=self.residual_length)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Three."""
        return (
            KIVI(bits=8, group_size=self.group_size, residual_length=self.residual_length),
            KIVI(bits=4, group_size=self.group_size, residual_length=self.residual_length),
            KIVI(bits=2, group_size=self.group_size, residual_length=self.residual_length),
        )

    def layout(self, tokens: int) -> Layout:
        """Room for the residual and one group exact, and whole groups coded, in the first stages as far as they go."""
        exact = self.residual_length + self.group_size
        if tokens < exact:  # too few to ever fill a group
            return Layout(tokens)
        left = -(-(tokens - self.residual_length) // self.group_size)
        groups: list[int] = []
        for most in (self.eight, self.four):
            groups.append(min(-(-most // self.group_size), left))
            left -= groups[-1]
        return Layout(exact, tuple(count * self.group_size for count in (*groups, left)))

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError where vectors do not fill whole bytes in every stage."""
        if model.head_dim % 4:
            raise KVPolicyError(
                f"Staircase packs 4 codes of 2 bits into a byte, and the head dimension {model.head_dim} is no "
                f"multiple of 4: use kivi with bits=8."
            )

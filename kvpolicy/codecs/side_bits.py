"""Bits of keys and of values: one option for both, and one for each where they differ."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol


class SideBits(Protocol):
    """The options `bits`, `key_bits` and `value_bits` of a codec, and what they mean together.

    Options that mean the same are stored in the same way: as `bits` if both sides have as many, else as `key_bits` and
    `value_bits`, of which one that is the default of `bits` is left at `auto`.

    Attributes:
        bits: Bits per code of both sides.
        key_bits: Bits per code of keys; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.

    Examples:
        >>> from kvpolicy import KIVI, Policy
        >>> KIVI(key_bits=4, value_bits=4) == KIVI(bits=4)
        True
        >>> str(Policy.parse("tokenwise:bits=8:value_bits=4"))
        'tokenwise:key_bits=8'
    """

    __slots__ = ()

    bits: Any
    key_bits: Any
    value_bits: Any

    def __post_init__(self) -> None:
        default = next(field.default for field in fields(self) if field.name == "bits")  # pyright: ignore[reportArgumentType]
        keys = self.bits_of_keys
        values = self.bits_of_values
        both = keys if keys == values else default
        object.__setattr__(self, "bits", both)
        object.__setattr__(self, "key_bits", "auto" if keys == both else keys)
        object.__setattr__(self, "value_bits", "auto" if values == both else values)

    @property
    def bits_of_keys(self) -> Any:
        """Bits per code of keys."""
        return self.bits if self.key_bits == "auto" else self.key_bits

    @property
    def bits_of_values(self) -> Any:
        """Bits per code of values."""
        return self.bits if self.value_bits == "auto" else self.value_bits

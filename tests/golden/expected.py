"""What may differ from a record of the tree before padded prompts, byte counts and growth were changed."""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """Patterns of "CASE FIELD" that may differ, and why."""

    patterns: tuple[str, ...]
    reason: str


_PADDED = ("turns", "rows", "beams", "ranks")
_ROUNDED = ("logits", "keys", "values", "state", "codes", "tokens")

EXPECTED = (
    Expected(("*nbytes*", "*plan*"), "bytes on the host and the digest of masks count; reserves grow by an eighth"),
    Expected(("* at bytes*",), "a budget in bytes that counts these holds fewer tokens"),
    Expected(("* full *", "* full+kivi *"), "with other reserves, sums over the slots round differently"),
    Expected(
        tuple(f"{scenario} * *.{quantity}*" for scenario in _PADDED for quantity in _ROUNDED),
        "padded prompts use fused attention, whose logits are within 2e-5 of the former; kept positions must agree",
    ),
)
"""Everything else must be equal, bit for bit."""

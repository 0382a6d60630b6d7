"""What may differ from a record of the tree before padded prompts, byte counts and growth were changed."""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """Patterns of "CASE FIELD" that may differ, and why."""

    patterns: tuple[str, ...]
    reason: str


_PADDED = ("turns", "rows", "beams", "ranks", "long")
_ROUNDED = ("logits", "keys", "values", "state", "codes", "tokens")
_SIZES = ("slots", "budget", "rows")

EXPECTED = (
    Expected(("*nbytes*", "*plan*"), "bytes on the host and the digest of masks count; reserves grow by an eighth"),
    Expected(("* at bytes*",), "a budget in bytes that counts these holds fewer tokens"),
    Expected(("* full *", "* full+kivi *"), "with other reserves, sums over the slots round differently"),
    Expected(
        tuple(f"* grows* *.{quantity}*" for quantity in _SIZES),
        "the reserve of a growing cache is part of its slots and of its budget",
    ),
    Expected(
        ("* grows+* *.kept*",),
        "with another budget, other tokens are coded or precise, and the next chunk attends to what was decoded",
    ),
    Expected(
        tuple(f"{scenario} * *.{quantity}*" for scenario in _PADDED for quantity in _ROUNDED),
        "padded prompts use fused attention, whose logits are within 2e-5 of the former; kept positions must agree",
    ),
    Expected(("* tova*+mikv *.rows*",), "the largest queries of a padded prompt, which MiKV holds, round likewise"),
    Expected(
        tuple(
            f"{scenario} * {dtype} * *.{moved}*"
            for scenario in _PADDED
            for dtype in ("bf16", "fp16")
            for moved in ("kept", "slots")
        ),
        "in half precision these logits round to neighbors, which swaps tokens of nearly equal priority",
    ),
    Expected(
        ("turns * *+mikv *.rows*", "turns * *+think *.rows*"),
        "scores are scaled within their product, so that the largest of them round differently",
    ),
    Expected(
        tuple(f"* *+tokenwise* *.{quantity}*" for quantity in _ROUNDED),
        "normalized keys are decoded with one rounding less; kept positions must agree",
    ),
)
"""Everything else must be equal, bit for bit."""

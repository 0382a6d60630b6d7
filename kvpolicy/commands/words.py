"""What the commands' arguments may be."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    return tuple(part.strip() for part in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no list of whole numbers such as 1,2,4") from None

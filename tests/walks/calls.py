"""Calls that are refused: by every cache, and by one that a forward was refused on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpolicy import PolicyCache

Calls = dict[str, Callable[[PolicyCache], Any]]
Tokens = Callable[[int, int], Tensor]
"""Makes the tokens of so many rows and columns."""


def impossible(model: Any, rows: int, tokens: Tokens, folder: Path) -> Calls:
    """What no cache of so many rows allows."""
    path = folder / "refused.safetensors"
    return {
        "choose no row": lambda cache: cache.batch_select_indices([]),
        "choose a row too many": lambda cache: cache.batch_select_indices([rows]),
        "fork a row too many": lambda cache: cache.fork([rows + 3]),
        "fork a flag": lambda cache: cache.fork([True]),
        "a policy of one's own": lambda cache: cache.fork(own="full"),
        "rollback too far": lambda cache: cache.rollback(99),
        "mark nothing": lambda cache: cache.mark(0),
        "crop to a length": lambda cache: cache.crop(3),
        "crop too far": lambda cache: cache.crop(-9999),
        "shift behind the end": lambda cache: cache.shift(9999, 1),
        "shift before the start": lambda cache: cache.shift(0, -1),
        "expect a negative number": lambda cache: cache.expect(None, -1),
        "expect a fraction": lambda cache: cache.expect(1.5, 2),  # pyright: ignore[reportArgumentType]
        "repeat rows never": lambda cache: cache.batch_repeat_interleave(0),
        "put": lambda cache: cache.put(0, cache),
        "drop": lambda cache: cache.drop(0),
        "ask for free rows": lambda cache: cache.free_rows(),
        "feed another number of rows": lambda cache: model(tokens(rows + 1, 2), cache=cache),
        "feed nothing": lambda cache: model(tokens(rows, 0), cache=cache),
        "save other tokens": lambda cache: cache.save(path, tokens=[[1, 2]]),
        "save in no form": lambda cache: cache.save(path, compress="nothing"),
    }


def interrupted(model: Any, rows: int, tokens: Tokens, folder: Path) -> Calls:
    """What a cache whose forward was refused in the middle does not allow before its reset."""
    path = folder / "interrupted.safetensors"
    return {
        "feed": lambda cache: model(tokens(rows, 3), cache=cache),
        "step": lambda cache: model(tokens(rows, 1), cache=cache),
        "generate": lambda cache: model.generate(tokens(rows, 9), cache=cache, max_new_tokens=2),
        "save": lambda cache: cache.save(path),
        "mark": lambda cache: cache.mark(2),
        "crop": lambda cache: cache.crop(-1),
        "shift": lambda cache: cache.shift(1, 1),
        "share": lambda cache: cache.fork(shared=True),
        "hold_next": lambda cache: cache.hold_next(),
    }

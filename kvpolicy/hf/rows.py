"""Rows of a cache that come and go, so that many answers are generated in one batch, each as if it were alone.

Such a cache has a fixed number of rows with room for a text of an announced length each. A step has one token for each
row; one for a free row is not written anywhere. See `Handle.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.layout import fix_addresses
from kvpolicy.engine.state import map_numbers
from kvpolicy.text.errors import KVPolicyError, KVPolicyStateError, KVPolicyTypeError
from kvpolicy.text.tables import shorten


class Rows:
    """The rows of a cache that come and go.

    Attributes:
        count: How many there are.
        length: The most tokens of a row, its prompt and what follows.
        new: The most tokens that follow a prompt; None if unknown.
        live: Which rows hold a text, on the host.
        on_device: The same, [B] bool, as steps read it; None before the first text.
    """

    def __init__(self, count: int, length: int, new: int | None) -> None:
        """Make free rows."""
        self.count = count
        self.length = length
        self.new = new
        self.clear()

    def clear(self) -> None:
        """Free every row."""
        self.live = [False] * self.count
        self.on_device: Tensor | None = None

    def set(self, row: int, *, is_live: bool) -> None:
        """Note that a row holds a text, or none."""
        assert self.on_device is not None, "the layers have slots"
        self.on_device[row] = is_live
        self.live[row] = is_live

    def leave_inference_mode(self) -> None:
        """Replace a tensor that was made in inference mode, which only inference mode may change."""
        if self.on_device is not None and self.on_device.is_inference():
            self.on_device = self.on_device.clone()
            fix_addresses([self.on_device])

    def valid(self) -> Tensor | None:
        """Which rows have a token in a step, [B, 1] bool; None if all have."""
        # A compiled step is one graph, whichever rows are free.
        if not torch.compiler.is_compiling() and all(self.live):
            return None
        assert self.on_device is not None, "a step has a row with a text"
        return self.on_device[:, None]

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat rows."""
        self.live = [bool(number) for number in map_numbers(fn, [int(is_live) for is_live in self.live])]
        self.count = len(self.live)
        self.on_device = None if self.on_device is None else fn(self.on_device)

    def check_row(self, row: Any, *, is_live: bool) -> int:
        """Refuse a number that is none of a row which holds a text, or of a free one.

        Raises:
            KVPolicyError: If there is no such row, or it holds something else.
        """
        most = self.count - 1
        if isinstance(row, bool) or not isinstance(row, Integral):
            raise KVPolicyTypeError(f"row must be an integer, got {shorten(repr(row))}; try 0.")
        row = int(row)
        if not 0 <= row <= most:
            raise KVPolicyError(f"row must be between 0 and {most}, got {row}; try one of free_rows().")
        if self.live[row] != is_live:
            raise KVPolicyError(
                f"row must hold a text to be dropped, got the free row {row}; try one that put() has filled."
                if is_live
                else f"row must be free to be filled, got {row}, which holds a text; try one of free_rows(), or drop()."
            )
        return row

    def check_step(self, tokens: Tensor, call: dict[str, Any]) -> None:
        """Refuse a forward that is no step of the rows.

        Args:
            tokens: Ids or embeddings, [B, P(, D)].
            call: The other arguments of the model.

        Raises:
            KVPolicyError: If it has another number of rows or tokens, or a mask or positions of its own.
            KVPolicyStateError: If every row is free.
        """
        if tuple(tokens.shape[:2]) != (self.count, 1):
            raise KVPolicyError(
                f"A step of rows that come and go must have one token for each of the {self.count} rows, got "
                f"{list(tokens.shape[:2])}; try a prompt on a kvpolicy.PolicyCache(model) of its own, and put() then."
            )
        for name in ("attention_mask", "position_ids"):
            if call.get(name) is not None:
                raise KVPolicyError(
                    f"{name} must be None in a step of rows that come and go, whose cache knows it, got a "
                    f"{type(call[name]).__name__}; try to pass input_ids and the cache alone."
                )
        if not any(self.live):
            raise KVPolicyStateError("A row must hold a text before a step, got free rows alone; try put() first.")


def refuse_rows(rows: Rows | None, what: str) -> None:
    """Refuse the call `what` on a cache whose rows come and go.

    Raises:
        KVPolicyStateError: If they do.
    """
    if rows is not None:
        raise KVPolicyStateError(
            f"{what} must be called on an ordinary cache, got one of handle.rows(), whose rows come and go; try it on "
            "the cache of a prompt, before put()."
        )


def given_rows(rows: Rows | None, what: str) -> Rows:
    """The rows of a cache, which must come and go for the call `what`.

    Raises:
        KVPolicyStateError: If they do not.
    """
    if rows is None:
        raise KVPolicyStateError(
            f"{what} must be called on a cache whose rows come and go, got an ordinary one; try handle.rows(8, 4096)."
        )
    return rows

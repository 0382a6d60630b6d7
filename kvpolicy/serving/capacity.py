"""How many requests are answered at a time, and the room that each has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpolicy.hf.division import division_of
from kvpolicy.hf.plan import plan
from kvpolicy.planning.result import CachePlan
from kvpolicy.policy import Policy
from kvpolicy.serving.requests import positions_of
from kvpolicy.text.budget import bytes_of
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import format_bytes

DEFAULT_QUEUE = 1024
"""The most answers that wait for a row; later ones are refused."""

DEFAULT_SHARE = 0.5
"""The part of the time that prompts may take while rows are in flight."""

MOST_ROWS = 1024
"""Rows that `--memory` alone gives at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """How many requests are answered at a time, and the room that each has.

    Attributes:
        rows: The number of rows; None for as many as fit into `memory`, or for one without that.
        length: The most tokens of a prompt and its answer with several rows; None for the positions of the model.
        memory: The most bytes of all rows, such as `4GiB`; None without a limit.
        share: The part of the time that prompts may take while rows are in flight.
        queue: The most answers that wait for a row.
    """

    rows: int | None = None
    length: int | None = None
    memory: str | None = None
    share: float = DEFAULT_SHARE
    queue: int = DEFAULT_QUEUE

    def __post_init__(self) -> None:
        """Check what is known before the model."""
        if self.memory is not None:
            memory_of("--memory", self.memory)
        if not 0 < self.share <= 1:
            raise KVPolicyError(f"--prefill-share must be above 0 and at most 1, got {self.share}; try 0.5.")

    def sizes(self, model: Any, policy: Policy) -> tuple[int, int | None]:
        """The number of rows, and the tokens for which each has room; None for one row, which is as large as it needs.

        Args:
            model: The model.
            policy: The policy.

        Raises:
            KVPolicyError: If the rows do not fit into the memory, or need a length.
        """
        if self.memory is None and self.rows in (None, 1):
            return 1, self.length
        length = self.length or positions_of(model)
        if length is None:
            raise KVPolicyError("--length must be given for this model, whose config has no limit; try --length 8192.")
        rows = self._fitting(model, policy, length) if self.rows is None else self.rows
        if self.memory is not None:
            self._check(model, policy, rows, length)
        return rows, length

    def _fitting(self, model: Any, policy: Policy, length: int) -> int:
        """The rows that fit into the memory; 1 at least, which is then refused."""
        assert self.memory is not None
        memory = bytes_of(self.memory)
        rows = min(max(memory // _plan(model, policy, 1, length).nbytes, 1), MOST_ROWS)
        # A few numbers are held once for all rows, so that more may fit than the bytes of one row alone say.
        while rows < MOST_ROWS and _plan(model, policy, rows + 1, length).nbytes <= memory:
            rows += 1
        return rows

    def _check(self, model: Any, policy: Policy, rows: int, length: int) -> None:
        assert self.memory is not None
        needed = _plan(model, policy, rows, length).nbytes
        if needed > bytes_of(self.memory):
            raise KVPolicyError(
                f"--memory must be enough for the cache of {rows} row{'' if rows == 1 else 's'} of {length:,} tokens, "
                f"{format_bytes(needed)} under {policy}, got {self.memory}; try a smaller --length or --rows, or a "
                "smaller budget."
            )


def memory_of(option: str, text: str) -> int:
    """The bytes that an option asks for.

    Args:
        option: Its name.
        text: Its value, such as `4GiB`.

    Raises:
        KVPolicyError: If it is not an amount of bytes.

    Examples:
        >>> memory_of("--memory", "2KiB")
        2048
    """
    try:
        return bytes_of(text)
    except KVPolicyError:
        raise KVPolicyError(f"{option} must be a number of bytes with a unit, got {text!r}; try 4GiB.") from None


def _plan(model: Any, policy: Policy, rows: int, length: int) -> CachePlan:
    """The plan of the cache of rows, on each rank of a model that transformers sharded."""
    size = division_of(model).size
    return plan(model, policy, batch=rows, prompt=length, tp=size, backend="hf" if size > 1 else None)

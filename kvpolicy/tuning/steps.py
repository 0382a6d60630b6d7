"""Results of a long run in a file, with which an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.json_lines import append_line, read_lines

DIGITS = 6
"""Significant digits of a number in a file; further ones differ between machines."""


class Steps:
    """Tensors by name, each computed once and noted in a file as soon as it is known.

    Args:
        file: The file: a digest of what must be the same, and one line for each tensor.
        facts: Facts that must be equal for a run to continue.

    Raises:
        KVPolicyError: If the file is of another run that has measured something.
    """

    def __init__(self, file: Path, facts: dict[str, Any]) -> None:
        """Read what is known."""
        self._file = file
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self._known: dict[str, Any] = {}
        try:
            found, *rows = read_lines(file, '"', '["') or [digest]
            self._known = dict(rows)
        except (ValueError, TypeError):
            found = None
        if isinstance(found, str) and len(found) == len(digest) and not self._known:
            # There is no file, or one of a run that was refused before it measured anything: nothing is lost.
            file.unlink(missing_ok=True)
            append_line(file, digest)
        elif found != digest:
            raise KVPolicyError(
                f"The unfinished run in {str(file)!r} must be of the same model, text and options, got another one; "
                "try to finish or to delete it."
            )

    def get(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """A tensor by its name, fp64, rounded as in the file; NaN and infinite numbers are NaN."""
        if name not in self._known:
            self._known[name] = rounded(compute())
            append_line(self._file, [name, self._known[name]])
        return _tensor(self._known[name])

    def clear(self) -> None:
        """Delete the file."""
        self._file.unlink(missing_ok=True)


def rounded(values: Tensor) -> Any:
    """The numbers of a tensor as nested lists, None for what is not finite."""
    if values.dim():
        return [rounded(value) for value in values]
    number = float(values)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def _tensor(values: Any) -> Tensor:
    def numbers(some: Any) -> Any:
        return [numbers(value) for value in some] if isinstance(some, list) else math.nan if some is None else some

    return torch.tensor(numbers(values), dtype=torch.float64, device="cpu")

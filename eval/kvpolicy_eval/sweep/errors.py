"""Errors of a cell, as they are recorded and shared between processes."""

from __future__ import annotations


class SharedError(RuntimeError):
    """An error of one of several processes, raised in all of them.

    Args:
        kind: Name of the original error's type.
        message: Its message.
    """

    def __init__(self, kind: str, message: str) -> None:
        """Store both."""
        super().__init__(message)
        self.kind = kind


def describe(error: BaseException) -> tuple[str, str]:
    """Name of an error's type, and its message on one line."""
    kind = error.kind if isinstance(error, SharedError) else type(error).__name__
    return kind, " ".join(str(error).split()) or kind

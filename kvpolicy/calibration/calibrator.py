"""The interface of calibrators, and how their options are declared.

Nothing here imports PyTorch before it runs: the help of the commands does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from typing import Any, ClassVar, Protocol

from kvpolicy.calibration.run import Run
from kvpolicy.text.errors import KVPolicyError


class Calibrator(Protocol):
    """Calibrates one part of a policy.

    The docstring of a class is the help of its command, and its `Attributes` are that of the options.

    Attributes:
        file: The kind of file that it writes, as `module:NAME`, or the method of a folder.
        use: A policy, a part of one, or a call that uses the file, which takes the place of the braces.
        writes: What is in the file, in words.
        length: Tokens of a window of text, if the user does not say.
        windows: Windows of text, if the user does not say.
    """

    __slots__ = ()

    file: ClassVar[str]
    use: ClassVar[str]
    writes: ClassVar[str] = "calibration"
    length: ClassVar[int] = 1024
    windows: ClassVar[int] = 64

    def made(self, run: Run) -> dict[str, Any]:
        """The facts of how the file is made: a finished file that says the same is replaced unasked.

        Raises:
            KVPolicyError: If the options do not fit the model, or the text is too short.
        """
        ...

    def fit(self, run: Run, made: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run the model: what the file holds, and what it says of it besides."""
        ...

    def finish(self, run: Run) -> None:
        """Clean up when the file is written."""

    def report(self, content: Any) -> Iterator[str]:
        """Lines that the command prints of the content; by default none."""
        return iter(())

    def spec(self, out: str) -> str:
        """See `use`."""
        return self.use.format(out)


def refuse_unused(calibrator: Any, names: Sequence[str], where: str) -> None:
    """Refuse options with another value than their default where they have no effect.

    Raises:
        KVPolicyError: If there is one.
    """
    defaults = {each.name: each.default for each in fields(calibrator)}
    for name in names:
        value = getattr(calibrator, name)
        if value != defaults[name]:
            raise KVPolicyError(
                f"--{name} must not be given with {where}, which does not use it, got {value}; remove it."
            )


def option(default: Any, *, least: int | None = None, names: Sequence[str] = ()) -> Any:
    """A field whose option has a least value, or other names."""
    return field(default=default, metadata={"least": least, "names": names})

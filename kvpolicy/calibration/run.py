"""The run of a calibrator: a model and a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvpolicy.text.errors import KVPolicyError

if TYPE_CHECKING:
    from torch import Tensor, nn

Item = TypeVar("Item")

MIN_TOKENS = 128
"""The minimum number of tokens: what fewer say does not hold for other text."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run of a calibrator.

    Attributes:
        model: The model.
        windows: Token ids, each [n].
        out: Where the file is written.
        identity: The description of the model in the file.
        progress: Whether to show progress bars.
        announce: Called with the seconds that a long run will take; None if nobody wants to know.
    """

    model: nn.Module
    windows: list[Tensor]
    out: Path
    identity: dict[str, Any]
    progress: bool = False
    announce: Callable[[float], object] | None = None

    def text(self, *, windows: bool = True) -> dict[str, Any]:
        """The facts of the text that a file says."""
        from kvpolicy.calibration.corpus import text_sha256

        return {"text_sha256": text_sha256(self.windows)} | ({"windows": len(self.windows)} if windows else {})

    def enough(self, purpose: str, more: str = "", tokens: int | None = None, skip: int = 0) -> int:
        """The number of tokens, of a sample of about `tokens` or of all windows, without the first `skip` of each.

        Raises:
            KVPolicyError: If there are too few for the purpose.
        """
        from kvpolicy.calibration.samples import tokens_per_window

        bodies = [ids[skip:] for ids in self.windows]
        count = sum(map(len, bodies) if tokens is None else tokens_per_window(bodies, tokens))
        if count < MIN_TOKENS:
            raise KVPolicyError(
                f"The tokens to {purpose} must be at least {MIN_TOKENS}, got {count}; try a longer text{more}."
            )
        return count

    def bar(self, items: Iterable[Item], what: str) -> Iterable[Item]:
        """The items with a progress bar."""
        from tqdm.auto import tqdm

        return tqdm(items, desc=what, disable=not self.progress)

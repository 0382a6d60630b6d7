"""Plain: tokens in full precision."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.protocols import Layout, ModelInfo, Stage, Traits
from kvpolicy.spec.arguments import named_options


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """Store every token in the dtype of the model.

    All slots belong to the full-precision buffer, so there is no encoded stage.

    Examples:
        >>> Plain().layout(100)
        Layout(exact=100, coded=())
    """

    @property
    def traits(self) -> Traits:
        """Nothing is encoded."""
        return Traits()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """No stages."""
        return ()

    def layout(self, tokens: int) -> Layout:
        """All slots are in full precision."""
        return Layout(tokens)

    def check(self, model: ModelInfo) -> None:
        """Every model is supported."""

"""StageStore tokens as they are."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.protocols import Layout, ModelInfo, Stage, Traits


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """StageStore every token in the model's own dtype.

    There is no coded part, so nothing is ever written or read here.

    Examples:
        >>> Plain().layout(100)
        Layout(exact=100, coded=())
    """

    @property
    def traits(self) -> Traits:
        """Nothing is coded."""
        return Traits()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """None."""
        return ()

    def layout(self, tokens: int) -> Layout:
        """All slots exact."""
        return Layout(tokens)

    def check(self, model: ModelInfo) -> None:
        """Any vector will do."""

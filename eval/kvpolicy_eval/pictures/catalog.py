"""All pictures by name."""

from __future__ import annotations

from kvpolicy_eval.pictures import allocators, codecs, head_allocators, mergers, plots, selectors
from kvpolicy_eval.pictures.style import Draw


def pictures() -> dict[str, Draw]:
    """Every picture, by the name of its file."""
    return (
        allocators.PICTURES
        | head_allocators.PICTURES
        | selectors.PICTURES
        | mergers.PICTURES
        | codecs.PICTURES
        | plots.PICTURES
    )

"""All pictures by name."""

from __future__ import annotations

from kvpolicy_eval.pictures import allocators, codecs, head_allocators, idea, mergers, peak, plots, readers, selectors
from kvpolicy_eval.pictures.style import Draw


def pictures() -> dict[str, Draw]:
    """Every picture, by the name of its file."""
    kinds = (peak, idea, allocators, head_allocators, selectors, mergers, codecs, readers, plots)
    return {name: draw for module in kinds for name, draw in module.PICTURES.items()}

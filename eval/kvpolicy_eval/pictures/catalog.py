"""All pictures by name."""

from __future__ import annotations

from kvpolicy_eval.pictures import allocators, codecs, plots, readers, selectors
from kvpolicy_eval.pictures.style import Draw


def pictures() -> dict[str, Draw]:
    """Every picture, by the name of its file."""
    return allocators.PICTURES | selectors.PICTURES | codecs.PICTURES | readers.PICTURES | plots.PICTURES

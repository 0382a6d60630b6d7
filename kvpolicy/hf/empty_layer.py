"""The layer of a cache that holds nothing, where a model's layer has neither attention nor a state."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils


class _NoSuchLayer:
    """Before transformers 5.23, such a layer has an empty state in a stock cache, so that no layer is of this class."""


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _NoSuchLayer)
"""The class of transformers."""

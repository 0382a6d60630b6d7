"""Plain: tokens in full precision."""

from __future__ import annotations

from kvpolicy.protocols import Codec
from kvpolicy.text.strategy import strategy


@strategy
class Plain(Codec):
    """Store every token in the dtype of the model.

    All slots belong to the full-precision buffer, so there is no encoded stage.

    Examples:
        >>> Plain().layout(100)
        Layout(exact=100, coded=())
    """

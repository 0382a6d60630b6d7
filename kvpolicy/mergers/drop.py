"""Drop: what is evicted is gone."""

from __future__ import annotations

from kvpolicy.protocols import Merger
from kvpolicy.text.strategy import strategy


@strategy
class Drop(Merger):
    """Drop every token that is not kept, and leave the others as they are.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("h2o@0.2").merger
        Drop()
        >>> str(Policy.parse("h2o+drop@0.2"))
        'h2o@0.2'
    """

"""Drop: what is evicted is gone."""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.protocols import Merger
from kvpolicy.text.arguments import named_options


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Drop(Merger):
    """Drop every token that is not kept, and leave the others as they are.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("h2o@0.2").merger
        Drop()
        >>> str(Policy.parse("h2o+drop@0.2"))
        'h2o@0.2'
    """

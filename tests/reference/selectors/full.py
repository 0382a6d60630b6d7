"""Everything: the budget of `full` is the whole length, at which every ranking keeps all tokens."""

from __future__ import annotations

from .window import DEFAULTS as DEFAULTS
from .window import priority as priority

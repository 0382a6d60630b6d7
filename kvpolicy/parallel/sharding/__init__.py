"""How a model is sharded over ranks: one table, from which plans count bytes and loaders fill parameters."""

from kvpolicy.parallel.sharding.families import FAMILIES, SUMMED, Family, check_family, check_heads
from kvpolicy.parallel.sharding.heads import Heads, aligned, even
from kvpolicy.parallel.sharding.parts import Part, Slot, kinds, slots

__all__ = [
    "FAMILIES",
    "SUMMED",
    "Family",
    "Heads",
    "Part",
    "Slot",
    "aligned",
    "check_family",
    "check_heads",
    "even",
    "kinds",
    "slots",
]

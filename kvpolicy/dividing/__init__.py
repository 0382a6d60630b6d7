"""How a model is divided over ranks: one table, which plans count with and loading fills from."""

from kvpolicy.dividing.families import FAMILIES, SUMMED, Family, check_family
from kvpolicy.dividing.heads import Heads, aligned, even
from kvpolicy.dividing.parts import Part, Slot, kinds, slots

__all__ = ["FAMILIES", "SUMMED", "Family", "Heads", "Part", "Slot", "aligned", "check_family", "even", "kinds", "slots"]

"""Pictures of codecs, drawn from keys and values of the embedded model as the codec reconstructs them."""

from __future__ import annotations

from kvpolicy_eval.pictures.codecs_grid import bfp, gear, kivi, tokenwise
from kvpolicy_eval.pictures.codecs_levels import csr, kvquant, rotate, turboquant
from kvpolicy_eval.pictures.codecs_tiers import mikv, plain, staircase, zipcache
from kvpolicy_eval.pictures.style import Draw

PICTURES: dict[str, Draw] = {
    "plain": plain,
    "tokenwise": tokenwise,
    "kivi": kivi,
    "gear": gear,
    "kvquant": kvquant,
    "rotate": rotate,
    "turboquant": turboquant,
    "bfp": bfp,
    "staircase": staircase,
    "csr": csr,
    "mikv": mikv,
    "zipcache": zipcache,
}
"""Pictures by the name of the codec."""

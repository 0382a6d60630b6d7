"""Largest values of numbers that a user gives; without PyTorch, so that the header of a file is read without it."""

from __future__ import annotations

MAX_FIELD = 2**31
"""Integer fields of a strategy are below this: PyTorch operators take no larger ones."""

MAX_SIZE = 2**40
"""The largest number of tokens, rows or ranks; larger ones would overflow when multiplied by the bytes of a layer."""

MAX_BYTES = 2**60
"""The most memory of a rank."""

LEAST_TOKENS = 1024
"""The least number of tokens that servers and `kvpolicy generate` give a budget that is a fraction without one."""

LEAST_TEMPERATURE = 1e-5
"""Servers and `kvpolicy generate` decode greedily below it: logits that are divided by less may be infinite."""

"""Versions of transformers that a policy can be attached with."""

from __future__ import annotations

import inspect
import re

import transformers
from torch import nn

from kvpolicy.hf.cache_names import NAMES
from kvpolicy.text.errors import KVPolicyError

OLDEST = (5, 18)
"""The oldest version that is tested; `pyproject.toml` has it too."""


def check_version() -> None:
    """Refuse a version of transformers that is too old.

    Raises:
        KVPolicyError: Naming the version.
    """
    found = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    if found < OLDEST:
        raise KVPolicyError(
            f"transformers must be {'.'.join(map(str, OLDEST))} or newer, got {transformers.__version__}; try pip "
            "install --upgrade transformers."
        )


def check_cache_name(decoder: nn.Module) -> None:
    """Refuse a decoder that takes its cache under an unknown name: its layers would never see the policy's cache.

    Raises:
        KVPolicyError: Naming the version, which may have renamed the argument.
    """
    names = inspect.signature(type(decoder).forward).parameters
    if not any(name in names for name in NAMES):
        raise KVPolicyError(
            f"The decoder must take its cache as {' or '.join(NAMES)}, got {type(decoder).__name__} of transformers "
            f"{transformers.__version__}, which does not; try an older transformers."
        )

"""Which calibration a saved cache was made with, as a hash of its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from kvpolicy.engine.state import tensors
from kvpolicy.hf.cache_forward import CacheForward
from kvpolicy.text.errors import KVPolicyError


def hash_calibrations(cache: CacheForward) -> str:
    """A hash of the calibrated tensors that the codes and scores of a cache were made with; empty if there are none."""
    found = hashlib.sha256()
    count = 0
    for layer in cache.policy_layers:
        for tensor in tensors(layer.store.contents.resident):
            # As bytes, since NumPy has no bfloat16.
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            count += 1
    return found.hexdigest() if count else ""


def check_calibrations(header: Mapping[str, Any], cache: CacheForward, what: str) -> None:
    """Refuse a file that was made with another calibration than a cache has.

    Args:
        header: The header of the file.
        cache: A cache whose layers have loaded theirs.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: If they differ.
    """
    if header["calibrations"] != hash_calibrations(cache):
        raise KVPolicyError(
            f"The cache file {what!r} must be loaded with the calibration that it was made with, got another one for "
            f"{cache.policy}; save the cache again."
        )

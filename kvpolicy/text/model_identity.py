"""Whether a file belongs to a model: by its sizes, and by a weight fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.errors import KVPolicyError

_MIN_SIMILARITY = 0.99
"""Cosine similarity of two weight fingerprints from which on they count as the same model's, fine-tuned or not."""

_DIFFERENCES = {"layers": "{} layers", "heads": "{} KV heads", "head_dim": "a head dimension of {}"}


def check_same_model(
    wanted: Mapping[str, Any],
    what: str,
    model: ModelInfo,
    *,
    exact: bool = False,
    remedy: str = "try kvpolicy calibrate on this model",
) -> None:
    """Refuse a model that a file was not made for.

    Args:
        wanted: The model of the file: `name`, `type`, `layers`, `heads`, `head_dim` and `weights`, the weight
            fingerprint of 64 numbers, or None. A size that is missing is not compared.
        what: Name of the file, for the message.
        model: The model to check.
        exact: Whether a fine-tuned model counts as another one.
        remedy: Advice for the user, for the message.

    Raises:
        KVPolicyError: If the sizes or the weights differ.
    """
    for field, words in _DIFFERENCES.items():
        actual = getattr(model, field)
        if wanted.get(field, actual) != actual:
            raise _other_model(what, wanted, f"with {words.format(wanted[field])} instead of {actual}", remedy)
    fingerprint = wanted.get("weights")
    if model.weights is not None and fingerprint is not None and not _is_same(fingerprint, model.weights, exact):
        raise _other_model(what, wanted, "whose weights differ", remedy)


def _is_same(stored: list[float], weights: Tensor, exact: bool) -> bool:
    """Whether two weight fingerprints are of the same model; not if one has another length or contains NaN."""
    if exact:
        return stored == weights.tolist()
    ours = torch.tensor(stored, dtype=torch.float64, device="cpu")
    theirs = weights.detach().double().cpu().flatten()
    return len(ours) == len(theirs) and bool(torch.cosine_similarity(ours, theirs, dim=0) >= _MIN_SIMILARITY)


def _other_model(what: str, wanted: Mapping[str, Any], difference: str, remedy: str) -> KVPolicyError:
    return KVPolicyError(
        f"{what} must be for this model, got one that was made for another model "
        f"({wanted.get('type')} {wanted.get('name')!r}, {difference}); {remedy}."
    )

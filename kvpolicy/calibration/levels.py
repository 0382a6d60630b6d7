"""Calibrate KVQuant for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import Samples, collect, tokens_per_window
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.kvquant import fit_kvquant
from kvpolicy.codecs import _files
from kvpolicy.hf.identity import identity
from kvpolicy.text.errors import KVPolicyError

MIN_TOKENS = 128
"""The minimum number of tokens: ranges fitted to fewer do not cover other text."""


def calibrate_kvquant(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    bits: Sequence[int] = (2, 3, 4),
    outliers: float = 0.01,
    tokens: int = 16_384,
    fisher: bool = True,
    seed: int = 0,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Fit the ranges and levels of KVQuant to the keys and values of a model, and write them to a folder.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        bits: The bits per code to fit levels for.
        outliers: Fraction of the elements of a vector that are stored in full, as in `KVQuant`.
        tokens: About how many tokens are sampled.
        fisher: Whether errors are weighted by the squared gradient of the loss, as in the paper, or equally.
        seed: Seed of the sample.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, the text is too short, or `out` holds another calibration.
    """
    windows = as_windows(windows)
    count = sum(tokens_per_window(windows, tokens))
    _check(bits, outliers, count)
    facts = identity(model, name)
    meta = {
        "model": facts,
        "head_dim": facts["head_dim"],
        "text_sha256": text_sha256(windows),
        "bits": list(bits),
        "outliers": outliers,
        "fisher": fisher,
        "tokens": count,
        "seed": seed,
    }
    _files.folder_of("kvquant").check_free(out, _files.CalibrationFile(meta, {}), force=force)
    samples = collect(
        model, windows, tokens=tokens, key_spaces=("unrotated",), fisher=fisher, seed=seed, progress=progress
    )
    _files.save(out, "kvquant", meta, _fitted(samples, tuple(bits), outliers, progress))
    return meta


def _check(bits: Sequence[int], outliers: float, count: int) -> None:
    """Raise KVPolicyError if levels cannot be fitted with these options, or to so few tokens."""
    if not bits or set(bits) - {1, 2, 3, 4, 5, 6, 7, 8}:
        raise KVPolicyError(
            f"The bits must be one or several of 1 to 8, got {','.join(map(str, bits)) or 'none'}; try 2,3,4."
        )
    if not 0 <= outliers < 1:
        raise KVPolicyError(f"The fraction of outliers must be at least 0 and less than 1, got {outliers}; try 0.01.")
    if count < MIN_TOKENS:
        raise KVPolicyError(
            f"The tokens to fit KVQuant's ranges to must be at least {MIN_TOKENS}, got {count}; try a longer text, or "
            "more tokens of it."
        )


def _fitted(samples: Samples, bits: tuple[int, ...], outliers: float, progress: bool) -> dict[str, Tensor]:
    """The tensors of all layers, by their names in the file."""
    tensors: dict[str, Tensor] = {}
    for layer, keys in tqdm(samples.unrotated.items(), desc="fit", disable=not progress):
        weights = samples.fisher.get(layer)
        fitted = fit_kvquant(keys, samples.values[layer], bits=bits, weights=weights, outliers=outliers)
        tensors |= {f"{key}.{layer}": tensor for key, tensor in fitted.items()}
    return tensors

"""Fit what KVQuant must know of each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import Samples, collect, shares
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.finished import check_free
from kvpolicy.calibration.identity import identity
from kvpolicy.calibration.kvquant import fit_kvquant
from kvpolicy.codecs import _files
from kvpolicy.spec.errors import KVPolicyError

LEAST = 128
"""The fewest tokens: of fewer, a channel's range is set by a handful, and other text lies outside of it."""


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
    """Fit KVQuant's ranges and levels to a model's keys and values, and write them to a folder.

    Args:
        model: A causal language model that no policy is attached to.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        bits: For which widths of codes.
        outliers: Share of numbers that will be kept exact, as in `KVQuant`.
        tokens: About how many tokens' vectors are looked at.
        fisher: Whether a number's error matters by the squared gradient of the loss, as in the paper; else all alike.
        seed: Of the draw of tokens.
        name: What to call the model.
        progress: Whether to show a bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        What was written beside the tensors.

    Raises:
        KVPolicyTypeError: Where the windows are no token ids.
        KVPolicyError: Where the model is not supported, the text too short, or `out` holds another one.
    """
    windows = as_windows(windows)
    count = sum(shares(windows, tokens))
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
    if not force:
        check_free(out, "kvquant", meta)
    samples = collect(model, windows, tokens=tokens, frames=("pre",), fisher=fisher, seed=seed, progress=progress)
    _files.save(out, "kvquant", meta, _fitted(samples, tuple(bits), outliers, progress))
    return meta


def _check(bits: Sequence[int], outliers: float, count: int) -> None:
    """Refuse options, and a count of tokens, that nothing can be fitted with."""
    if not bits or set(bits) - {1, 2, 3, 4, 5, 6, 7, 8}:
        raise KVPolicyError(
            f"The bits {','.join(map(str, bits))} cannot be fitted: give some of 1 to 8, such as 2,3,4."
        )
    if not 0 <= outliers < 1:
        raise KVPolicyError(f"The share of outliers is {outliers}: give at least 0 and less than 1.")
    if count < LEAST:
        raise KVPolicyError(
            f"There are {count} tokens to fit KVQuant's ranges to, and at least {LEAST} are needed: give a longer "
            "text, or more tokens of it."
        )


def _fitted(samples: Samples, bits: tuple[int, ...], outliers: float, progress: bool) -> dict[str, Tensor]:
    """Every layer's tensors, as the file has them."""
    tensors: dict[str, Tensor] = {}
    for layer, keys in tqdm(samples.pre.items(), desc="fit", disable=not progress):
        weights = samples.fisher.get(layer)
        fitted = fit_kvquant(keys, samples.values[layer], bits=bits, weights=weights, outliers=outliers)
        tensors |= {f"{key}.{layer}": tensor for key, tensor in fitted.items()}
    return tensors

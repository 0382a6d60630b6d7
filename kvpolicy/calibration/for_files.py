"""A function for the calibration of cache files, with its options as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvpolicy.calibration.calibrators import TransformCalibrator
from kvpolicy.calibration.driver import calibrate


def calibrate_kvtc(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    ratios: Sequence[int] = (4, 8, 16, 32),
    layers: int = 1,
    tokens: int = 8_192,
    seed: int = 0,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Find the principal components of a model's keys and values, and write them to a folder for KVTC's cache files.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder, which `cache.save(path, compress="kvtc:calibration=DIR:ratio=16")` reads.
        ratios: 16 bits over the mean bits of a number: which of them files may have.
        layers: Neighboring layers that have components together, if all of their heads hold the same tokens.
        tokens: About how many tokens are sampled, equally from all windows, without the first four of each. Their keys
            and values in all layers are held at once, as fp32.
        seed: Seed of the sample.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, has latent attention or a rotary embedding
            that cannot be undone, or produces numbers that are not finite; an option is out of range; the text is too
            short; or `out` holds another calibration.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     meta = calibrate_kvtc(kvpolicy.tiny()[0], [torch.arange(3, 140)], folder, ratios=[16])
        >>> meta["tokens"], meta["ratios"], len(meta["spans"])
        (133, [16], 8)
    """
    calibrator = TransformCalibrator(ratios=tuple(ratios), layers=layers, tokens=tokens, seed=seed)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force).meta

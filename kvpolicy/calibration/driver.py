"""The one way in which parts are calibrated."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvpolicy.calibration.calibrator import Calibrator
from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.suitable import check_tokens, check_weights
from kvpolicy.codecs._files import folder_of
from kvpolicy.hf.identity import identity
from kvpolicy.text.model_file import CalibrationKind


def calibrate(
    calibrator: Calibrator,
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    name: str | None = None,
    progress: bool = False,
    announce: Callable[[float], object] | None = None,
    force: bool = False,
) -> Any:
    """Calibrate a part for a model, and write what was found to a file.

    Args:
        calibrator: The part, and how it is calibrated.
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        out: The file, or the folder.
        name: Name of the model in the file.
        progress: Whether to show progress bars.
        announce: Called with the seconds that a long run will take, when nothing refuses it any more.
        force: Whether to replace what holds something else.

    Returns:
        The content of the file.
    """
    out = Path(os.path.expanduser(out))
    windows = as_windows(windows)
    check_weights(model)
    check_tokens(model, windows)
    run = Run(
        model=model,
        windows=windows,
        out=out,
        identity=identity(model, name),
        progress=progress,
        announce=announce,
    )
    kind = kind_of(calibrator)
    made = calibrator.made(run)
    # A finished calibration is refused before the model runs, which takes long.
    kind.check_free(out, kind.content(None, run.identity, made), force=force)
    found, more = calibrator.fit(run, made)
    content = kind.content(found, run.identity, made | more)
    kind.save(out, content)
    calibrator.finish(run)
    return content


def kind_of(calibrator: Calibrator) -> CalibrationKind[Any]:
    """The kind of file that a calibrator writes."""
    module, _, name = calibrator.file.partition(":")
    return getattr(importlib.import_module(module), name) if name else folder_of(module)

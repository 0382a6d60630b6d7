"""Measure what candidates do to each layer of a model, and write it to a file that `tuned:file=FILE` reads."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvpolicy.hf.identity import identity, model_info
from kvpolicy.planning.curves import Curves, save_curves
from kvpolicy.policy import Policy
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.tuning.grid import default_grid
from kvpolicy.tuning.measure import layer_kls, output_errors, sensitivities
from kvpolicy.tuning.windows import Window, windows_sha256

Measure = Literal["output", "kl"]
"""What a distortion is: the error of a layer's attention output, or the KL divergence of the predictions."""

DIGITS = 6
"""Significant digits of a number in a file; further ones differ between machines."""


def tune(
    model: nn.Module,
    windows: Sequence[Window],
    out: str | Path,
    *,
    candidates: Sequence[Policy | str] | None = None,
    measure: Measure = "output",
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Curves:
    """Measure the distortion of each candidate in each layer, and write the curves to a file.

    The curves are means over windows. With `measure="output"`, the distortion of a window is the relative squared error
    of the layer's attention output times what such an error in this layer does to the predictions. With
    `measure="kl"`, it is the KL divergence of the predictions when this layer alone is compressed, which takes a
    forward of the answer for each layer and candidate.

    An interrupted run continues where it was: finished windows are in `OUT.unfinished` until the last one is done.

    Args:
        model: A causal language model without a policy attached.
        windows: Texts, of which the policy should keep what their answers need.
        out: The file.
        candidates: Policies with fractions of the prompt as budgets; `default_grid()` by default.
        measure: What a distortion is.
        name: Name of the model in the file.
        progress: Called after each window with how many are done, and how many there are.

    Returns:
        What was written.

    Raises:
        KVPolicyError: If the model, a window or a candidate cannot be measured, or unfinished work is of another run.

    Examples:
        >>> import os, tempfile, torch, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> window = Window(torch.arange(3, 60), torch.arange(3, 9))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "plan.json")
        ...     curves = tune(model, [window], file, candidates=["window@0.2", "window@0.5"])
        ...     with kvpolicy.attach(model, f"tuned:file={file}@0.4") as handle:
        ...         len(handle.policy.layers)
        8
    """
    if measure not in ("output", "kl"):
        raise KVPolicyError(f"measure must be output or kl, got {measure!r}.")
    policies = default_grid() if candidates is None else [Policy.of(candidate) for candidate in candidates]
    info = model_info(model)
    own = identity(model, name, info)
    facts = {
        "model": {key: value for key, value in own.items() if key != "name"},
        "text": windows_sha256(windows),
        "measure": measure,
        "candidates": [policy.to_dict() for policy in policies],
    }
    rows = _measured(model, windows, policies, measure, Path(f"{out}.unfinished"), facts, progress)
    mean, spread = _statistics(rows)
    curves = Curves(
        model=own,
        text={
            "sha256": facts["text"],
            "windows": len(windows),
            "prompt": sum(len(window.prompt) for window in windows) / len(windows),
            "new": sum(len(window.follow) for window in windows) / len(windows),
            "versions": {package: version(package) for package in ("torch", "transformers")},
        },
        measure=measure,
        layers=info.indices,
        depth=info.depth,
        candidates=tuple(policies),
        distortion=mean,
        spread=spread,
    )
    save_curves(out, curves)
    Path(f"{out}.unfinished").unlink(missing_ok=True)
    return curves


def estimate(model: nn.Module, windows: Sequence[Window], candidates: Sequence[Policy], measure: Measure) -> float:
    """Seconds that `tune` will take, from one window with few candidates, after one to warm up.

    The time grows with windows, layers and candidates; what a window takes without candidates is counted once.
    """
    few = [candidates[0]]
    many = list(candidates[:: max(len(candidates) // 6, 1)])
    window = windows[:1]
    _distortion(model, window, few, measure, 0)
    seconds: list[float] = []
    for some in (few, many):
        start = time.perf_counter()
        _distortion(model, window, some, measure, 0)
        seconds.append(time.perf_counter() - start)
    each = max(seconds[1] - seconds[0], 0.0) / max(len(many) - 1, 1)
    return len(windows) * (seconds[0] + each * (len(candidates) - 1))


def _measured(
    model: nn.Module,
    windows: Sequence[Window],
    policies: Sequence[Policy],
    measure: Measure,
    unfinished: Path,
    facts: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> Tensor:
    """The distortion of each window, layer and candidate, [W, L, C]; finished windows are read from a file."""
    rows = _resume(unfinished, facts)
    for number, window in enumerate(windows):
        if number >= len(rows):
            rows.append(_distortion(model, [window], policies, measure, number))
            with unfinished.open("a", encoding="utf-8") as file:
                file.write(json.dumps([[_number(x) for x in row] for row in rows[-1].tolist()]) + "\n")
        if progress is not None:
            progress(number + 1, len(windows))
    return torch.stack(rows)


def _distortion(
    model: nn.Module, windows: Sequence[Window], policies: Sequence[Policy], measure: Measure, seed: int
) -> Tensor:
    """The distortion of one window, [L, C] fp64; NaN where a candidate cannot be used."""
    if measure == "kl":
        return layer_kls(model, windows, policies)[0]
    return output_errors(model, windows, policies)[0] * sensitivities(model, windows, seed=seed)[0][:, None]


def _resume(unfinished: Path, facts: dict[str, Any]) -> list[Tensor]:
    """The windows that an interrupted run has measured; begins a new file if there was none."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    if not unfinished.exists():
        unfinished.write_text(json.dumps(digest) + "\n", encoding="utf-8")
        return []
    # What was cut off while it was written is measured again.
    whole = [line for line in unfinished.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    try:
        found, *rows = [json.loads(line) for line in whole]
    except ValueError:
        found, rows = None, []
    if found != digest:
        raise KVPolicyError(
            f"The unfinished tuning in {str(unfinished)!r} must be of the same model, text and options, got another "
            "one; try to finish or to delete it."
        )
    unfinished.write_text("".join(whole), encoding="utf-8")
    return [torch.tensor([[math.nan if x is None else x for x in row] for row in table]) for table in rows]


def _statistics(rows: Tensor) -> tuple[list[list[float | None]], list[list[float | None]]]:
    """Mean and standard error over windows; None where a candidate could not be used in each of them."""
    rows = rows.double()
    mean = rows.mean(0)
    spread = rows.std(0, unbiased=True) / len(rows) ** 0.5 if len(rows) > 1 else mean.where(mean.isnan(), 0.0)
    mean_table, spread_table = ([[_number(x) for x in row] for row in table.tolist()] for table in (mean, spread))
    return mean_table, spread_table


def _number(value: float) -> float | None:
    """A number as a file has it."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None

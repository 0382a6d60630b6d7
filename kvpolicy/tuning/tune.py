"""Measure what candidates do to each layer of a model, and write it to a file that `tuned:file=FILE` reads."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.calibration.suitable import check_measurable, check_tokens, check_weights
from kvpolicy.hf.identity import identity, model_info
from kvpolicy.hf.model_spec import describe
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.planning.curves import MEASURES, Curves, Measure, load_tuned, save_curves
from kvpolicy.planning.tuned import lengths, managed_limit, solve
from kvpolicy.policy import Policy, TunedPolicy
from kvpolicy.policy.tuned import TunedFile
from kvpolicy.text.budget import Budget
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.model_file import REMEDY, SAME, without_name
from kvpolicy.text.output import check_is_file, refuse_other
from kvpolicy.text.version import __version__
from kvpolicy.tuning.candidates import check_candidates
from kvpolicy.tuning.evidence import check_windows
from kvpolicy.tuning.grid import default_grid
from kvpolicy.tuning.measure import Progress, kls, layer_kls, output_errors, sensitivities
from kvpolicy.tuning.steps import DIGITS, Steps, rounded
from kvpolicy.tuning.windows import Window, windows_sha256

_ROUNDING = 1e-5


def tune(
    model: nn.Module,
    windows: Sequence[Window],
    out: str | Path,
    *,
    candidates: Sequence[Policy | str] | None = None,
    measure: Measure = "joint",
    name: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
    tile: TileSize = None,
) -> Curves:
    """Measure the distortion of each candidate in each layer, and write the curves to a file.

    A distortion is a mean over windows, of one of three kinds. `kl`: the KL divergence of the predictions if this layer
    alone is compressed. `joint`: the same times `interaction`, what the candidate does in all layers at once relative
    to the sum over layers, since layers that can stand in for one another show nothing alone. `output`: the relative
    squared error of the layer's attention output, times what noise of that size there does to the predictions. Queries,
    keys and values of a prompt are held in all layers: with `tile` in the memory of the host, and those of one layer at
    a time on the device.

    An interrupted run continues where it was: what is done is in `OUT.unfinished` until all is. A file that is finished
    already is returned as it is.

    Args:
        model: A causal language model without a policy attached.
        windows: Texts, of which the policy should keep what their answers need.
        out: The file.
        candidates: Policies with fractions of the prompt as budgets; `default_grid()` by default.
        measure: Definition of a distortion.
        name: Name of the model in the file.
        progress: Called after each window.
        force: Whether to replace a file that holds something else: another model, text or other options.
        tile: The most tokens of a prompt that a layer takes at a time, as for `attach`.

    Returns:
        The content of the file.

    Raises:
        KVPolicyError: If the model, a window or a candidate cannot be measured, or `out` or unfinished work is of
            another run.

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
    if measure not in MEASURES:
        raise KVPolicyError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}; try joint.")
    info = model_info(model)
    # What no run could measure is refused before a file is written.
    check_weights(model)
    check_measurable(model)
    check_windows(windows)
    check_tokens(model, [part for window in windows for part in window])
    policies = check_candidates(default_grid() if candidates is None else candidates, info)
    out = Path(os.path.expanduser(out))
    own = identity(model, name, info)
    text = windows_sha256(windows)
    facts = {
        "kvpolicy": __version__,
        "model": without_name(own),
        "text": text,
        "measure": measure,
        "candidates": [policy.to_dict() for policy in policies],
    }
    # A finished file of the same run is the result; one of another run is refused before the model runs.
    check_is_file(out)
    finished = None if force else _finished(out, facts)
    if finished is not None:
        return finished
    # Each window is noted as soon as it is measured, so that an interrupted run continues behind it.
    steps = Steps(Path(f"{out}.unfinished"), facts)
    rows: list[Tensor] = []
    for number, window in enumerate(windows):
        rows.append(
            steps.get(f"window {number}", functools.partial(_measured, model, window, policies, measure, number, tile))
        )
        if progress is not None:
            progress(number + 1, len(windows))
    # One number for each layer and candidate: the mean over windows, with its standard error.
    mean, spread = _statistics(torch.stack(rows), measure)
    curves = Curves(
        model=own,
        text=_text_facts(windows, text),
        measure=measure,
        layers=info.indices,
        depth=info.depth,
        candidates=tuple(policies),
        distortion=mean,
        spread=spread,
    )
    save_curves(out, curves)
    steps.clear()
    return curves


def check_budget(model: nn.Module, windows: Sequence[Window], candidates: Sequence[Policy], budget: Budget) -> None:
    """Refuse a budget that no policy of these candidates fits, before anything is measured.

    Raises:
        KVPolicyError: Naming what they need at least; or if the model or a candidate cannot be measured.
    """
    check_measurable(model)
    shape = describe(model.config, getattr(model, "dtype", None))  # pyright: ignore[reportArgumentType]
    info = shape.info()
    policies = tuple(check_candidates(candidates, info))
    unknown = [[0.0] * len(policies)] * len(info.indices)
    curves = Curves(
        model={},
        text=_text_facts(windows, ""),
        measure="joint",
        layers=info.indices,
        depth=info.depth,
        candidates=policies,
        distortion=unknown,
        spread=unknown,
    )
    policy = TunedPolicy(TunedFile(file="-"), budget)
    limit = managed_limit(curves, policy, shape.shape, lambda columns: sum(shape.unmanaged_bytes(1, columns).values()))
    solve(curves, shape.shape, *lengths(curves, policy), limit)


def _text_facts(windows: Sequence[Window], sha256: str) -> dict[str, Any]:
    """What the file says of the text that was measured on: means over windows, and versions."""
    return {
        "sha256": sha256,
        "windows": len(windows),
        "prompt": sum(len(window.prompt) for window in windows) / len(windows),
        "new": sum(len(window.follow) for window in windows) / len(windows),
        "versions": {package: version(package) for package in ("torch", "transformers")},
    }


def _finished(out: Path, facts: dict[str, Any]) -> Curves | None:
    """The curves of a finished file with the same facts; None if the file does not exist.

    Raises:
        KVPolicyError: If the file has other content.
    """
    if not out.exists():
        return None
    try:
        found = load_tuned(str(out))
    except KVPolicyError:
        found = None
    if isinstance(found, Curves):
        theirs = {
            "model": without_name(found.model),
            "text": found.text.get("sha256"),
            "measure": found.measure,
            "candidates": [policy.to_dict() for policy in found.candidates],
        }
        if theirs == {name: facts[name] for name in theirs}:
            return found
    refuse_other(out, SAME.format("tuning"), REMEDY)


def estimate(
    model: nn.Module,
    windows: Sequence[Window],
    candidates: Sequence[Policy],
    measure: Measure,
    tile: TileSize = None,
) -> float:
    """Seconds that `tune` will take, from a part of what it does with one window.

    The time grows with windows, and with layers times candidates.
    """
    # A replay of the prompt serves all candidates that need it, and is no cost of each.
    few = list({candidate.replay: candidate for candidate in candidates}.values())
    many = [*few, *candidates[:: max(len(candidates) // 6, 1)]]
    _measured(model, windows[0], few, measure, 0, tile)
    seconds: list[float] = []
    for some in (few, many):
        start = time.perf_counter()
        _measured(model, windows[0], some, measure, 0, tile)
        seconds.append(time.perf_counter() - start)
    each = max(seconds[1] - seconds[0], 0.0) / (len(many) - len(few))
    return len(windows) * (seconds[0] + each * max(len(candidates) - len(few), 0))


def _measured(
    model: nn.Module, window: Window, policies: Sequence[Policy], measure: Measure, seed: int, tile: TileSize
) -> Tensor:
    """The distortion of each candidate in one window, NaN where the candidate cannot be used.

    Returns:
        The distortion of each layer, [L, C] fp64; of `joint`, [1 + L, C], where the first row is that of all layers.
    """
    if measure == "output":
        noise = sensitivities(model, [window], seed=seed, tile=tile)[0]
        return output_errors(model, [window], policies, tile=tile)[0] * noise[:, None]
    return (layer_kls if measure == "kl" else kls)(model, [window], policies, tile=tile)[0]


def _statistics(rows: Tensor, measure: Measure) -> tuple[Any, Any]:
    """Mean and standard error over windows [W, L, C] as a file has them."""
    # NaN in one window makes the mean NaN: a candidate must be large enough for every prompt.
    mean = rows.mean(0)
    spread = rows.std(0) / len(rows) ** 0.5 if len(rows) > 1 else mean.where(mean.isnan(), 0.0)
    if measure == "joint":
        factor = interaction(mean[0], mean[1:])
        mean = mean[1:] * factor
        spread = spread[1:] * factor
    return rounded(mean), rounded(spread)


def interaction(together: Tensor, alone: Tensor) -> Tensor:
    """How much more all layers do together than the sum of each alone, at least 1.

    A model that can read a fact in several layers loses little with any of them, and all with all of them. With this
    factor, the distortions of a candidate in all layers add up to what it does in all layers.

    Args:
        together: The distortion of each candidate in all layers at once, [C].
        alone: That of each layer alone, [L, C].

    Returns:
        [C] fp64.

    Examples:
        >>> interaction(torch.tensor([0.6, 0.1]), torch.tensor([[0.1, 0.1], [0.1, 0.1]])).round(decimals=2).tolist()
        [3.0, 1.0]
    """
    # Divergences below a hundred-thousandth of a nat are rounding.
    return ((together.double() + _ROUNDING) / (alone.double().sum(0) + _ROUNDING)).clamp_min(1.0).round(decimals=DIGITS)

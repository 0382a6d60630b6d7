"""Measure what candidates do to each layer of a model, and write it to a file that `tuned:file=FILE` reads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.hf.identity import identity, model_info
from kvpolicy.hf.model_spec import describe
from kvpolicy.planning.curves import Curves, Table, save_curves
from kvpolicy.planning.tuned import groups, layer_nbytes
from kvpolicy.policy import Policy
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.version import __version__
from kvpolicy.tuning.candidates import check_candidates
from kvpolicy.tuning.compression import Compressor
from kvpolicy.tuning.grid import default_grid
from kvpolicy.tuning.joint import JointWindow
from kvpolicy.tuning.measure import layer_kls, output_errors, sensitivities
from kvpolicy.tuning.steps import Steps, rounded
from kvpolicy.tuning.tap import tapped
from kvpolicy.tuning.windows import Window, windows_sha256

Measure = Literal["joint", "kl", "output"]
"""What a distortion is; see `tune`."""

MEASURES: tuple[Measure, ...] = ("joint", "kl", "output")

LEVELS = (0.04, 0.1, 0.25)
"""Shares of the full cache's bytes at which all layers are compressed while one is varied."""

HOPELESS = 4.0
"""A group of candidates whose base is worse than the best one's by this factor is not measured at that level."""

Progress = Callable[[int, int], None]
"""Called with how many steps are done, and how many there are."""


def tune(
    model: nn.Module,
    windows: Sequence[Window],
    out: str | Path,
    *,
    candidates: Sequence[Policy | str] | None = None,
    measure: Measure = "joint",
    name: str | None = None,
    progress: Progress | None = None,
) -> Curves:
    """Measure the distortion of each candidate in each layer, and write the curves to a file.

    A distortion is a mean over windows, of one of three kinds. `joint`: all layers are compressed under the candidate
    that does best in all of them at about the same bytes, one layer is given another candidate, and the distortion is
    the KL divergence of the predictions. Layers that can stand in for one another are seen so, which no layer shows
    alone. There is a table for each of a few sizes. `kl`: the same with all other layers full. `output`: the relative
    squared error of the layer's attention output, times what noise of that size there does to the predictions; it needs
    the memory of one more layer, the others that of queries, keys and values of a prompt in all layers.

    An interrupted run continues where it was: what is done is in `OUT.unfinished` until all is.

    Args:
        model: A causal language model without a policy attached.
        windows: Texts, of which the policy should keep what their answers need.
        out: The file.
        candidates: Policies with fractions of the prompt as budgets; `default_grid()` by default.
        measure: What a distortion is.
        name: Name of the model in the file.
        progress: Called after each step.

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
    if measure not in MEASURES:
        raise KVPolicyError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}; try joint.")
    policies = default_grid() if candidates is None else [Policy.of(candidate) for candidate in candidates]
    info = model_info(model)
    own = identity(model, name, info)
    text = windows_sha256(windows)
    facts = {
        "kvpolicy": __version__,
        "model": {key: value for key, value in own.items() if key != "name"},
        "text": text,
        "measure": measure,
        "candidates": [policy.to_dict() for policy in policies],
    }
    steps = Steps(Path(f"{out}.unfinished"), facts)
    if measure == "joint":
        tables = _joint_tables(model, windows, policies, steps, progress)
    else:
        tables = _single_tables(model, windows, policies, measure, steps, progress)
    curves = Curves(
        model=own,
        text={
            "sha256": text,
            "windows": len(windows),
            "prompt": sum(len(window.prompt) for window in windows) / len(windows),
            "new": sum(len(window.follow) for window in windows) / len(windows),
            "versions": {package: version(package) for package in ("torch", "transformers")},
        },
        measure=measure,
        layers=info.indices,
        depth=info.depth,
        candidates=tuple(policies),
        tables=tuple(tables),
    )
    save_curves(out, curves)
    steps.clear()
    return curves


def estimate(model: nn.Module, windows: Sequence[Window], candidates: Sequence[Policy], measure: Measure) -> float:
    """Seconds that `tune` will take, from a part of what it does with one window.

    The time grows with windows, and with layers times candidates; of `joint`, with the number of its tables.
    """
    window = windows[0]
    if measure == "joint":
        with tapped(model) as tap:
            few = list(range(0, len(candidates), max(len(candidates) // 4, 1)))[:4]
            compressor = Compressor(tap, check_candidates(candidates, tap.attachment.info))
            start = time.perf_counter()
            joint = JointWindow(tap, compressor, window)
            made = time.perf_counter()
            joint.kls([[number] * len(tap.layers) for number in few])
            compared = time.perf_counter()
            usable = [number for number in few if joint.usable(number)]
            joint.exchanges([usable[-1]] * len(tap.layers), usable)
            end = time.perf_counter()
            tables = len(LEVELS) * len(groups(candidates))
            each = (compared - made) / len(few) + tables / len(groups(candidates)) * (end - compared) / len(usable)
            return len(windows) * (2 * (made - start) + each * len(candidates))
    few, many = [candidates[0]], list(candidates[:: max(len(candidates) // 6, 1)])
    _single(model, window, few, measure, 0)
    seconds: list[float] = []
    for some in (few, many):
        start = time.perf_counter()
        _single(model, window, some, measure, 0)
        seconds.append(time.perf_counter() - start)
    each = max(seconds[1] - seconds[0], 0.0) / max(len(many) - 1, 1)
    return len(windows) * (seconds[0] + each * (len(candidates) - 1))


class _Base(NamedTuple):
    """A candidate that all layers have, while one of them has each member of its group in turn."""

    candidate: int
    members: list[int]


def _single_tables(
    model: nn.Module,
    windows: Sequence[Window],
    policies: Sequence[Policy],
    measure: Measure,
    steps: Steps,
    progress: Progress | None,
) -> list[Table]:
    """One table for each group, of layers that are compressed alone."""
    rows: list[Tensor] = []
    for number, window in enumerate(windows):
        rows.append(steps.get(f"window {number}", functools.partial(_single, model, window, policies, measure, number)))
        _tell(progress, number + 1, len(windows))
    every = torch.stack(rows)
    return [_table(every[..., members], members, (), 0.0) for members in groups(policies)]


def _single(model: nn.Module, window: Window, policies: Sequence[Policy], measure: Measure, seed: int) -> Tensor:
    """The distortion of each layer alone in one window, [L, C]; NaN where a candidate cannot be used."""
    if measure == "kl":
        return layer_kls(model, [window], policies)[0]
    return output_errors(model, [window], policies)[0] * sensitivities(model, [window], seed=seed)[0][:, None]


def _joint_tables(
    model: nn.Module, windows: Sequence[Window], policies: Sequence[Policy], steps: Steps, progress: Progress | None
) -> list[Table]:
    """A table for each size and group, of layers that are changed while all others are compressed."""
    with tapped(model) as tap:
        layers = len(tap.layers)
        compressor = Compressor(tap, check_candidates(policies, tap.attachment.info))

        def alike(window: Window) -> Tensor:
            joint = JointWindow(tap, compressor, window)
            return torch.tensor(joint.kls([[number] * layers for number in range(len(policies))]))

        def exchanged(window: Window, bases: Sequence[_Base]) -> Tensor:
            joint = JointWindow(tap, compressor, window)
            width = max(len(base.members) for base in bases)
            found = torch.full((len(bases), layers, width), torch.nan, dtype=torch.float64)
            for row, base in zip(found, bases, strict=True):
                row[:, : len(base.members)] = joint.exchanges([base.candidate] * layers, base.members)
            return found

        total = 2 * len(windows)
        same: list[Tensor] = []
        for number, window in enumerate(windows):
            same.append(steps.get(f"alike {number}", functools.partial(alike, window)))
            _tell(progress, number + 1, total)
        losses = torch.stack(same).mean(0)
        bases = _bases(model, windows, policies, losses)
        rows: list[Tensor] = []
        for number, window in enumerate(windows):
            rows.append(steps.get(f"exchanged {number}", functools.partial(exchanged, window, bases)))
            _tell(progress, len(windows) + number + 1, total)
    every = torch.stack(rows)
    return [
        _table(
            every[:, place, :, : len(base.members)],
            base.members,
            (base.candidate,) * layers,
            float(losses[base.candidate]),
        )
        for place, base in enumerate(bases)
    ]


def _bases(model: nn.Module, windows: Sequence[Window], policies: Sequence[Policy], losses: Tensor) -> list[_Base]:
    """The candidate of each group that does best in all layers at each level, but for groups that are far worse."""
    shape = describe(model.config, getattr(model, "dtype", None))  # pyright: ignore[reportArgumentType]
    prompt = round(sum(len(window.prompt) for window in windows) / len(windows))
    new = round(sum(len(window.follow) for window in windows) / len(windows))
    sizes = [layer_nbytes(policy, shape.evictable[0], shape.whole, prompt, new) for policy in policies]
    full = shape.whole.token_nbytes * (prompt + new)
    found: list[_Base] = []
    for level in LEVELS:
        best: list[tuple[float, _Base]] = []
        for members in groups(policies):
            usable = [i for i in members if sizes[i] is not None and bool(losses[i].isfinite())]
            # The largest base that fits need not be the best one, with a codec of fewer bits.
            fitting = [i for i in usable if (sizes[i] or 0) <= 1.2 * level * full]
            chosen = (
                min(fitting, key=lambda i: float(losses[i]))
                if fitting
                else min(usable, key=lambda i: sizes[i] or 0, default=None)
            )
            if chosen is not None:
                best.append((float(losses[chosen]), _Base(chosen, members)))
        least = min((loss for loss, _ in best), default=0.0)
        found += [base for loss, base in best if loss <= HOPELESS * least and base not in found]
    if not found:
        raise KVPolicyError(
            "At least one candidate must be usable in every text, got none; try larger shares, or longer texts."
        )
    return found


def _table(rows: Tensor, members: Sequence[int], base: tuple[int, ...], base_loss: float) -> Table:
    """Mean and standard error of the distortions of windows, [W, L, members]."""
    mean = rows.mean(0)
    spread = rows.std(0) / len(rows) ** 0.5 if len(rows) > 1 else mean.where(mean.isnan(), 0.0)
    return Table(tuple(members), base, float(rounded(torch.tensor(base_loss))), rounded(mean), rounded(spread))


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)

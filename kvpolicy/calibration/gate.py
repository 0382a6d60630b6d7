"""Gates for a model: what predicts the scores of KVzip+ from the input of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.gate_fit import Moments, Sample, Training, explained, mlp_gate
from kvpolicy.calibration.listener import check_finite, listening
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import tokens_per_window
from kvpolicy.protocols import View
from kvpolicy.selectors.gate_files import LayerGate
from kvpolicy.selectors.kvzip import KVzip
from kvpolicy.statistics import ModuleCall, Replay, Results
from kvpolicy.statistics.statistic import first_of

FLOOR = -20.0
"""The smallest label: logarithms of smaller scores are about nothing that is kept, and that of 0 is infinite."""

HELD_OUT = 10
"""Every so many windows, one is not fitted to, if there are as many: it says how well the gates predict other text."""


def fit_gates(
    run: Run, tokens: int, training: Training, ridge: float | None
) -> tuple[dict[int, LayerGate], dict[str, Any]]:
    """The gate of each layer, linear if `ridge` is given, and how well they fit; see `calibrate_gate`."""
    sums: dict[int, Moments] = {}
    samples: dict[int, Sample] = {}
    held_out: dict[int, Sample] = {}
    counts = tokens_per_window(run.windows, tokens)
    scored = scored_windows(run.model, run.windows, counts, seed=training.seed, progress=run.progress)
    for number, layers in enumerate(scored):
        # The last of each ten; without it, the fit is judged by what it was fitted to.
        kept_out = number % HELD_OUT == HELD_OUT - 1
        for layer, sample in layers.items():
            if kept_out or (number == 0 and len(run.windows) < HELD_OUT):
                held_out[layer] = sample if layer not in held_out else held_out[layer].plus(sample)
            if kept_out:
                continue
            if ridge is not None:
                sums[layer] = Moments.of(sample) if layer not in sums else sums[layer].plus(Moments.of(sample))
            else:
                samples[layer] = sample if layer not in samples else samples[layer].plus(sample)
    gates: dict[int, LayerGate] = {}
    for layer in run.bar(sorted(held_out), "gates"):
        gates[layer] = mlp_gate(samples[layer], training) if ridge is None else sums[layer].gate(ridge)
    return gates, {"r2": [round(explained(gates[layer], held_out[layer]), 4) for layer in gates]}


def scored_windows(
    model: nn.Module, windows: Sequence[Tensor], counts: Sequence[int], *, seed: int = 0, progress: bool = False
) -> Iterator[dict[int, Sample]]:
    """Run windows of tokens through a model, and replay each.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n].
        counts: How many tokens of each window are sampled.
        seed: Seed of the samples.
        progress: Whether to show a progress bar.

    Yields:
        The sample of a window by the index of the layer, of the layers that a policy manages.

    Raises:
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite.
    """
    plan = first_of(Replay, KVzip(plus=True).statistics)
    assert plan is not None
    chance = torch.Generator().manual_seed(seed)
    for ids, count in zip(tqdm(windows, desc="scores", disable=not progress), counts, strict=True):
        tokens = torch.randperm(len(ids), generator=chance, device="cpu")[:count].sort().values
        found: dict[int, Sample] = {}

        def look(seen: Results, view: View, tokens: Tensor = tokens, found: Any = found) -> None:
            replayed = seen[Replay]
            assert replayed is not None
            inputs = seen[ModuleCall].hidden_states[0]
            scores = replayed[0]
            at = tokens.to(inputs.device)
            labels = scores.index_select(1, at).log().clamp_min(FLOOR).mT
            found[view.layer_idx] = Sample(inputs.index_select(0, at).float().cpu(), labels.cpu())

        with listening(model, (ModuleCall(), plan), look) as run:
            run(ids)
        for layer, sample in found.items():
            check_finite("collected numbers", f"the inputs or scores of layer {layer}", sample.inputs, sample.labels)
        yield found

"""Gates for a model: what predicts the scores of KVzip+ from the input of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import tokens_per_window
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.gate_fit import RIDGE, Moments, Sample, Training, explained, mlp_gate
from kvpolicy.calibration.listener import Listener, check_finite, listening
from kvpolicy.hf.identity import identity
from kvpolicy.protocols import Needs, Replay, Seen, State, View
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, LayerGate
from kvpolicy.selectors.kvzip import KVzip
from kvpolicy.text.errors import KVPolicyError

Kind = Literal["linear", "mlp"]
"""Whether a score is linear in the input of the layer, or goes through one hidden layer."""

TOKENS = 131_072
"""Tokens that are scored: 128 windows of 1,024."""

MIN_TOKENS = 128
"""The minimum number of tokens: a fit to fewer says little about other text."""

FLOOR = -20.0
"""The smallest label: logarithms of smaller scores are about nothing that is kept, and that of 0 is infinite."""

HELD_OUT = 10
"""Every so many windows, one is not fitted to, if there are as many: it says how well the gates predict other text."""


def calibrate_gate(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    kind: Kind = "linear",
    tokens: int = TOKENS,
    ridge: float = RIDGE,
    units: int = Training().units,
    epochs: int = Training().epochs,
    seed: int = 0,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> GateFile:
    """Fit the gates of a model, and write them to a file that `kvzap:file=FILE` reads.

    Every window is run through the model twice, as by `kvzip:plus=true`, and each layer's gate is fitted to the
    logarithm of the scores that its tokens get. No matrix of attention is ever whole.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`. A score is a maximum over the queries of its
            window, so that windows should be of one length.
        out: The file.
        kind: `linear`: ridge regression, of which sums alone are held. `mlp`: a hidden layer, trained by AdamW; the
            inputs of all sampled tokens in all layers are held at once, as fp32.
        tokens: About how many tokens are sampled, equally from all windows.
        ridge: Weight of the penalty of a linear gate, over the mean variance of the inputs.
        units: Units of the hidden layer of an `mlp`.
        epochs: Epochs of the training of an `mlp`.
        seed: Seed of the sample, and of the training.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model, text or other options.

    Returns:
        The content of the file. `made["r2"]` is the share of the variance of the labels that the gate of each layer
        explains, in windows that were not fitted to if there are ten or more.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite;
            the text is too short; an option is out of range; or `out` holds something else.

    Examples:
        >>> import tempfile, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     content = calibrate_gate(model, [torch.arange(3, 140)], f"{folder}/gate.safetensors")
        >>> len(content.gates), content.gates[0].weight.shape
        (8, torch.Size([4, 128]))

    Source:
        KVzap (arXiv:2601.07891), and its authors' code in kvpress. As there: the labels are the logarithm of KVzip+,
        an `mlp` has 512 units of GELU, and is trained for 15 epochs by AdamW with a rate of 5e-3 that falls along a
        cosine, batches of 512 and gradients cut to a norm of 1. Differences: the context alone is replayed, without a
        request to repeat it; labels below -20 are raised to it; inputs and labels are standardized for the training of
        an `mlp`, and the gate takes them as they are; the penalty of the regression is relative to the inputs; the text
        is the caller's (theirs: 500 tokens of each of about 4,500 texts of 750 to 1,250 tokens).
    """
    check_options(kind, ridge, units, epochs)
    windows = as_windows(windows)
    counts = tokens_per_window(windows, tokens) if windows else []
    if sum(counts) < MIN_TOKENS:
        raise KVPolicyError(
            f"The tokens to fit gates to must be at least {MIN_TOKENS}, got {sum(counts)}; try a longer text, or more "
            "tokens of it."
        )
    options = {"ridge": ridge} if kind == "linear" else {"units": units, "epochs": epochs}
    made = {"text_sha256": text_sha256(windows), "windows": len(windows), "tokens": sum(counts), "seed": seed}
    facts = GateFile({}, identity(model, name), made | {"kind": kind} | options)
    GATE_FILES.check_free(out, facts, force=force)
    sums: dict[int, Moments] = {}
    samples: dict[int, Sample] = {}
    held_out: dict[int, Sample] = {}
    for number, layers in enumerate(scored_windows(model, windows, counts, seed=seed, progress=progress)):
        # The last of each ten; without it, the fit is judged by what it was fitted to.
        kept_out = number % HELD_OUT == HELD_OUT - 1
        for layer, sample in layers.items():
            if kept_out or (number == 0 and len(windows) < HELD_OUT):
                held_out[layer] = sample if layer not in held_out else held_out[layer].plus(sample)
            if kept_out:
                continue
            if kind == "linear":
                sums[layer] = Moments.of(sample) if layer not in sums else sums[layer].plus(Moments.of(sample))
            else:
                samples[layer] = sample if layer not in samples else samples[layer].plus(sample)
    training = Training(units=units, epochs=epochs, seed=seed)
    gates: dict[int, LayerGate] = {}
    for layer in tqdm(sorted(held_out), desc="gates", disable=not progress):
        gates[layer] = sums[layer].gate(ridge) if kind == "linear" else mlp_gate(samples[layer], training)
    made = {**(facts.made or {}), "r2": [round(explained(gates[layer], held_out[layer]), 4) for layer in gates]}
    content = GateFile(gates, facts.model, made)
    GATE_FILES.save(out, content)
    return content


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
    plan = KVzip(plus=True).needs.replay
    assert plan is not None
    chance = torch.Generator().manual_seed(seed)
    for ids, count in zip(tqdm(windows, desc="scores", disable=not progress), counts, strict=True):
        tokens = torch.randperm(len(ids), generator=chance, device="cpu")[:count].sort().values
        found: dict[int, Sample] = {}

        def take(layer: int, inputs: Tensor, scores: Tensor, tokens: Tensor = tokens, found: Any = found) -> None:
            at = tokens.to(inputs.device)
            labels = scores.index_select(1, at).log().clamp_min(FLOOR).mT
            found[layer] = Sample(inputs.index_select(0, at).float().cpu(), labels.cpu())

        with listening(model, _Tap(plan=plan, take=take)) as run:
            run(ids)
        for layer, sample in found.items():
            check_finite("the inputs or scores", layer, sample.inputs, sample.labels)
        yield found


def check_options(kind: str, ridge: float, units: int, epochs: int) -> Kind:
    """Return the kind of a gate.

    Raises:
        KVPolicyError: If an option of `calibrate_gate` is out of range.
    """
    if kind not in ("linear", "mlp"):
        raise KVPolicyError(f"The kind of a gate must be linear or mlp, got {kind!r}; try linear.")
    if not 0 <= ridge < math.inf:
        raise KVPolicyError(f"ridge must be a finite number of at least 0, got {ridge}; try {RIDGE}.")
    for option, value in (("units", units), ("epochs", epochs)):
        if value < 1:
            raise KVPolicyError(f"{option} must be at least 1, got {value}; try {getattr(Training(), option)}.")
    return kind


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tap(Listener):
    """A selector that shows the replayed scores and the inputs of each layer, and keeps the newest token.

    Attributes:
        plan: How the prompt is replayed.
        take: Called in each layer with its index, the input of the layer [P, hidden] and the scores [H, P].
    """

    plan: Replay
    take: Callable[[int, Tensor, Tensor], None]

    @property
    def needs(self) -> Needs:
        """A replay, and the input of the layer."""
        return Needs(forward=True, replay=self.plan)

    def observe(self, state: State, seen: Seen, view: View) -> State:
        assert seen.forward is not None and seen.replay is not None
        self.take(view.layer_idx, seen.forward.hidden_states[0], seen.replay[0])
        return state

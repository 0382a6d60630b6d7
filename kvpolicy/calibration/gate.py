"""Gates for a model: what predicts the scores of KVzip+ from the input of each layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpolicy.calibration.listener import check_finite, listening
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import sampled, tokens_per_window
from kvpolicy.engine.host import outside_autocast
from kvpolicy.protocols import View
from kvpolicy.selectors.gate_files import Inner, LayerGate
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
    for ids, sample in sampled(windows, counts, seed, "scores", progress):
        found: dict[int, Sample] = {}

        def look(seen: Results, view: View, sample: Tensor = sample, found: Any = found) -> None:
            replayed = seen[Replay]
            assert replayed is not None
            inputs = seen[ModuleCall].hidden_states[0]
            scores = replayed[0]
            at = sample.to(inputs.device)
            labels = scores.index_select(1, at).log().clamp_min(FLOOR).mT
            found[view.layer_idx] = Sample(inputs.index_select(0, at).float().cpu(), labels.cpu())

        with listening(model, (ModuleCall(), plan), look) as run:
            run(ids)
        for layer, own in found.items():
            check_finite("collected numbers", f"the inputs or scores of layer {layer}", *own)
        yield found


Kind = Literal["linear", "mlp"]
"""Whether a score is linear in the input of the layer, or goes through one hidden layer."""

RIDGE = 1e-3
"""Weight of the penalty, over the mean variance of the inputs."""


class Training(NamedTuple):
    """How a gate with a hidden layer is trained, by AdamW on the mean squared error.

    Attributes:
        units: Units of the hidden layer.
        epochs: How often every token is seen.
        batch: Tokens of a step.
        rate: Learning rate of the first step, from which it falls to 0 along a cosine.
        seed: Seed of the weights and of the order of the tokens.
    """

    units: int = 512
    epochs: int = 15
    batch: int = 512
    rate: float = 5e-3
    seed: int = 0


class Sample(NamedTuple):
    """Some tokens of one layer.

    Attributes:
        inputs: The input of the layer at each, [n, hidden] fp32 on the CPU.
        labels: What their scores should be for each KV head, [n, H] fp32.
    """

    inputs: Tensor
    labels: Tensor

    def plus(self, other: Sample) -> Sample:
        """The tokens of both."""
        return Sample(torch.cat([self.inputs, other.inputs]), torch.cat([self.labels, other.labels]))


class Moments(NamedTuple):
    """Sums over tokens of one layer, from which a linear gate follows; fp64.

    Attributes:
        tokens: How many there are.
        inputs: The sum of the inputs, [hidden].
        labels: The sum of the labels, [H].
        gram: The sum of the products of the inputs with themselves, [hidden, hidden].
        cross: The sum of their products with the labels, [hidden, H].
    """

    tokens: int
    inputs: Tensor
    labels: Tensor
    gram: Tensor
    cross: Tensor

    @classmethod
    def of(cls, sample: Sample) -> Moments:
        """The sums over a sample."""
        x = sample.inputs.double()
        y = sample.labels.double()
        return cls(len(x), x.sum(0), y.sum(0), x.mT @ x, x.mT @ y)

    def plus(self, other: Moments) -> Moments:
        """The sums over the tokens of both."""
        return Moments(
            self.tokens + other.tokens,
            self.inputs + other.inputs,
            self.labels + other.labels,
            self.gram + other.gram,
            self.cross + other.cross,
        )

    def gate(self, ridge: float = RIDGE) -> LayerGate:
        """The linear gate of least squares, with a penalty of its weights, but not of its bias.

        Args:
            ridge: Weight of the penalty, over the mean variance of the inputs.

        Examples:
            >>> inputs = torch.tensor([[0.0], [1.0], [2.0]])
            >>> gate = Moments.of(Sample(inputs, 3 * inputs - 1)).gate(ridge=0.0)
            >>> gate.weight, gate.bias
            (tensor([[3.]]), tensor([-1.]))
        """
        mean = self.inputs / self.tokens
        label = self.labels / self.tokens
        covariance = self.gram / self.tokens - mean[:, None] * mean
        cross = self.cross / self.tokens - mean[:, None] * label
        # Not below the rounding of the sums, so that there is a solution without variance too: weights of 0.
        size = covariance.diagonal().mean()
        is_constant = size <= 1e-12 * (self.gram.diagonal() / self.tokens).mean()
        covariance.diagonal().add_(1.0 if is_constant else size * max(ridge, 1e-12))
        weight = torch.linalg.solve(covariance, cross)
        return LayerGate(weight.mT.float().contiguous(), (label - mean @ weight).float())


def mlp_gate(sample: Sample, training: Training | None = None) -> LayerGate:
    """Train a gate with a hidden layer.

    Args:
        sample: The tokens to fit.
        training: How; by default as the authors of KVzap.

    Examples:
        >>> inputs = torch.linspace(-1, 1, 256)[:, None]
        >>> gate = mlp_gate(Sample(inputs, inputs.square()), Training(units=16, epochs=200))
        >>> bool((gate.score(inputs[None])[0].mT - inputs.square()).abs().mean() < 0.1)
        True
    """
    training = training or Training()
    mean, std = _standard(sample.inputs)
    label, spread = _standard(sample.labels)
    x = (sample.inputs - mean) / std
    y = (sample.labels - label) / spread
    chance = torch.Generator().manual_seed(training.seed)
    sizes = ((training.units, x.shape[1]), (training.units,), (y.shape[1], training.units), (y.shape[1],))
    fans = (x.shape[1], x.shape[1], training.units, training.units)
    # As `nn.Linear` draws them, but from a generator of our own.
    weights = [
        (torch.rand(s, generator=chance, dtype=torch.float32, device="cpu") * 2 - 1) / math.sqrt(f)
        for s, f in zip(sizes, fans, strict=True)
    ]
    with torch.inference_mode(False), torch.enable_grad(), outside_autocast(x.device):
        x = x.clone()
        y = y.clone()
        weights = [w.clone().requires_grad_() for w in weights]
        optimizer = torch.optim.AdamW(weights, lr=training.rate)
        batches = -(-len(x) // training.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.epochs * batches)
        for _ in range(training.epochs):
            for rows in torch.randperm(len(x), generator=chance, device="cpu").split(training.batch):
                optimizer.zero_grad()
                units = F.gelu(F.linear(x[rows], weights[0], weights[1]))
                F.mse_loss(F.linear(units, weights[2], weights[3]), y[rows]).backward()
                nn.utils.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                schedule.step()
    inner, inner_bias, outer, bias = (w.detach() for w in weights)
    inner = inner / std
    units = Inner(inner.contiguous(), inner_bias - inner @ mean)
    return LayerGate((outer * spread[:, None]).contiguous(), bias * spread + label, units)


def explained(gate: LayerGate, sample: Sample) -> float:
    """The share of the variance of a sample's labels, over all heads, that a gate explains; at most 1."""
    errors = gate.score(sample.inputs[None])[0].mT.double() - sample.labels.double()
    variance = (sample.labels.double() - sample.labels.double().mean(0)).square().sum()
    return float(1 - errors.square().sum() / variance.clamp_min(torch.finfo(torch.float64).tiny))


def _standard(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; 1 for a column without variance."""
    mean = x.double().mean(0)
    std = x.double().std(0, correction=0)
    return mean.float(), torch.where(std > 0, std, 1).float()

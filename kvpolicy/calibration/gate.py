"""Gates for a model: what predicts the scores of KVzip+ from the input of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import tokens_per_window
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.eval_mode import eval_mode
from kvpolicy.calibration.finished import check_free_file, without_name
from kvpolicy.hf.attach import attach
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.identity import identity
from kvpolicy.policy import Policy
from kvpolicy.protocols import Needs, Replay, Seen, Selector, State, View
from kvpolicy.selectors.gate_files import GateFile, Inner, LayerGate, load_gates, save_gates
from kvpolicy.selectors.kvzip import KVzip
from kvpolicy.spec.errors import KVPolicyError

Kind = Literal["linear", "mlp"]
"""Whether a score is linear in the input of the layer, or goes through one hidden layer."""

TOKENS = 65_536
"""Tokens that are scored: 64 windows of 1,024."""

MIN_TOKENS = 128
"""The minimum number of tokens: a fit to fewer says little about other text."""

RIDGE = 1e-3
"""Weight of the penalty, over the mean variance of the inputs."""

FLOOR = -20.0
"""The smallest label: logarithms of smaller scores are about nothing that is kept, and that of 0 is infinite."""

HELD_OUT = 10
"""Every so many windows, one is not fitted to, if there are as many: it says how well the gates predict other text."""


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
    if not force:
        check_free_file(out, load_gates, facts, _compared)
    whole = kind == "mlp"
    fitted: dict[int, Moments | Sample] = {}
    held_out: dict[int, Sample] = {}
    for number, layers in enumerate(_scored(model, windows, counts, seed, progress)):
        # The last of each ten; without it, the fit is judged by what it was fitted to.
        kept_out = number % HELD_OUT == HELD_OUT - 1
        for layer, sample in layers.items():
            if kept_out or (number == 0 and len(windows) < HELD_OUT):
                held_out[layer] = sample if layer not in held_out else held_out[layer].plus(sample)
            if not kept_out:
                new = sample if whole else Moments.of(sample)
                fitted[layer] = new if layer not in fitted else fitted[layer].plus(new)  # pyright: ignore[reportArgumentType]
    training = Training(units=units, epochs=epochs, seed=seed)
    gates: dict[int, LayerGate] = {}
    for layer, found in tqdm(sorted(fitted.items()), desc="gates", disable=not progress):
        gates[layer] = mlp_gate(found, training) if isinstance(found, Sample) else found.gate(ridge)
    made = {**(facts.made or {}), "r2": [round(explained(gates[layer], held_out[layer]), 4) for layer in gates]}
    content = GateFile(gates, facts.model, made)
    save_gates(out, content)
    return content


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
        x, y = sample.inputs.double(), sample.labels.double()
        return cls(len(x), x.sum(0), y.sum(0), x.mT @ x, x.mT @ y)

    def plus(self, other: Moments) -> Moments:
        """The sums over the tokens of both."""
        return Moments(*(a + b for a, b in zip(self, other, strict=True)))

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
        mean, label = self.inputs / self.tokens, self.labels / self.tokens
        covariance = self.gram / self.tokens - mean[:, None] * mean
        cross = self.cross / self.tokens - mean[:, None] * label
        # Not below the rounding of the sums, so that channels without variance have a solution, which is 0.
        size = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        penalty = size * max(ridge, 1e-12)
        covariance.diagonal().add_(penalty)
        weight = torch.linalg.solve(covariance, cross)
        return LayerGate(weight.mT.float().contiguous(), (label - mean @ weight).float())


def mlp_gate(sample: Sample, training: Training | None = None) -> LayerGate:
    """Train a gate with a hidden layer.

    Args:
        sample: The tokens to fit.
        training: How; by default as the authors of KVzap.

    Examples:
        >>> inputs = torch.linspace(-1, 1, 256)[:, None]
        >>> gate = mlp_gate(Sample(inputs, inputs.square()), Training(units=16))
        >>> bool((gate.score(inputs[None])[0].mT - inputs.square()).abs().mean() < 0.1)
        True
    """
    training = training or Training()
    mean, std = _standard(sample.inputs)
    label, spread = _standard(sample.labels)
    x, y = (sample.inputs - mean) / std, (sample.labels - label) / spread
    chance = torch.Generator().manual_seed(training.seed)
    sizes = ((training.units, x.shape[1]), (training.units,), (y.shape[1], training.units), (y.shape[1],))
    fans = (x.shape[1], x.shape[1], training.units, training.units)
    # As `nn.Linear` draws them, but from a generator of our own.
    weights = [(torch.rand(s, generator=chance) * 2 - 1) / math.sqrt(f) for s, f in zip(sizes, fans, strict=True)]
    with torch.inference_mode(False), torch.enable_grad():
        x, y = x.clone(), y.clone()
        weights = [w.clone().requires_grad_() for w in weights]
        optimizer = torch.optim.AdamW(weights, lr=training.rate)
        batches = -(-len(x) // training.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.epochs * batches)
        for _ in range(training.epochs):
            for rows in torch.randperm(len(x), generator=chance).split(training.batch):
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
    mean, std = x.double().mean(0), x.double().std(0, correction=0)
    return mean.float(), torch.where(std > 0, std, 1).float()


def _scored(
    model: nn.Module, windows: Sequence[Tensor], counts: Sequence[int], seed: int, progress: bool
) -> Iterator[dict[int, Sample]]:
    """Run windows through a model and replay them; yields a sample of each window's tokens, by layer."""
    plan = KVzip(plus=True).needs.replay
    assert plan is not None
    chance = torch.Generator().manual_seed(seed)
    decoder = find_sites(model).decoder
    device = next(decoder.parameters()).device
    for ids, count in zip(tqdm(windows, desc="scores", disable=not progress), counts, strict=True):
        tokens = torch.randperm(len(ids), generator=chance)[:count].sort().values
        found: dict[int, Sample] = {}

        def take(layer: int, inputs: Tensor, scores: Tensor, tokens: Tensor = tokens, found: Any = found) -> None:
            at = tokens.to(inputs.device)
            labels = scores.index_select(1, at).log().clamp_min(FLOOR).mT
            found[layer] = Sample(inputs.index_select(0, at).float().cpu(), labels.cpu())

        # Tokens are scored before the eviction, so that one is enough to keep.
        with eval_mode(model), torch.no_grad(), attach(model, Policy(selector=_Tap(plan=plan, take=take), budget=1)):
            decoder(input_ids=ids[None].to(device), use_cache=True)
        for layer, sample in found.items():
            if not (bool(sample.inputs.isfinite().all()) and bool(sample.labels.isfinite().all())):
                raise KVPolicyError(
                    f"All collected numbers must be finite, got inf or NaN in the inputs or scores of layer {layer}; "
                    "try loading the model in bf16 or fp32."
                )
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
class _Tap(Selector):
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

    def priority(self, state: State, view: View) -> Tensor:
        return view.positions.float()


def _compared(content: GateFile) -> object:
    """The content that must be equal; neither the name of the model nor how well the gates fit is compared."""
    made = {key: value for key, value in (content.made or {}).items() if key != "r2"}
    return without_name(content.model), made

"""A function for each part that is calibrated, with its options as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvpolicy.allocators.duo import RECENT, SINKS
from kvpolicy.allocators.head_files import HeadFile
from kvpolicy.calibration.calibrators import (
    KEY_SPACES,
    CenterCalibrator,
    ChannelCalibrator,
    CSRCalibrator,
    FilterCalibrator,
    GateCalibrator,
    HeadCalibrator,
    KVQuantCalibrator,
    LowRankCalibrator,
    RotationCalibrator,
)
from kvpolicy.calibration.csr import Dictionaries
from kvpolicy.calibration.driver import calibrate
from kvpolicy.calibration.echoes import ECHO, INDUCTION, REPEATS
from kvpolicy.calibration.gate import RIDGE, Kind, Training
from kvpolicy.calibration.heads import POSITIONS
from kvpolicy.selectors.center_files import CenterFile
from kvpolicy.selectors.filter_files import FilterFile
from kvpolicy.selectors.gate_files import GateFile


def calibrate_csr(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    options: Dictionaries,
    *,
    name: str | None = None,
    progress: bool = False,
    announce: Callable[[float], object] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Train the dictionaries of CSR on the keys and values of a model, and write them to a folder.

    An interrupted run is resumed by a call with the same model, windows and options.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        options: Which dictionaries to train, and how.
        name: Name of the model in the calibration.
        progress: Whether to show progress bars.
        announce: Called with the seconds of `estimate_csr` when nothing refuses the run any more.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, the text is too short, or `out` holds another calibration,
            finished or not.
    """
    calibrator = CSRCalibrator(dictionaries=options)
    run: dict[str, Any] = {"name": name, "progress": progress, "announce": announce, "force": force}
    return calibrate(calibrator, model, windows, out, **run).meta


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
    """Fit the ranges and levels of KVQuant to the keys and values of a model, and write them to a folder.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        bits: The bits per code to fit levels for.
        outliers: Fraction of the elements of a vector that are stored in full, as in `KVQuant`.
        tokens: About how many tokens are sampled.
        fisher: Whether errors are weighted by the squared gradient of the loss, as in the paper, or equally.
        seed: Seed of the sample.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, the text is too short, or `out` holds another calibration.
    """
    calibrator = KVQuantCalibrator(bits=tuple(bits), outliers=outliers, tokens=tokens, no_fisher=not fisher, seed=seed)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force).meta


def calibrate_lowrank(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    key_spaces: Sequence[str] = KEY_SPACES,
    head_groups: Sequence[int] = (),
    fisher: bool = False,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Find the bases of a model's keys and values, and write them to a folder that `lowrank:calibration=DIR` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        key_spaces: Whether keys are taken as attention sees them (`rotated`), without the rotary embedding
            (`unrotated`), or both.
        head_groups: Of how many KV heads bases are found together too, for `lowrank:head_group=N`; each divides the
            heads of the model.
        fisher: Whether to collect the Fisher information too, for `lowrank:ranks=fisher`. Each window then takes a
            backward pass and the memory of a training step.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors. `energy` is the share of the variance in the first quarter of
        the directions, by part (such as `values`), a mean over layers and heads.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, has no rotary embedding that could be
            undone for unrotated keys, has values of another size than keys for `fisher`, or produces numbers that are
            not finite; a group of heads does not divide them; the text is too short; or `out` holds another
            calibration.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     meta = calibrate_lowrank(kvpolicy.tiny()[0], [torch.arange(3, 140)], folder)
        >>> sorted(meta["energy"])
        ['keys.post', 'keys.pre', 'values']
    """
    calibrator = LowRankCalibrator(key_spaces=tuple(key_spaces), head_groups=tuple(head_groups), fisher=fisher)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force).meta


def calibrate_channels(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Measure how salient each key channel of a model is, and write it to a folder for `labels:calibration=DIR`.

    The salience of a channel is its mean absolute query times its mean absolute key, for each KV head, over the query
    heads of the KV head and the tokens of a window; then the mean over windows, each by its tokens. A folder fits any
    number of channels.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported or has a policy attached, the text is too short, or `out` holds
            another calibration.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     facts = calibrate_channels(model, [torch.arange(3, 140)], folder)
        ...     reader = kvpolicy.DoubleSparsity(channels=4, calibration=folder)
        ...     facts["tokens"], reader.load_salience(0).shape
        (137, torch.Size([4, 32]))

    Source: Double Sparsity (Yang et al., 2024, arXiv:2408.07092), Section 3.2, and its authors' code, commit b0575e6.
    Differences: the authors choose by the mean absolute query, key or product of a channel; here it is the product of
    the means of query and key, as where the first prompt decides. They store the channels, and we their salience.
    """
    return calibrate(ChannelCalibrator(), model, windows, out, name=name, progress=progress, force=force).meta


def calibrate_heads(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    positions: int = POSITIONS,
    sinks: int = SINKS,
    recent: int = RECENT,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> HeadFile:
    """Score the KV heads of a model, and write the scores to a file that `duo:file=FILE` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The file.
        positions: See `head_scores`.
        sinks: First tokens that a streaming head keeps; written to the file as they are.
        recent: Newest tokens that a streaming head keeps; written to the file as they are.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model, text or other options.

    Returns:
        The content of the file.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model or its rotary embedding is not supported, there is no text, or `out` holds something
            else.
    """
    calibrator = HeadCalibrator(positions=positions, sinks=sinks, recent=recent)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force)


def calibrate_echoes(
    model: nn.Module,
    out: str | Path,
    *,
    random: int | None = None,
    repeats: int = REPEATS,
    echo: float = ECHO,
    induction: float = INDUCTION,
    seed: int = 0,
    sinks: int = SINKS,
    recent: int = RECENT,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> HeadFile:
    """Score the KV heads of a model by a repeated random text, and write a file that `duo:file=FILE` reads.

    The file is for `duo:sparsity=S` with any S: if a fraction S of all heads streams, the others are the best by the
    echo score and the best by the induction score, in the ratio of `echo` to `induction`. The paper's heads are those
    of `S = 1 - echo - induction`; see `ranked_scores`.

    Args:
        model: A causal language model without a policy attached.
        out: The file.
        random: See `echo_scores`.
        repeats: See `echo_scores`.
        echo: Share of the heads that retrieve by the echo score.
        induction: Share of the heads that retrieve by the induction score.
        seed: See `echo_scores`.
        sinks: First tokens that a streaming head keeps; written to the file as they are.
        recent: Newest tokens that a streaming head keeps; written to the file as they are.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model or other options.

    Returns:
        The content of the file.

    Raises:
        KVPolicyError: If the model is not supported, a share or a size is out of range, the text is longer than the
            model, or `out` holds something else.
    """
    shares = {"echo": echo, "induction": induction}
    kept = {"sinks": sinks, "recent": recent}
    calibrator = HeadCalibrator(probe="razor", random=random, repeats=repeats, seed=seed, **shares, **kept)
    return calibrate(calibrator, model, (), out, name=name, progress=progress, force=force)


def calibrate_oscar(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    shared: bool = False,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Find the rotations of a model's keys and values, and write them to a folder that `oscar:calibration=DIR` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`. Each runs through the model twice.
        out: The folder.
        shared: Whether all KV heads of a layer share a rotation, as in the paper, or have their own.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite;
            the text is too short; or `out` holds another calibration.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     meta = calibrate_oscar(kvpolicy.tiny()[0], [torch.arange(3, 140)], folder)
        >>> meta["tokens"], meta["shared"]
        (137, False)
    """
    calibrator = RotationCalibrator(shared=shared)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force).meta


def calibrate_qfilters(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    tokens: int = 3000,
    seed: int = 0,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> FilterFile:
    """Find the filters of a model, and write them to a file that `qfilters:file=FILE` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The file.
        tokens: About how many tokens are sampled, equally from all windows. Their queries in all layers are held at
            once, as fp32.
        seed: Seed of the sample.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model, text or other options.

    Returns:
        The content of the file.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite;
            the text is too short; or `out` holds something else.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     content = calibrate_qfilters(model, [torch.arange(3, 140)], f"{folder}/filters.safetensors")
        >>> len(content.filters), content.filters[0].shape
        (8, torch.Size([4, 32]))
    """
    calibrator = FilterCalibrator(tokens=tokens, seed=seed)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force)


def calibrate_triattention(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> CenterFile:
    """Find the mean queries of a model, and write them to a file that `triattention:file=FILE` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`. Text with the chat template that the model is
            served with fits best.
        out: The file.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model, or text.

    Returns:
        The content of the file.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite;
            the text is too short; or `out` holds something else.

    Examples:
        >>> import tempfile, torch, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     content = calibrate_triattention(model, [torch.arange(3, 140)], f"{folder}/centers.safetensors")
        >>> len(content.centers), content.centers[0].mean.shape, content.centers[0].lengths.shape
        (8, torch.Size([8, 32]), torch.Size([8, 16]))
    """
    return calibrate(CenterCalibrator(), model, windows, out, name=name, progress=progress, force=force)


def calibrate_gate(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    kind: Kind = "linear",
    tokens: int = 131_072,
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
        >>> import tempfile, torch, kvpolicy
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
    calibrator = GateCalibrator(kind=kind, tokens=tokens, ridge=ridge, units=units, epochs=epochs, seed=seed)
    return calibrate(calibrator, model, windows, out, name=name, progress=progress, force=force)

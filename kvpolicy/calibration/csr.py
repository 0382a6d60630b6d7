"""Calibrate CSR for a model: train its dictionaries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import collect
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.csr_options import Dictionaries, atoms_of, check_chunks
from kvpolicy.calibration.dictionary import State, train
from kvpolicy.calibration.estimate import estimate_csr
from kvpolicy.calibration.grouping import Directions, divergence, group_layers, parse_groups
from kvpolicy.calibration.progress import Progress
from kvpolicy.codecs import _files
from kvpolicy.codecs._dictionaries import FILE_KEY_SPACES, value_dictionary
from kvpolicy.hf.identity import identity
from kvpolicy.hf.model_spec import describe


class _Job(NamedTuple):
    """A dictionary to train.

    Attributes:
        name: Name of its tensor in the file.
        part: Whether it is for keys, and in which key space, or for values; a key of `Samples.parts`.
        layers: The layers that share it.
        chunks: The number of chunks of a vector.
    """

    name: str
    part: str
    layers: list[int]
    chunks: int


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
    windows = as_windows(windows)
    model_facts = identity(model, name)
    layers = describe(model.config).evictable
    dim = model_facts["head_dim"]
    atoms = atoms_of(options, model_facts["heads"])
    check_chunks(options, dim)
    given_groups = {side: parse_groups(text, layers) for side, text in _given_groups(options).items()}
    facts = {
        "model": model_facts,
        "head_dim": dim,
        "text_sha256": text_sha256(windows),
        "options": _stored_options(options),
    }
    # Both refusals, of checkpoints and of a finished calibration, come before the model runs, which takes long.
    states = Progress(Path(out), facts)
    _files.folder_of("csr").check_free(out, _files.CalibrationFile(facts, {}), force=force)
    if announce is not None:
        announce(estimate_csr(model, windows, options))
    samples = collect(
        model, windows, tokens=options.tokens, key_spaces=options.key_spaces, seed=options.seed, progress=progress
    ).parts()
    groups, divergences = _groups(samples, layers, given_groups, options)
    jobs = _jobs(groups, options)
    device = next(model.parameters()).device
    done = {job.name: _run(job, samples, atoms, options, states, device, progress) for job in jobs}
    groups_by_name: dict[str, list[list[int]]] = {}
    for job in jobs:
        groups_by_name.setdefault(job.name.rpartition(".")[0], []).append(job.layers)
    meta = facts | {
        "groups": groups_by_name,
        "divergence": divergences,
        "atoms": atoms,
        "tokens": next(iter(samples["values"].values())).shape[1],
        "losses": {job_name: state.losses for job_name, state in done.items()},
    }
    _files.save(out, "csr", meta, {key: state.best.mT.half().contiguous() for key, state in done.items()})
    states.clear()
    return meta


def _stored_options(options: Dictionaries) -> dict[str, Any]:
    """The options by their names in the file, which have not changed."""
    stored = asdict(options)
    stored["frames"] = [FILE_KEY_SPACES[key_space] for key_space in stored.pop("key_spaces")]
    stored["sn"] = stored.pop("value_chunks")
    return stored


def _given_groups(options: Dictionaries) -> dict[str, str]:
    """The groups that the user specified, for keys and for values."""
    groups = {"keys": options.key_groups, "values": options.value_groups}
    return {side: text for side, text in groups.items() if text != "auto"}


def _groups(
    samples: dict[str, dict[int, Tensor]], layers: list[int], given: dict[str, Any], options: Dictionaries
) -> tuple[dict[str, list[list[int]]], dict[str, list[float]]]:
    """The groups of each part of the samples, and the divergences of neighboring layers where groups were computed."""
    groups: dict[str, list[list[int]]] = {}
    divergences: dict[str, list[float]] = {}
    for part, vectors in samples.items():
        side = part.split(".")[0]
        if not vectors:
            continue
        if side in given:
            groups[part] = given[side]
            continue
        directions = {layer: Directions.of(vectors[layer]) for layer in layers}
        # Grouping asks for the same pair of layers several times.
        between = functools.cache(functools.partial(_divergence_of, directions))
        groups[part] = group_layers(layers, between, options.pair, options.chain)
        divergences[part] = [between(a, b) for a, b in pairwise(layers)]
    return groups, divergences


def _divergence_of(directions: dict[int, Directions], a: int, b: int) -> float:
    return divergence(directions[a], directions[b])


def _jobs(groups: dict[str, list[list[int]]], options: Dictionaries) -> list[_Job]:
    """The dictionaries to train: one for each part, number of chunks and group of layers."""
    jobs: list[_Job] = []
    for part, layer_groups in groups.items():
        for chunks in options.value_chunks if part == "values" else (1,):
            name = value_dictionary(chunks) if part == "values" else part
            jobs += [_Job(f"{name}.{number}", part, group, chunks) for number, group in enumerate(layer_groups)]
    return jobs


def _run(
    job: _Job,
    samples: dict[str, dict[int, Tensor]],
    atoms: int,
    options: Dictionaries,
    states: Progress,
    device: torch.device,
    progress: bool,
) -> State:
    """Train one dictionary, or resume its training."""
    vectors = torch.cat([samples[job.part][layer].flatten(0, 1) for layer in job.layers])
    x = vectors.unflatten(-1, (job.chunks, -1)).flatten(0, 1).to(device)
    state = states.load(job.name)
    if state is not None:
        state = State(**{key: t.to(device) for key, t in state.tensors().items()}, losses=state.losses)
    epochs_done = 0 if state is None else len(state.losses) - 1
    with tqdm(total=options.training.epochs, initial=epochs_done, desc=job.name, disable=not progress) as bar:

        def after(current: State) -> None:
            states.save(job.name, current)
            bar.update(len(current.losses) - 1 - bar.n)
            bar.set_postfix(loss=f"{current.losses[-1]:.4f}", best=f"{min(current.losses):.4f}")

        # A batch has as many keys or values, whatever the number of chunks.
        training = replace(options.training, batch=options.training.batch * job.chunks)
        return train(x, atoms, options.pairs // job.chunks, training, state=state, after=after)

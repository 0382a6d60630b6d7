"""Calibrate CSR for a model: train its dictionaries."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvpolicy.calibration.csr_options import Dictionaries, atoms_of, check_chunks
from kvpolicy.calibration.dictionary import State, train
from kvpolicy.calibration.estimate import estimate_csr
from kvpolicy.calibration.grouping import Directions, divergence, group_layers, parse_groups
from kvpolicy.calibration.progress import Progress
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import collect
from kvpolicy.codecs.csr.dictionaries import FILE_KEY_SPACES, value_dictionary
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


def facts_of(run: Run, options: Dictionaries) -> dict[str, Any]:
    """What must be equal for a calibration to be continued or replaced; see `calibrate_csr`."""
    dim: int = run.identity["head_dim"]
    check_chunks(options, dim)
    _given_groups(options, describe(run.model.config).evictable)  # pyright: ignore[reportArgumentType]
    facts = {"head_dim": dim, **run.text(windows=False), "options": _stored_options(options)}
    Progress(run.out, {"model": run.identity} | facts)  # refuses checkpoints of another model, text or other options
    return facts


def trained(run: Run, options: Dictionaries, facts: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file by name, and what it says of them besides; see `calibrate_csr`."""
    states = Progress(run.out, {"model": run.identity} | facts)
    if run.announce is not None:
        run.announce(estimate_csr(run.model, run.windows, options))
    layers = describe(run.model.config).evictable  # pyright: ignore[reportArgumentType]
    atoms = atoms_of(options, run.identity["heads"])
    samples = collect(
        run.model,
        run.windows,
        tokens=options.tokens,
        key_spaces=options.key_spaces,
        seed=options.seed,
        progress=run.progress,
    ).parts()
    groups, divergences = _groups(samples, layers, _given_groups(options, layers), options)
    jobs = _jobs(groups, options)
    device = next(run.model.parameters()).device
    done = {job.name: _run(job, samples, atoms, options, states, device, run.progress) for job in jobs}
    groups_by_name: dict[str, list[list[int]]] = {}
    for job in jobs:
        groups_by_name.setdefault(job.name.rpartition(".")[0], []).append(job.layers)
    return {key: state.best.mT.half().contiguous() for key, state in done.items()}, {
        "groups": groups_by_name,
        "divergence": divergences,
        "atoms": atoms,
        "tokens": next(iter(samples["values"].values())).shape[1],
        "losses": {job_name: state.losses for job_name, state in done.items()},
    }


def _stored_options(options: Dictionaries) -> dict[str, Any]:
    """The options by their names in the file, which have not changed."""
    stored = asdict(options)
    stored["frames"] = [FILE_KEY_SPACES[key_space] for key_space in stored.pop("key_spaces")]
    stored["sn"] = stored.pop("value_chunks")
    return stored


def _given_groups(options: Dictionaries, layers: list[int]) -> dict[str, list[list[int]]]:
    """The groups that the user specified, for keys and for values."""
    groups = {"keys": options.key_groups, "values": options.value_groups}
    return {side: parse_groups(text, layers) for side, text in groups.items() if text != "auto"}


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

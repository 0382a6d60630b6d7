"""Calibrate CSR for a model: train its dictionaries, with checkpoints; how long that will take."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.dictionary import (
    INIT_VECTORS,
    Curvature,
    State,
    Training,
    check_enough,
    improved,
    start,
    train,
)
from kvpolicy.calibration.grouping import Directions, divergence, group_layers, parse_groups
from kvpolicy.calibration.run import Run
from kvpolicy.calibration.samples import collect, tokens_per_window
from kvpolicy.calibration.suitable import check_sizes
from kvpolicy.codecs.csr.dictionaries import FILE_KEY_SPACES, value_dictionary
from kvpolicy.codecs.csr.sparse import unit
from kvpolicy.engine.host import outside_autocast
from kvpolicy.hf.discovery import device_of
from kvpolicy.hf.identity import identity
from kvpolicy.hf.model_spec import describe
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import replace_file
from kvpolicy.text.strategy import least, strategy

ATOMS_PER_HEAD = 256
"""The default number of atoms of a dictionary, for each KV head."""

MAX_ATOMS = 8192
"""The maximum of this default."""


@strategy
class Dictionaries:
    """Which dictionaries are trained for CSR, and how.

    Source: CSR (arXiv:2412.11741; AAAI-25), Section 3.3 and its appendix.
    Differences: layers are compared with base-2 logarithms over the joint range of a pair, and grouped from left to
    right (the paper does not say how; its groups are adjusted by hand). The error is the mean over a batch; with the
    paper's sum, the weight of the diversity term would always be 1. This weight is computed from the same batch, not
    from the previous one. Codes are treated as constants, and the gradient of an atom has no component along the atom.
    The paper names no optimizer, learning rate or schedule; ours are damped Newton steps from the centers of a k-means,
    with a running mean of the curvature, a cosine schedule and early stopping on held-out vectors. The size of 256
    atoms "per KV head" is interpreted as the size of one dictionary for all heads.

    Attributes:
        key_spaces: The key spaces to train dictionaries for: `unrotated`, `rotated` or both.
        value_chunks: The numbers of chunks of a value to train dictionaries for, such as 1, 2 and 4.
        atoms: The number of atoms of each dictionary, N; 0 for 256 times the KV heads, at most 8192.
        pairs: Pairs per key during training, and per value over all its chunks.
        key_groups: Layers that share a dictionary of keys: `auto`, `each`, `all` or groups such as `0,1-3`.
        value_groups: The same for values.
        pair: With `auto`, the maximum divergence of two layers of a group, 0 to 1.
        chain: With `auto`, the maximum sum of the divergences of neighbors in a group.
        tokens: About how many tokens are sampled.
        seed: Seed of the sample.
        training: How each dictionary is trained.
    """

    key_spaces: tuple[str, ...] = ("unrotated",)
    value_chunks: tuple[int, ...] = (2,)
    atoms: int = least(0, 0)
    pairs: int = 8
    key_groups: str = "auto"
    value_groups: str = "auto"
    pair: float = 0.2
    chain: float = 1.0
    tokens: int = least(1, 20_480)
    seed: int = 0
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        """Check what depends on the head dimension or on several options."""
        if not self.key_spaces or set(self.key_spaces) - set(FILE_KEY_SPACES):
            raise KVPolicyError(
                f"Dictionaries.key_spaces must be 'unrotated', 'rotated' or both, got {self.key_spaces}; try "
                "('unrotated',)."
            )
        if not self.value_chunks or any(chunks < 1 or self.pairs % chunks for chunks in self.value_chunks):
            raise KVPolicyError(
                f"Dictionaries.value_chunks must be divisors of pairs={self.pairs}, got {self.value_chunks}; try (1,)."
            )


def check_chunks(options: Dictionaries, dim: int) -> None:
    """Refuse numbers of chunks that do not divide the head dimension."""
    for chunks in options.value_chunks:
        if dim % chunks:
            raise KVPolicyError(
                f"Dictionaries.value_chunks must be divisors of the head dimension, {dim}, got {chunks}; try 1."
            )


def atoms_of(options: Dictionaries, heads: int) -> int:
    """The number of atoms of each dictionary, for a model with that many KV heads."""
    return options.atoms or min(ATOMS_PER_HEAD * heads, MAX_ATOMS)


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
    """The facts that must be equal for a calibration to be continued or replaced; see `calibrate_csr`."""
    check_sizes(run.model, "csr")
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
    device = device_of(run.model)
    with outside_autocast(device):  # it takes what the model computes, in the dtype of the dictionaries
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
        between = functools.cache(lambda a, b, directions=directions: divergence(directions[a], directions[b]))
        groups[part] = group_layers(layers, between, options.pair, options.chain)
        divergences[part] = [between(a, b) for a, b in pairwise(layers)]
    return groups, divergences


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


_SMALL = 256
"""The most atoms that are initialized for the estimate."""


def estimate_csr(model: nn.Module, windows: Sequence[Tensor], options: Dictionaries) -> float:
    """Estimate how long `calibrate_csr` takes, at most: early stopping shortens it.

    One window is run, and one step is timed for each size of vectors, with random numbers.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        options: Which dictionaries will be trained, and how.

    Returns:
        Seconds.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, the text is too short, or a number of chunks does
            not divide the head dimension.

    Examples:
        >>> import kvpolicy
        >>> windows = [torch.arange(3, 40)] * 4
        >>> estimate_csr(kvpolicy.tiny()[0], windows, Dictionaries(tokens=100, atoms=16)) > 0
        True
    """
    windows = as_windows(windows)
    check_sizes(model, "csr")
    facts = identity(model, None)
    check_chunks(options, facts["head_dim"])
    counts = tokens_per_window(windows, options.tokens)
    window = _timed(
        lambda: collect(model, windows[:1], tokens=counts[0], key_spaces=options.key_spaces, seed=options.seed)
    )
    layers = len(describe(model.config).evictable)
    vectors = sum(counts) * facts["heads"] * layers
    atoms = atoms_of(options, facts["heads"])
    device = device_of(model)
    kinds = [1] * len(options.key_spaces) + list(options.value_chunks)
    seconds = window * len(windows)
    for chunks in kinds:
        check_enough(vectors * chunks, atoms)  # if all layers share a dictionary; the training refuses the rest
        with outside_autocast(device):
            seconds += _training(options, atoms, chunks, facts["head_dim"] // chunks, vectors, layers, device)
    return seconds


def _training(
    options: Dictionaries, atoms: int, chunks: int, dim: int, vectors: int, layers: int, device: torch.device
) -> float:
    """Seconds for the dictionaries of all layers, of one kind.

    Args:
        options: How they are trained.
        atoms: Atoms of a dictionary.
        chunks: Chunks of a vector.
        dim: Channels of a chunk.
        vectors: Whole vectors of all layers.
        layers: The most dictionaries: layers that share one have one with as many vectors.
        device: Device on which they are trained.
    """
    training = options.training
    generator = torch.Generator().manual_seed(0)
    batch = min(training.batch, vectors) * chunks
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float32, device="cpu").to(device)
    table = unit(torch.randn(atoms, dim, generator=generator, dtype=torch.float32, device="cpu")).to(device)
    curvature = Curvature(table)
    step = _timed(lambda: improved(x, table, options.pairs // chunks, training.rate, training.diverse, curvature))
    # Held-out vectors are encoded before the training and after each epoch.
    batches = math.ceil(vectors / training.batch)
    steps = batches * (training.epochs + training.held_out * (1 + training.epochs))
    few = min(atoms, _SMALL)
    sample = torch.randn(INIT_VECTORS * few, dim, generator=generator, dtype=torch.float32, device="cpu")
    # The time of k-means grows with the vectors and with the centers.
    beginning = _timed(lambda: start(sample, few, 0)) * (atoms / few) ** 2
    return step * steps + beginning * layers


def _timed(run: Callable[[], object]) -> float:
    """Seconds of the second run: the first one loads and allocates."""
    run()
    begin = _now()
    run()
    return _now() - begin


def _now() -> float:
    """The time when the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


UNFINISHED = "unfinished"
"""The subfolder of checkpoints in the folder of a calibration."""


class Progress:
    """Training states on disk.

    Args:
        out: The folder of the calibration.
        facts: Facts that must be equal for a training to be resumed: the model, the text and all options.

    Raises:
        KVPolicyError: If the folder contains checkpoints of another calibration.
    """

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        """Read the checkpoints in the folder."""
        self._folder = out / UNFINISHED
        self._digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        # All are read now, so that those of another calibration are refused before the model runs.
        for file in sorted(self._folder.glob("*.safetensors")):
            self._read(file)

    def load(self, name: str) -> State | None:
        """The state of a dictionary; None if its training has not started."""
        file = self._file(name)
        return self._read(file) if file.exists() else None

    def save(self, name: str, state: State) -> None:
        """Write the state of a dictionary."""
        from safetensors.torch import save

        self._folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: t.detach().cpu().clone() for key, t in state.tensors().items()}
        facts = {"mark": self._digest, "losses": json.dumps(state.losses)}
        replace_file(self._file(name), save(tensors, metadata=facts))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _read(self, file: Path) -> State:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
                facts: dict[str, str] = opened.metadata() or {}
                tensors: dict[str, Tensor] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            losses = [float(loss) for loss in json.loads(facts["losses"])]
            state = State(*(tensors[key] for key in ("atoms", "best")), losses)  # pyright: ignore[reportCallIssue]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise KVPolicyError(
                f"The checkpoint {file} must be a safetensors file of a training, got one that cannot be parsed; try "
                "deleting it."
            ) from error
        if facts.get("mark") != self._digest:
            raise KVPolicyError(
                f"The unfinished calibration in {self._folder} must be of the same model, text and options, got a "
                "different one; try finishing or deleting it, or another folder."
            )
        return state


def clear(out: Path) -> None:
    """Remove all checkpoints in the folder of a calibration, and their folder if nothing else is in it."""
    folder = out / UNFINISHED
    for file in folder.glob("*.safetensors"):
        if _is_checkpoint(file):
            file.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_checkpoint(file: Path) -> bool:
    """Whether `Progress` wrote a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
            return {"mark", "losses"} <= {*(opened.metadata() or {})}
    except (SafetensorError, OSError):
        return False

"""Calibrate CSR for a model: train its dictionaries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import collect
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.dictionary import State, Training, train
from kvpolicy.calibration.finished import check_free
from kvpolicy.calibration.grouping import Directions, divergence, group_layers, parse_groups
from kvpolicy.calibration.progress import Progress
from kvpolicy.codecs import _files
from kvpolicy.codecs._dictionaries import FILE_KEY_SPACES, value_dictionary
from kvpolicy.hf.identity import identity
from kvpolicy.hf.model_spec import describe
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.parameters import check_min

ATOMS_PER_HEAD = 256
"""The default number of atoms of a dictionary, for each KV head."""

MAX_ATOMS = 8192
"""The maximum of this default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dictionaries:
    """Which dictionaries are trained for CSR, and how.

    Source: CSR (arXiv:2412.11741; AAAI-25), Section 3.3 and its appendix.
    Differences: layers are compared with base-2 logarithms over the joint range of a pair, and grouped from left to
    right (the paper does not say how; its groups are adjusted by hand). The error is the mean over a batch; with the
    paper's sum, the weight of the diversity term would always be 1. This weight is computed from the same batch, not
    from the previous one. Codes are treated as constants, and the gradient of an atom has no component along the atom.
    The paper names no optimizer, learning rate or schedule; ours are damped Newton steps with a running mean of the
    curvature, a cosine schedule and early stopping on held-out vectors. The size of 256 atoms "per KV head" is
    interpreted as the size of one dictionary for all heads.

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
    atoms: int = 0
    pairs: int = 8
    key_groups: str = "auto"
    value_groups: str = "auto"
    pair: float = 0.2
    chain: float = 1.0
    tokens: int = 20_480
    seed: int = 0
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.key_spaces or set(self.key_spaces) - set(FILE_KEY_SPACES):
            raise KVPolicyError(
                f"Dictionaries.key_spaces must be 'unrotated', 'rotated' or both, got {self.key_spaces}; try "
                "('unrotated',)."
            )
        if not self.value_chunks or any(chunks < 1 or self.pairs % chunks for chunks in self.value_chunks):
            raise KVPolicyError(
                f"Dictionaries.value_chunks must be divisors of pairs={self.pairs}, got {self.value_chunks}; try (1,)."
            )
        check_min(self, atoms=0, tokens=1)


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
    if not force:
        check_free(out, "csr", facts)
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

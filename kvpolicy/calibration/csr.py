"""Train the dictionaries of CSR for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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
from kvpolicy.calibration.identity import identity
from kvpolicy.calibration.progress import Progress
from kvpolicy.codecs import _files
from kvpolicy.hf.model_spec import describe
from kvpolicy.spec.errors import KVPolicyError

PER_HEAD, MOST = 256, 8192
"""Atoms of a dictionary for each KV head, and the most, where their number is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dictionaries:
    """Which dictionaries CSR gets, and how they are trained.

    Source: CSR (arXiv:2412.11741; AAAI-25), Section 3.3 and its appendix.
    Differences: layers are compared with logarithms of base 2, between the least and the most of a pair, and put
    together from left to right (the paper does not say; its groups are adjusted by hand). The error is the mean over a
    batch, since with the paper's sum the weight of the diversity term would always be 1; its weight is from the same
    batch, not the one before. Codes are constants, and the gradient has no part along an atom. Optimizer, rate and
    schedule are ours, for the paper names none: Adam, a cosine, stopping early on held-out vectors. The size of 256
    atoms "per KV head" is read as the size of one dictionary for all heads.

    Attributes:
        frames: Of the keys: `pre`, `post` or both.
        sn: Into how many chunks values are cut, for each of which there is a dictionary.
        atoms: N, of each dictionary; 0 for 256 times the KV heads, at most 8192.
        pairs: Atoms per key while training, and per value over all its chunks.
        key_groups: Layers that share a dictionary of keys: `auto`, `each`, `all` or groups such as `0,1-3`.
        value_groups: Likewise of values.
        pair: With `auto`, the most that two layers of a group may differ, 0 to 1.
        chain: With `auto`, the most that the differences of a group's neighbours may sum to.
        tokens: About how many tokens' vectors are looked at.
        seed: Of the draw of tokens.
        training: How each dictionary is trained.
    """

    frames: tuple[str, ...] = ("pre",)
    sn: tuple[int, ...] = (2,)
    atoms: int = 0
    pairs: int = 8
    key_groups: str = "auto"
    value_groups: str = "auto"
    pair: float = 0.2
    chain: float = 1.0
    tokens: int = 16_384
    seed: int = 0
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.frames or set(self.frames) - {"pre", "post"}:
            raise KVPolicyError(f"The frames {','.join(self.frames)} are not known: give pre, post or pre,post.")
        if not self.sn or any(parts < 1 or self.pairs % parts for parts in self.sn):
            raise KVPolicyError(f"Each sn must divide the {self.pairs} pairs: give some of 1,2,4.")
        if self.atoms < 0 or self.tokens < 1:
            raise KVPolicyError("Give atoms of at least 0, and tokens of at least 1.")


class _Job(NamedTuple):
    """One dictionary."""

    name: str
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
    """Train CSR's dictionaries on a model's keys and values, and write them to a folder.

    What was interrupted goes on where it was, with the same model, windows and options.

    Args:
        model: A causal language model that no policy is attached to.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        options: Which dictionaries.
        name: What to call the model.
        progress: Whether to show bars.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        What was written beside the tensors.

    Raises:
        KVPolicyTypeError: Where the windows are no token ids.
        KVPolicyError: Where the model is not supported, the text too short, or `out` holds another one, unfinished or
            finished.
    """
    windows = as_windows(windows)
    model_facts, layers = identity(model, name), describe(model.config).evictable
    dim, atoms = model_facts["head_dim"], options.atoms or min(PER_HEAD * model_facts["heads"], MOST)
    if any(dim % parts for parts in options.sn):
        raise KVPolicyError(
            f"The head dimension {dim} cannot be cut into {' or '.join(map(str, options.sn))} equal chunks."
        )
    written = {key: parse_groups(text, layers) for key, text in _written(options).items()}
    facts = {"model": model_facts, "head_dim": dim, "text_sha256": text_sha256(windows), "options": asdict(options)}
    states = Progress(Path(out), facts)
    if not force:
        check_free(out, "csr", facts)
    samples = collect(
        model, windows, tokens=options.tokens, frames=options.frames, seed=options.seed, progress=progress
    ).parts()
    groups, steps = _groups(samples, layers, written, options)
    jobs = [
        _Job(f"{part}{f'.sn{chunks}' if part == 'values' else ''}.{number}", group, chunks)
        for part, found in groups.items()
        for chunks in (options.sn if part == "values" else (1,))
        for number, group in enumerate(found)
    ]
    device = next(model.parameters()).device
    done = {job.name: _run(job, samples, atoms, options, states, device, progress) for job in jobs}
    parts: dict[str, list[list[int]]] = {}
    for job in jobs:
        parts.setdefault(job.name.rpartition(".")[0], []).append(job.layers)
    meta = facts | {
        "groups": parts,
        "divergence": steps,
        "atoms": atoms,
        "tokens": next(iter(samples["values"].values())).shape[1],
        "losses": {job_name: state.losses for job_name, state in done.items()},
    }
    _files.save(out, "csr", meta, {key: state.best.mT.half().contiguous() for key, state in done.items()})
    states.clear()
    return meta


def _written(options: Dictionaries) -> dict[str, str]:
    """The groups that the user wrote."""
    found = {"keys": options.key_groups, "values": options.value_groups}
    return {side: text for side, text in found.items() if text != "auto"}


def _groups(
    samples: dict[str, dict[int, Tensor]], layers: list[int], written: dict[str, Any], options: Dictionaries
) -> tuple[dict[str, list[list[int]]], dict[str, list[float]]]:
    """The groups of each part, and how much neighbours differ where that was asked."""
    groups: dict[str, list[list[int]]] = {}
    steps: dict[str, list[float]] = {}
    for part, vectors in samples.items():
        side = part.split(".")[0]
        if not vectors:
            continue
        if side in written:
            groups[part] = written[side]
            continue
        found = {layer: Directions.of(vectors[layer]) for layer in layers}
        seen: dict[tuple[int, int], float] = {}

        def between(
            a: int, b: int, found: dict[int, Directions] = found, seen: dict[tuple[int, int], float] = seen
        ) -> float:
            if (a, b) not in seen:
                seen[a, b] = divergence(found[a], found[b])
            return seen[a, b]

        groups[part] = group_layers(layers, between, options.pair, options.chain)
        steps[part] = [between(a, b) for a, b in pairwise(layers)]
    return groups, steps


def _run(
    job: _Job,
    samples: dict[str, dict[int, Tensor]],
    atoms: int,
    options: Dictionaries,
    states: Progress,
    device: torch.device,
    progress: bool,
) -> State:
    """Train one dictionary, or go on with it."""
    part = "values" if job.name.startswith("values") else job.name.rpartition(".")[0]
    vectors = torch.cat([samples[part][layer].flatten(0, 1) for layer in job.layers])
    x = vectors.unflatten(-1, (job.chunks, -1)).flatten(0, 1).to(device)
    state = states.load(job.name)
    if state is not None:
        state = State(**{key: t.to(device) for key, t in state.tensors().items()}, losses=state.losses)
    before = 0 if state is None else len(state.losses) - 1
    with tqdm(total=options.training.epochs, initial=before, desc=job.name, disable=not progress) as bar:

        def after(reached: State) -> None:
            states.save(job.name, reached)
            bar.update(len(reached.losses) - 1 - bar.n)
            bar.set_postfix(loss=f"{reached.losses[-1]:.4f}", best=f"{min(reached.losses):.4f}")

        return train(x, atoms, options.pairs // job.chunks, options.training, state=state, after=after)

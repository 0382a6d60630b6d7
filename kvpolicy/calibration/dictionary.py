"""Training of one dictionary: vectors coded by matching pursuit, atoms moved along the gradient of what is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._pursuit import pursue
from kvpolicy.codecs._sparse import Words, spell, unit
from kvpolicy.spec.errors import KVPolicyError

_INIT = 32
"""Vectors per atom that k-means sees at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a dictionary is trained.

    Attributes:
        epochs: Rounds over all vectors.
        batch: Vectors of a step.
        rate: Adam's first learning rate; it falls to 0 along a cosine.
        patience: Epochs without a lower loss on held-out vectors after which training stops.
        held_out: Share of the vectors that only measure.
        diverse: The most that the diversity term may be, as a share of the error.
        seed: Of the start, of the split and of the order of the batches.
    """

    epochs: int = 20
    batch: int = 1024
    rate: float = 1e-2
    patience: int = 5
    held_out: float = 0.05
    diverse: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.epochs < 0 or self.batch < 1 or self.patience < 1:
            raise KVPolicyError("Give epochs of at least 0, and a batch and patience of at least 1.")
        if not 0 < self.held_out < 1 or not 0 < self.rate < math.inf or not 0 <= self.diverse < math.inf:
            raise KVPolicyError(
                "Give held_out between 0 and 1, a finite rate above 0 and a finite diverse of at least 0."
            )


class State(NamedTuple):
    """Where a training is, after an epoch.

    Attributes:
        atoms: [N, d] fp32, unit vectors.
        first: Adam's mean of the gradient, [N, d].
        second: Adam's mean of its square, [N, d].
        best: The atoms of the lowest loss so far.
        losses: On held-out vectors, before training and after each epoch: what is left of a vector's squared length,
            as a share of it over all vectors.
    """

    atoms: Tensor
    first: Tensor
    second: Tensor
    best: Tensor
    losses: list[float]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {"atoms": self.atoms, "first": self.first, "second": self.second, "best": self.best}


def losses(x: Tensor, atoms: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """The error and the diversity term, of which only the atoms have a gradient.

    The error is the mean squared length of what `pairs` atoms leave of a vector. The diversity term is
    ||I - A A^T||^2 / N^2 over the atoms' products A A^T [N, N], taken from A^T A [d, d], which is far smaller.

    Args:
        x: [n, d] fp32.
        atoms: [N, d] fp32.
        pairs: Atoms per vector.
    """
    words = Words(atoms.detach(), atoms.new_zeros(1, 1, 0, atoms.shape[1]))
    with torch.no_grad():
        index, coef = (t[0, 0] for t in pursue(x[None, None], words, pairs))
    rest = x - (coef[..., None] * atoms[index]).sum(1)
    gram = atoms.mT @ atoms
    diversity = (len(atoms) - 2 * gram.diagonal().sum() + (gram * gram).sum()) / len(atoms) ** 2
    return rest.square().sum(-1).mean(), diversity


def balance(error: Tensor, diversity: Tensor, most: float) -> Tensor:
    """The weight of the diversity term: at most 1, and such that it adds at most `most` of the error."""
    return (most * error.detach() / diversity.detach().clamp_min(1e-30)).clamp(0, 1)


def start(x: Tensor, count: int, seed: int) -> Tensor:
    """Atoms [count, d] from the centres of a k-means of the vectors [n, d]."""
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise KVPolicyError("Calibration starts from a k-means: pip install scikit-learn.") from error
    if len(x) < count:
        raise KVPolicyError(f"There are {len(x)} vectors for {count} atoms: give more text, or ask for fewer atoms.")
    generator = torch.Generator().manual_seed(seed)
    some = x[torch.randperm(len(x), generator=generator)[: _INIT * count]].cpu()
    means = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=4096)  # pyright: ignore[reportArgumentType]
    centres = unit(torch.from_numpy(means.fit(some.numpy()).cluster_centers_))
    spare = unit(torch.randn(centres.shape, generator=generator))  # a centre of zero has no direction
    return torch.where((centres * centres).sum(-1, keepdim=True) > 0.5, centres, spare).to(x.device)


def train(
    x: Tensor,
    count: int,
    pairs: int,
    training: Training,
    *,
    state: State | None = None,
    after: Callable[[State], None] | None = None,
) -> State:
    """Train a dictionary.

    Args:
        x: Vectors, [n, d] fp32.
        count: N, how many atoms.
        pairs: Atoms per vector.
        training: How.
        state: Where an interrupted training of the same vectors was; it ends as if it had not been interrupted.
        after: Called after each epoch, and once before the first.
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(training.seed))
    held = max(min(math.ceil(training.held_out * len(x)), len(x) // 2), 1)
    test, own = x[order[:held].to(x.device)], x[order[held:].to(x.device)]
    if state is None:
        atoms = start(own, count, training.seed)
        zero = torch.zeros_like(atoms)
        state = State(atoms, zero, zero, atoms, [left(test, atoms, pairs)])
        if after is not None:
            after(state)
    while len(state.losses) <= training.epochs and not _waited(state.losses, training.patience):
        state = _epoch(own, test, pairs, training, state)
        if after is not None:
            after(state)
    return state


@torch.no_grad()
def left(x: Tensor, atoms: Tensor, pairs: int) -> float:
    """What coding leaves of the vectors [n, d]: squared lengths, as a share of theirs."""
    words = Words(atoms, atoms.new_zeros(1, 1, 0, atoms.shape[1]))
    rest = x - spell(words, words.table(), *pursue(x[None, None], words, pairs))[0, 0]
    return float(rest.double().square().sum() / x.double().square().sum().clamp_min(1e-30))


def _waited(losses: list[float], patience: int) -> bool:
    return len(losses) - 1 - losses.index(min(losses)) >= patience


def _epoch(own: Tensor, test: Tensor, pairs: int, training: Training, state: State) -> State:
    epoch = len(state.losses) - 1
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch + 1)
    batches = torch.randperm(len(own), generator=generator).split(training.batch)
    atoms, first, second = (t.clone() for t in (state.atoms, state.first, state.second))
    for number, batch in enumerate(batches):
        step = epoch * len(batches) + number
        rate = training.rate * (1 + math.cos(math.pi * step / (training.epochs * len(batches)))) / 2
        slope = gradient(own[batch.to(own.device)], atoms, pairs, training.diverse)
        first.lerp_(slope, 0.1)
        second.lerp_(slope.square(), 0.001)
        mean, spread = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        atoms = unit(atoms - rate * mean / (spread.sqrt() + 1e-8))
    loss = left(test, atoms, pairs)
    best = atoms if loss < min(state.losses) else state.best
    return State(atoms, first, second, best, [*state.losses, loss])


def gradient(x: Tensor, atoms: Tensor, pairs: int, diverse: float) -> Tensor:
    """Where each atom [N, d] makes the loss larger, without what would only make the atom longer."""
    moved = atoms.detach().requires_grad_()
    with torch.enable_grad():
        error, diversity = losses(x, moved, pairs)
        total: Any = error + balance(error, diversity, diverse) * diversity
    slope = torch.autograd.grad(total, moved)[0]
    return slope - (slope * atoms).sum(-1, keepdim=True) * atoms

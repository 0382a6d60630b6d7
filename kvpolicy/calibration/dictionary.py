"""Training of one dictionary: vectors are encoded by matching pursuit, and atoms take Newton steps for the residual."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.calibration.curvature import Codes, Curvature
from kvpolicy.codecs.csr.sparse import unit
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.parameters import check_min

INIT_VECTORS = 8
"""The maximum number of vectors per atom for the initial k-means: the training corrects a rough start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a dictionary is trained.

    Attributes:
        epochs: Maximum number of epochs.
        batch: Keys or values per step.
        rate: Initial length of a step, as a fraction of a Newton step, with a cosine schedule to 0.
        patience: Epochs without a lower loss on held-out vectors after which training stops.
        held_out: Fraction of the vectors that are held out for the loss.
        diverse: The maximum of the diversity term, as a fraction of the error.
        seed: Seed of the initialization, the split and the order of the batches.
    """

    epochs: int = 5
    batch: int = 1024
    rate: float = 1.0
    patience: int = 5
    held_out: float = 0.05
    diverse: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_min(self, epochs=0, batch=1, patience=1)
        if not 0 < self.held_out < 1:
            raise KVPolicyError(
                f"Training.held_out must be greater than 0 and less than 1, got {self.held_out}; try 0.05."
            )
        if not 0 < self.rate < math.inf:
            raise KVPolicyError(f"Training.rate must be positive and finite, got {self.rate}; try 1.0.")
        if not 0 <= self.diverse < math.inf:
            raise KVPolicyError(f"Training.diverse must be at least 0 and finite, got {self.diverse}; try 0.1.")


class State(NamedTuple):
    """The state of a training after an epoch.

    Attributes:
        atoms: [N, d] fp32, unit vectors.
        best: The atoms with the lowest loss so far.
        losses: The loss on held-out vectors, before training and after each epoch; see `relative_error`.
    """

    atoms: Tensor
    best: Tensor
    losses: list[float]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {"atoms": self.atoms, "best": self.best}


def losses(codes: Codes, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """The error and the diversity term.

    The error is the mean squared norm of the residual. The diversity term is ||I - A A^T||^2 / N^2, where A A^T [N, N]
    are the products of the atoms. It is computed from A^T A [d, d], which is much smaller.

    Args:
        codes: Vectors encoded with the atoms.
        atoms: [N, d] fp32.
    """
    # ||I - A A^T||^2 = N - 2 tr(A A^T) + ||A A^T||^2, and A^T A has the same trace and the same norm.
    gram = atoms.mT @ atoms
    diversity = (len(atoms) - 2 * gram.diagonal().sum() + (gram * gram).sum()) / len(atoms) ** 2
    return codes.residual.square().sum(-1).mean(), diversity


def balance(error: Tensor, diversity: Tensor, most: float) -> Tensor:
    """The weight of the diversity term: at most 1, and so that the term is at most `most` times the error."""
    return (most * error / diversity.clamp_min(1e-30)).clamp(0, 1)


def check_enough(vectors: int, atoms: int) -> None:
    """Refuse more atoms than there are vectors to learn them from."""
    if vectors < atoms:
        raise KVPolicyError(
            f"The number of vectors must be at least that of the atoms, {atoms}, got {vectors}; try more text, or "
            "fewer atoms."
        )


def start(x: Tensor, count: int, seed: int) -> Tensor:
    """Initial atoms [count, d]: the centers of a k-means of the vectors [n, d]."""
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise KVPolicyError(
            "scikit-learn must be installed to calibrate CSR, got no such package; try pip install 'kvpolicy[calib]'."
        ) from error
    check_enough(len(x), count)
    generator = torch.Generator().manual_seed(seed)
    sample = x[torch.randperm(len(x), generator=generator, device="cpu")[: INIT_VECTORS * count]].cpu()
    means = MiniBatchKMeans(count, init="random", random_state=seed, n_init=1, batch_size=4096)  # pyright: ignore[reportArgumentType]
    centers = unit(torch.from_numpy(means.fit(sample.numpy()).cluster_centers_))
    # A center at zero has no direction and is replaced by a random one.
    random = unit(torch.randn(centers.shape, generator=generator, dtype=torch.float32, device="cpu"))
    return torch.where((centers * centers).sum(-1, keepdim=True) > 0.5, centers, random).to(x.device)


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
        count: The number of atoms, N.
        pairs: Pairs per vector.
        training: The options.
        state: The state of an interrupted training of the same vectors, to resume it; the result is the same as
            without the interruption.
        after: Called before the first epoch and after each one.
    """
    # The split depends on the seed alone, so a resumed training holds out the same vectors.
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(training.seed), device="cpu")
    num_held_out = max(min(math.ceil(training.held_out * len(x)), len(x) // 2), 1)
    held_out = x[order[:num_held_out].to(x.device)]
    train_set = x[order[num_held_out:].to(x.device)]
    if state is None:
        atoms = start(train_set, count, training.seed)
        state = State(atoms, atoms, [relative_error(held_out, atoms, pairs)])
        if after is not None:
            after(state)
    # The first loss is from before the training.
    while len(state.losses) <= training.epochs and not _is_stalled(state.losses, training.patience):
        state = _epoch(train_set, held_out, pairs, training, state)
        if after is not None:
            after(state)
    return state


def relative_error(x: Tensor, atoms: Tensor, pairs: int) -> float:
    """The squared norm of the residuals of the vectors [n, d], relative to that of the vectors."""
    residual = Codes(x, atoms, pairs).residual
    return float(residual.double().square().sum() / x.double().square().sum().clamp_min(1e-30))


def _is_stalled(losses: list[float], patience: int) -> bool:
    """Whether the lowest loss is at least `patience` epochs old."""
    return len(losses) - 1 - losses.index(min(losses)) >= patience


def _epoch(train_set: Tensor, held_out: Tensor, pairs: int, training: Training, state: State) -> State:
    epoch = len(state.losses) - 1
    # The order of the batches depends only on the seed and the epoch, and the curvature starts afresh, so that a
    # training is resumed from the atoms alone.
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch + 1)
    batches = torch.randperm(len(train_set), generator=generator, device="cpu").split(training.batch)
    atoms = state.atoms
    curvature = Curvature(atoms)
    for number, batch in enumerate(batches):
        step = epoch * len(batches) + number
        rate = training.rate * (1 + math.cos(math.pi * step / (training.epochs * len(batches)))) / 2
        atoms = improved(train_set[batch.to(train_set.device)], atoms, pairs, rate, training.diverse, curvature)
    loss = relative_error(held_out, atoms, pairs)
    # The last atoms are not always the best, and training goes on from the last.
    best = atoms if loss < min(state.losses) else state.best
    return State(atoms, best, [*state.losses, loss])


def improved(x: Tensor, atoms: Tensor, pairs: int, rate: float, diverse: float, curvature: Curvature) -> Tensor:
    """The atoms [N, d] after a step along the gradient of a batch of vectors [n, d], as unit vectors again."""
    codes = Codes(x, atoms, pairs)
    curvature.add(codes)
    return unit(atoms - rate * curvature.solve(gradient(codes, atoms, diverse)))


def gradient(codes: Codes, atoms: Tensor, diverse: float) -> Tensor:
    """The gradient of the loss with respect to the atoms [N, d], without its component along each atom."""
    weight = balance(*losses(codes, atoms), diverse)
    apart = 4 / len(atoms) ** 2 * (atoms @ (atoms.mT @ atoms) - atoms)
    grad = codes.gradient(len(atoms)) + weight * apart
    # Atoms are unit vectors: the component along an atom would only change its length.
    return grad - (grad * atoms).sum(-1, keepdim=True) * atoms

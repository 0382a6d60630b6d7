"""Training of one dictionary: vectors are encoded by matching pursuit, atoms follow the gradient of the residual."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._pursuit import pursue
from kvpolicy.codecs._sparse import Dictionary, reconstruct, unit
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.parameters import check_min

_INIT_VECTORS = 32
"""The maximum number of vectors per atom for the initial k-means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a dictionary is trained.

    Attributes:
        epochs: Maximum number of epochs.
        batch: Vectors per step.
        rate: Initial learning rate of Adam, with a cosine schedule to 0.
        patience: Epochs without a lower loss on held-out vectors after which training stops.
        held_out: Fraction of the vectors that are held out for the loss.
        diverse: The maximum of the diversity term, as a fraction of the error.
        seed: Seed of the initialization, the split and the order of the batches.
    """

    epochs: int = 20
    batch: int = 1024
    rate: float = 1e-2
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
            raise KVPolicyError(f"Training.rate must be positive and finite, got {self.rate}; try 0.01.")
        if not 0 <= self.diverse < math.inf:
            raise KVPolicyError(f"Training.diverse must be at least 0 and finite, got {self.diverse}; try 0.1.")


class State(NamedTuple):
    """The state of a training after an epoch.

    Attributes:
        atoms: [N, d] fp32, unit vectors.
        first: First moment of Adam, [N, d].
        second: Second moment of Adam, [N, d].
        best: The atoms with the lowest loss so far.
        losses: The loss on held-out vectors, before training and after each epoch; see `relative_error`.
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
    """The error and the diversity term, with gradients with respect to the atoms only.

    The error is the mean squared norm of the residual after `pairs` pairs. The diversity term is ||I - A A^T||^2 / N^2,
    where A A^T [N, N] are the products of the atoms. It is computed from A^T A [d, d], which is much smaller.

    Args:
        x: [n, d] fp32.
        atoms: [N, d] fp32.
        pairs: Atoms per vector.
    """
    dictionary = Dictionary(atoms.detach(), atoms.new_zeros(1, 1, 0, atoms.shape[1]))
    with torch.no_grad():
        index, coef = (t[0, 0] for t in pursue(x[None, None], dictionary, pairs))
    residual = x - (coef[..., None] * atoms[index]).sum(1)
    # ||I - A A^T||^2 = N - 2 tr(A A^T) + ||A A^T||^2, and A^T A has the same trace and the same norm.
    gram = atoms.mT @ atoms
    diversity = (len(atoms) - 2 * gram.diagonal().sum() + (gram * gram).sum()) / len(atoms) ** 2
    return residual.square().sum(-1).mean(), diversity


def balance(error: Tensor, diversity: Tensor, most: float) -> Tensor:
    """The weight of the diversity term: at most 1, and so that the term is at most `most` times the error."""
    return (most * error.detach() / diversity.detach().clamp_min(1e-30)).clamp(0, 1)


def start(x: Tensor, count: int, seed: int) -> Tensor:
    """Initial atoms [count, d]: the centers of a k-means of the vectors [n, d]."""
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise KVPolicyError(
            "scikit-learn must be installed to calibrate CSR, got no such package; try pip install kvpolicy[calib]."
        ) from error
    if len(x) < count:
        raise KVPolicyError(
            f"The number of vectors must be at least that of the atoms, {count}, got {len(x)}; try more text, or fewer "
            "atoms."
        )
    generator = torch.Generator().manual_seed(seed)
    sample = x[torch.randperm(len(x), generator=generator)[: _INIT_VECTORS * count]].cpu()
    means = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=4096)  # pyright: ignore[reportArgumentType]
    centers = unit(torch.from_numpy(means.fit(sample.numpy()).cluster_centers_))
    # A center at zero has no direction and is replaced by a random one.
    random = unit(torch.randn(centers.shape, generator=generator))
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
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(training.seed))
    num_held_out = max(min(math.ceil(training.held_out * len(x)), len(x) // 2), 1)
    held_out = x[order[:num_held_out].to(x.device)]
    train_set = x[order[num_held_out:].to(x.device)]
    if state is None:
        atoms = start(train_set, count, training.seed)
        zero = torch.zeros_like(atoms)
        state = State(atoms, zero, zero, atoms, [relative_error(held_out, atoms, pairs)])
        if after is not None:
            after(state)
    # The first loss is from before the training.
    while len(state.losses) <= training.epochs and not _is_stalled(state.losses, training.patience):
        state = _epoch(train_set, held_out, pairs, training, state)
        if after is not None:
            after(state)
    return state


@torch.no_grad()
def relative_error(x: Tensor, atoms: Tensor, pairs: int) -> float:
    """The squared norm of the residuals of the vectors [n, d], relative to that of the vectors."""
    dictionary = Dictionary(atoms, atoms.new_zeros(1, 1, 0, atoms.shape[1]))
    decoded = reconstruct(dictionary, dictionary.table(), *pursue(x[None, None], dictionary, pairs))[0, 0]
    residual = x - decoded
    return float(residual.double().square().sum() / x.double().square().sum().clamp_min(1e-30))


def _is_stalled(losses: list[float], patience: int) -> bool:
    """Whether the lowest loss is at least `patience` epochs old."""
    return len(losses) - 1 - losses.index(min(losses)) >= patience


def _epoch(train_set: Tensor, held_out: Tensor, pairs: int, training: Training, state: State) -> State:
    epoch = len(state.losses) - 1
    # The order of the batches depends only on the seed and the epoch, so that a resumed training has the same one.
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + epoch + 1)
    batches = torch.randperm(len(train_set), generator=generator).split(training.batch)
    atoms, first, second = (t.clone() for t in (state.atoms, state.first, state.second))
    for number, batch in enumerate(batches):
        step = epoch * len(batches) + number
        rate = training.rate * (1 + math.cos(math.pi * step / (training.epochs * len(batches)))) / 2
        grad = gradient(train_set[batch.to(train_set.device)], atoms, pairs, training.diverse)
        # Adam with betas 0.9 and 0.999; afterwards atoms are normalized again.
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.001)
        mean = first / (1 - 0.9 ** (step + 1))
        variance = second / (1 - 0.999 ** (step + 1))
        atoms = unit(atoms - rate * mean / (variance.sqrt() + 1e-8))
    loss = relative_error(held_out, atoms, pairs)
    # The last atoms are not always the best, and training goes on from the last.
    best = atoms if loss < min(state.losses) else state.best
    return State(atoms, first, second, best, [*state.losses, loss])


def gradient(x: Tensor, atoms: Tensor, pairs: int, diverse: float) -> Tensor:
    """The gradient of the loss with respect to the atoms [N, d], without its component along each atom."""
    parameters = atoms.detach().requires_grad_()
    with torch.enable_grad():
        error, diversity = losses(x, parameters, pairs)
        total: Any = error + balance(error, diversity, diverse) * diversity
    grad = torch.autograd.grad(total, parameters)[0]
    # Atoms are unit vectors: the component along an atom would only change its length.
    return grad - (grad * atoms).sum(-1, keepdim=True) * atoms

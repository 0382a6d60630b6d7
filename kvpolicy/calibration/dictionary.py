"""Training of one dictionary: vectors are encoded by matching pursuit, and atoms take Newton steps for the residual."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.csr.pursuit import pursue
from kvpolicy.codecs.csr.sparse import Dictionary, unit
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import finite, least, strategy, where

INIT_VECTORS = 8
"""The maximum number of vectors per atom for the initial k-means: the training corrects a rough start."""


@strategy
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

    epochs: int = least(0, 5)
    batch: int = least(1, 1024)
    rate: float = where(lambda value: 0 < value < math.inf, "positive and finite", 1.0)
    patience: int = least(1, 5)
    held_out: float = where(lambda value: 0 < value < 1, "greater than 0 and less than 1", 0.05)
    diverse: float = finite(0, 0.1)
    seed: int = 0


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
    # scikit-learn takes seeds of 32 bits, and PyTorch those of 64, negative ones included.
    means = MiniBatchKMeans(count, init="random", random_state=seed % 2**32, n_init=1, batch_size=4096)  # pyright: ignore[reportArgumentType]
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
    generator = torch.Generator().manual_seed((training.seed * 1_000_003 + epoch + 1) % 2**64)
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


_MEMORY = 0.97
"""Weight of the earlier batches in the running mean: about the last 33 count."""

_DAMPING = 0.3
"""Fraction of the diagonal that is added to it: codes change with the atoms, so a full step goes too far."""

_FLOOR = 1e-3
"""Fraction of the mean of the diagonal that is added besides: an atom that is never used has no curvature."""

_TINY = 1e-30


class Codes:
    """Vectors encoded with a dictionary.

    Attributes:
        index: Atoms, [n, k] int64.
        coef: Their coefficients, [n, k].
        residual: The vectors minus their encoded values, [n, d].
    """

    def __init__(self, x: Tensor, atoms: Tensor, pairs: int) -> None:
        """Encode the vectors [n, d] with the atoms [N, d] in `pairs` pairs by matching pursuit."""
        dictionary = Dictionary(atoms, atoms.new_zeros(1, 1, 0, atoms.shape[1]))
        self.index, self.coef = (t[0, 0] for t in pursue(x[None, None], dictionary, pairs))
        self.residual = x - (self.coef[..., None] * atoms[self.index]).sum(1)

    def gradient(self, count: int) -> Tensor:
        """Gradient of the mean squared norm of the residuals with respect to `count` atoms, [N, d]."""
        slopes = self.coef[..., None] * self.residual[:, None]  # [n, k, d]
        gradient = self.residual.new_zeros(count, self.residual.shape[1])
        return gradient.index_add_(0, self.index.flatten(), slopes.flatten(0, 1), alpha=-2 / len(self.residual))


class Curvature:
    """The second derivative of the error with respect to the atoms, as a running mean over batches.

    The error is the mean of ||x - C A||^2, with the coefficients C [n, N] and the atoms A [N, d]. Its second derivative
    is 2 C^T C / n for every channel: how often two atoms are used together, and how much. A plain gradient step
    corrects an error as often as atoms share it; this one corrects it once.

    Args:
        atoms: [N, d]; only its shape, type and device count.
    """

    def __init__(self, atoms: Tensor) -> None:
        """Start without any batch."""
        self._count = len(atoms)
        self._sum = atoms.new_zeros(self._count**2)
        self._batches = 0
        self._last = torch.zeros_like(atoms)

    def add(self, codes: Codes) -> None:
        """Take the codes of a batch into the mean."""
        places = codes.index[:, :, None] * self._count + codes.index[:, None]
        products = codes.coef[:, :, None] * codes.coef[:, None]
        share = 2 * (1 - _MEMORY) / len(codes.index)
        self._sum.mul_(_MEMORY).index_add_(0, places.flatten(), products.flatten(), alpha=share)
        self._batches += 1

    def mean(self) -> Tensor:
        """The mean over the batches so far, [N, N]."""
        return self._sum.view(self._count, self._count) / (1 - _MEMORY**self._batches)

    def solve(self, gradient: Tensor) -> Tensor:
        """The Newton step for a gradient [N, d]: approximately the damped curvature's inverse times it.

        It goes one step of steepest descent, scaled by the diagonal, from the solution before: the curvature of two
        batches is nearly the same, so that the solutions of many batches add up to a Newton step.
        """
        matrix = self.mean()
        diagonal = matrix.diagonal()
        # A view: this changes the diagonal of `matrix`, which `mean` has just made, and not that of the running sum.
        diagonal += _DAMPING * diagonal + (_FLOOR * diagonal.mean() + _TINY)
        rest = gradient - matrix @ self._last
        direction = rest / diagonal[:, None]
        length = (rest * direction).sum(0) / (direction * (matrix @ direction)).sum(0).clamp_min(_TINY)
        self._last = self._last + length * direction
        return self._last

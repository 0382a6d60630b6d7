"""Statistics of hidden states, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.hidden_stats import massive_tokens, sum_cosines
from tests.engine.parts import generator


def slow_massive(hidden: Tensor, valid: Tensor | None, count: int) -> list[list[bool]]:
    """Tokens of the largest numbers, one row after the other; of equal numbers, those of earlier tokens."""
    found: list[list[bool]] = []
    for b, row in enumerate(hidden.tolist()):
        numbers = [(-abs(x), t) for t, token in enumerate(row) if valid is None or bool(valid[b, t]) for x in token]
        best = {t for _, t in sorted(numbers)[:count]}
        found.append([t in best for t in range(len(row))])
    return found


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_massive_tokens(count: int, padded: bool) -> None:
    hidden = torch.randn(3, 7, 4, generator=generator(count))
    hidden[1, 2] *= 100
    valid = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]]).bool()
    got = massive_tokens(hidden, valid if padded else None, count)
    assert got.tolist() == slow_massive(hidden, valid if padded else None, count)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("length", [7, 40])
def test_of_repeated_tokens_the_earlier_ones_are_found(count: int, length: int) -> None:
    """What a first layer is given of a prompt that has every token several times."""
    vectors = torch.randn(3, 4, generator=generator(count))
    hidden = vectors[torch.randint(3, (2, length), generator=generator(length))]
    valid = torch.arange(length) >= torch.tensor([[0], [length // 2]])
    assert massive_tokens(hidden, valid, count).tolist() == slow_massive(hidden, valid, count)
    alone = massive_tokens(hidden[1:, length // 2 :], None, count)
    assert massive_tokens(hidden, valid, count)[1:, length // 2 :].equal(alone), "padding changes nothing"


def test_more_activations_than_there_are_is_all_tokens() -> None:
    assert massive_tokens(torch.ones(1, 1, 2), None, 50).tolist() == [[True]]


def slow_cosine(before: Tensor, update: Tensor, valid: Tensor | None) -> list[float]:
    """The mean over tokens of one cosine each."""
    means: list[float] = []
    for b in range(len(before)):
        cosines: list[float] = []
        for t in range(before.shape[1]):
            if valid is not None and not bool(valid[b, t]):
                continue
            x = before[b, t].double().tolist()
            y = (before[b, t].double() + update[b, t].double()).tolist()
            sizes = math.dist(x, [0] * len(x)) * math.dist(y, [0] * len(y))
            cosines.append(sum(a * c for a, c in zip(x, y, strict=True)) / sizes if sizes else 0.0)
        means.append(sum(cosines) / len(cosines) if cosines else 0.0)
    return means


@pytest.mark.parametrize("padded", [False, True])
def test_mean_cosine(padded: bool) -> None:
    before, update = (torch.randn(4, 5, 6, generator=generator(seed)) for seed in (1, 2))
    update[0] = -before[0]  # nothing is left, which is like nothing
    update[1] = -2 * before[1]
    valid = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    got = sum_cosines(before, update, valid if padded else None).mean
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(slow_cosine(before, update, valid if padded else None), abs=1e-6)


def test_half_precision_and_gradients_do_not_matter() -> None:
    before, update = (torch.randn(1, 4, 8, generator=generator(seed)).bfloat16().requires_grad_() for seed in (1, 2))
    got = sum_cosines(before, update, None).mean
    assert not got.requires_grad
    assert got.tolist() == pytest.approx(slow_cosine(before.detach(), update.detach(), None), abs=1e-5)

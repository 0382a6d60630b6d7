"""The largest numbers are those of a sorted list, ties included, in blocks too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.kernels import largest as module
from kvpolicy.kernels.largest import block_size, largest

KINDS = ["random", "ties", "equal", "signed zeros", "infinite", "ascending", "descending"]


def slow(numbers: Tensor, order: Tensor, count: int) -> list[int]:
    """Indices of one row, by a sorted list."""
    pairs = list(zip(numbers.tolist(), order.tolist(), strict=True))
    return sorted(range(len(pairs)), key=lambda at: (-pairs[at][0], pairs[at][1]))[:count]


def draw(kind: str, total: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = {
        "random": torch.randn(2, 3, total, generator=generator),
        "ties": torch.randint(-2, 3, (2, 3, total), generator=generator).float(),
        "equal": torch.full((2, 3, total), -7.5),
        "signed zeros": torch.where(torch.rand(2, 3, total, generator=generator) < 0.5, 0.0, -0.0),
        "infinite": torch.randint(-1, 2, (2, 3, total), generator=generator) / 0.0,
        "ascending": torch.arange(float(total)).expand(2, 3, -1),
        "descending": -torch.arange(float(total)).expand(2, 3, -1),
    }[kind]
    numbers = torch.where(numbers == numbers, numbers, 0.0)  # 0 / 0
    order = torch.stack([torch.randperm(total, generator=generator) for _ in range(6)]).view(2, 3, total)
    return numbers, order.int()


def check(numbers: Tensor, order: Tensor, count: int) -> None:
    found = largest(numbers, order, count)
    assert found.dtype == torch.int64
    for row in range(2):
        for head in range(3):
            assert found[row, head].tolist() == slow(numbers[row, head], order[row, head], count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [1, 7, 64, 65, 127])
def test_blocks_find_what_a_sorted_list_has_first(kind: str, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST", 1)
    sizes: set[int] = set()
    for count in {1, min(2, total), max(total // 20, 1), max(total // 2, 1), max(total - 1, 1), total}:
        sizes.add(block_size(total, count))
        check(*draw(kind, total, count), count)
    assert total < 64 or len(sizes) >= 3, "blocks of several sizes, and none"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_size_find_the_same(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as many as there are blocks, and with some numbers in no block."""
    for total in (40, 41, 47):
        for count in (1, 3, total // size):
            monkeypatch.setattr(module, "block_size", lambda *_: size)
            check(*draw(kind, total, count), count)


@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
def test_many_numbers_are_ranked_in_blocks(kind: str) -> None:
    assert block_size(8195, 410) == 4
    check(*draw(kind, 8195), 410)


def test_the_latest_position_fits() -> None:
    last = torch.iinfo(torch.int32).max
    order = torch.tensor([last, last - 1, 0], dtype=torch.int32)
    assert largest(torch.tensor([1.0, 1.0, -1.0]), order, 3).tolist() == [1, 0, 2]

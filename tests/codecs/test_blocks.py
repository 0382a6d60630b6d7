"""Which blocks of slots a write starts, and which ones it continues."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import GEAR, KIVI
from kvpolicy.codecs import gear, token_groups
from kvpolicy.codecs.blocks import Blocks, blocks_of
from kvpolicy.protocols import StageStore

SIZE = 4
SLOTS = 5 * SIZE


def found(slots: list[int], occupied: list[int], masked: tuple[int, ...] = ()) -> Blocks:
    """The blocks of a write to `slots` of one head, in which the slots `occupied` hold tokens."""
    holds = torch.zeros(SLOTS, dtype=torch.bool)
    holds[occupied] = True
    mask = torch.tensor([number not in masked for number in range(len(slots))])
    return blocks_of(torch.tensor([[slots]]), mask[None, None], holds[None, None], SIZE)


def test_started_blocks_come_first_and_are_as_many_as_the_tokens_fill() -> None:
    blocks = found([12, 13, 14, 15, 16, 5], [4, 6, 8])
    assert blocks.started.tolist() == [[[3, 4]]] and blocks.is_new.tolist() == [[[True, True]]]
    assert blocks.order.tolist() == [[[3, 4, 1, 0, 2]]]
    assert blocks.tokens(blocks.order[..., :3]).tolist() == [[[[0, 1, 2, 3], [4, -1, -1, -1], [-1, 5, -1, -1]]]]
    assert blocks.rows(torch.tensor([[[17, 12, 4]]])).tolist() == [[[1, 0, 2]]]


def test_tokens_in_old_blocks_start_none() -> None:
    blocks = found([5, 9, 0], [4, 8, 1], masked=(2,))
    assert blocks.started.shape[-1] == 1 and blocks.is_new.tolist() == [[[False]]]
    assert blocks.order.tolist() == [[[1, 2, 0]]]


@pytest.mark.parametrize("module", [gear, token_groups], ids=["gear", "kivi"])
def test_a_flush_fits_one_block_of_many(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []
    real = module.scale_and_zero

    def spy(least: Tensor, *given: Any) -> Any:
        fitted.append(least.shape[2])
        return real(least, *given)

    monkeypatch.setattr(module, "scale_and_zero", spy)
    codec = GEAR(group_size=SIZE) if module is gear else KIVI(group_size=SIZE)
    store = StageStore(codec.alloc(1, 1, SLOTS, 16, "cpu"))
    keys, values = torch.randn(2, 1, 1, SIZE, 16, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(8, 12)[None, None]
    codec.write(store, keys, values, slots, slots > 0, torch.arange(SLOTS)[None, None] < 8)
    assert fitted == [1]

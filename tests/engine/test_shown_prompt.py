"""What later layers see of a prompt: the attention of its own layer, for other queries and for the last of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpolicy.engine.attention import Past, ScoreTransform, attend
from kvpolicy.engine.shown_prompt import ShownPrompt
from tests.engine.parts import generator

ROWS, HEADS, GROUP, DIM, SLOTS, NEW = 2, 2, 3, 8, 5, 12
TRANSFORM = ScoreTransform(0.4)


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(ROWS, *sizes, DIM, generator=generator(seed))


def past_of(slots: int) -> Past | None:
    occupied = torch.arange(slots).expand(ROWS, HEADS, -1) != torch.tensor([1, 3])[:, None, None]
    return Past(drawn(HEADS, slots, seed=4), drawn(HEADS, slots, seed=5), occupied) if slots else None


def shown(k: Tensor, v: Tensor, past: Past | None, valid: Tensor | None) -> ShownPrompt:
    keys, values = (k, v) if past is None else (torch.cat([past.keys, k], 2), torch.cat([past.values, v], 2))
    return ShownPrompt(keys, values, past, valid, None)


@pytest.mark.parametrize("slots", [0, SLOTS])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(("start", "stop"), [(0, NEW), (NEW - 1, NEW), (3, 8)])
def test_other_queries_see_what_the_layer_itself_sees(slots: int, padding: int, start: int, stop: int) -> None:
    q, k, v = drawn(HEADS * GROUP, NEW, seed=1), drawn(HEADS, NEW, seed=2), drawn(HEADS, NEW, seed=3)
    valid = torch.arange(NEW).expand(ROWS, -1) >= torch.tensor([0, padding])[:, None] if padding else None
    past = past_of(slots)
    expected, _ = attend(q, k, v, TRANSFORM, past, valid, False)
    prompt = shown(k, v, past, valid)
    found = prompt.attend(q[:, :, start:stop], TRANSFORM, stop)
    assert torch.allclose(found, expected[:, :, start:stop], atol=1e-6)
    assert prompt.columns == NEW
    assert prompt.is_first == (slots == 0)


def test_all_columns_are_the_default() -> None:
    q, k, v = drawn(HEADS * GROUP, NEW, seed=1), drawn(HEADS, NEW, seed=2), drawn(HEADS, NEW, seed=3)
    prompt = shown(k, v, past_of(SLOTS), None)
    assert torch.equal(prompt.attend(q, TRANSFORM), prompt.attend(q, TRANSFORM, NEW))

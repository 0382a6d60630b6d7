"""What later layers see of a prompt: the attention of its own layer, for other queries and for the last of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError, Policy
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.shown_prompt import ShownPrompt
from kvpolicy.planning.memory import layer_spec
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import generator

ROWS = 2
HEADS = 2
GROUP = 3
DIM = 8
BEFORE = 9
NEW = 12
TRANSFORM = ScoreTransform(0.4)
SELECTORS = ["h2o", "snapkv:window=4", "probe", "dropkv", "keyformer", "scissorhands", "a2sf", "compactor"]


def drawn(heads: int, columns: int, seed: int) -> Tensor:
    return torch.randn(ROWS, heads, columns, DIM, generator=generator(seed))


def vectors(columns: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(HEADS * GROUP, columns, seed), drawn(HEADS, columns, seed + 1), drawn(HEADS, columns, seed + 2)


def store_of(policy: str, group: int, *, used: bool) -> LayerStore:
    """A layer, which may hold slots of an earlier prompt that all of its query heads ranked alike."""
    store = LayerStore(layer_spec(Policy.parse(policy), 0))
    q, k, v = vectors(BEFORE, 50)
    store.initialize(k, group=group)
    if used:
        q = q.unflatten(1, (HEADS, GROUP)).repeat(1, 1, group // GROUP, 1, 1).flatten(1, 2)
        compress(store, store.attend_prompt(q, k, v, None, TRANSFORM)[1])
    return store


def compress(store: LayerStore, pending: PendingPrompt) -> None:
    keep = torch.full((ROWS,), 8)
    store.compress(pending, RowBudget(keep, torch.zeros_like(keep), keep))


def valid_of(padding: int) -> Tensor | None:
    return torch.arange(NEW).expand(ROWS, -1) >= torch.tensor([0, padding])[:, None] if padding else None


def shown(store: LayerStore, padding: int) -> tuple[Tensor, ShownPrompt]:
    q, k, v = vectors(NEW, 1)
    out, pending = store.attend_new(q, k, v, valid_of(padding), TRANSFORM)
    return out, store.show_prompt(k, v, pending, None)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(("start", "stop"), [(0, NEW), (NEW - 1, NEW), (3, 8)])
def test_other_queries_see_what_the_layer_itself_sees(used: bool, padding: int, start: int, stop: int) -> None:
    expected, prompt = shown(store_of("window@8", GROUP, used=used), padding)
    found = prompt.attend(vectors(NEW, 1)[0][:, :, start:stop], TRANSFORM, stop)
    assert torch.allclose(found, expected[:, :, start:stop], atol=1e-6)
    assert prompt.is_first != used


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("tile", [NEW, 5])
@pytest.mark.parametrize(
    ("policy", "used"),
    # Keyformer adds up over query heads, so that an earlier prompt weighs more in a layer with more of them.
    [(policy, used) for policy in SELECTORS for used in (False, True) if policy != "keyformer" or not used],
)
def test_its_layer_keeps_what_one_with_all_query_heads_keeps(policy: str, tile: int, padding: int, used: bool) -> None:
    _, k, v = vectors(NEW, 1)
    own = vectors(NEW, 1)[0]
    other = drawn(HEADS * GROUP, NEW, 9)
    both = torch.cat([own.unflatten(1, (HEADS, -1)), other.unflatten(1, (HEADS, -1))], 2).flatten(1, 2)
    alone = store_of(f"{policy}@8", 2 * GROUP, used=used)
    compress(alone, alone.attend_prompt(both, k, v, valid_of(padding), TRANSFORM)[1])
    store = store_of(f"{policy}@8", GROUP, used=used)
    _, prompt = shown(store, padding)
    for start in range(0, NEW, tile):
        prompt.attend(other[:, :, start : start + tile], TRANSFORM, min(start + tile, NEW))
    compress(store, store.end_prompt(prompt.pending, None))
    assert torch.equal(store.geometry.head_positions().sort().values, alone.geometry.head_positions().sort().values)


def test_other_weights_of_the_same_scores_are_refused() -> None:
    _, prompt = shown(store_of("h2o@8", GROUP, used=False), 0)
    q: Any = vectors(NEW, 1)[0]
    with pytest.raises(KVPolicyError, match="must turn scores into attention alike"):
        prompt.attend(q, ScoreTransform(0.5))

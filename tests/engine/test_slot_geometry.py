"""A layer's own count of the steps that it has slots for, and slots for more: what is held stays where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvpolicy.codecs.plain import Plain
from kvpolicy.engine.editing import note_move
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.layout import UNLIMITED
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.engine.slot_geometry import SlotGeometry
from kvpolicy.protocols import View
from kvpolicy.statistics import Results
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.parts import Ranking, Worth
from tests.readers.bench import Layer, draw

PROMPT = 12
CODED = "tokenwise:block_size=3:residual_length=2"


def layer_of(policy: str, new: int = 0) -> Layer:
    layer = Layer(policy, [PROMPT], new=new)
    layer.prompt(*draw(PROMPT, 1))
    assert isinstance(layer.store.geometry, SlotGeometry)
    return layer


@pytest.mark.parametrize(
    ("policy", "can"), [("full", True), (f"full+{CODED}", True), ("h2o@0.5", False), (f"h2o+{CODED}@0.5", True)]
)
def test_what_can_run_out_of_slots(policy: str, can: bool) -> None:
    layer = layer_of(policy)
    assert layer.store.contents.can_run_out == can
    assert (layer.store.geometry.count_free_steps() < UNLIMITED) == can


@pytest.mark.parametrize("new", [1, 2, 5])
def test_free_steps_of_a_growing_layer_are_those_announced(new: int) -> None:
    layer = layer_of("full", new)
    for left in range(new, 0, -1):
        assert layer.store.geometry.count_free_steps() == left
        layer.step(*draw(1, 10 + left))
        layer.store.count_step()
    assert layer.store.geometry.count_free_steps() < 1
    assert layer.store.ensure_capacity() >= 1
    assert layer.store.geometry.count_free_steps() >= 1


@pytest.mark.parametrize("policy", ["full", f"full+{CODED}", "full+quest:read=6:page=2:dense=0"])
@pytest.mark.parametrize("more", [1, 7, 40])
def test_reserved_slots_leave_tokens_as_they_are(policy: str, more: int) -> None:
    layer = layer_of(policy, 2)
    layer.step(*draw(1, 2))
    layer.between()
    before = layer.store.past()
    held = layer.store.tensors.positions[layer.store.tensors.positions >= 0].sort().values
    budget = int(layer.store.tensors.budget)
    given = layer.store.reserve(more)
    assert given == max(0, more - 1) == int(layer.store.tensors.budget) - budget
    assert layer.store.reserve(more) == 0, "there is room already"
    after = layer.store.past()
    assert before is not None and after is not None
    assert torch.equal(layer.store.tensors.positions[layer.store.tensors.positions >= 0].sort().values, held)
    for one, other in zip(before[:2], after[:2], strict=True):
        assert torch.equal(one[before.occupied].sort(0).values, other[after.occupied].sort(0).values)
    for step in range(more):
        layer.step(*draw(1, 30 + step))
        layer.store.count_step()


@dataclass(kw_only=True)
class RankingAgain(Ranking):
    """Ranks all slots again after four tokens."""

    rerank_every: int = 4

    def rerank(self, state: Worth, seen: Results, view: View) -> Worth:
        return state


@pytest.mark.parametrize("by", [5, -3])
def test_a_move_neither_hastens_nor_delays_the_next_ranking(by: int) -> None:
    selector: Any = RankingAgain()
    store = LayerStore(LayerSpec(0, selector, Plain(), "evict"))
    q, k, v = draw(PROMPT, 1)
    store.initialize(k)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(1.0))
    keep = torch.tensor([PROMPT])
    store.compress(pending, RowBudget(keep, torch.zeros_like(keep), keep))
    note_move(store, by)
    assert store.tensors.length.tolist() == [PROMPT + by] and int(store.tensors.columns) == PROMPT + by
    due = [bool(store.contents.schedule.due(store.tensors.length + more, store.tensors.budget)) for more in range(6)]
    assert due == [False] * 4 + [True] * 2


def test_more_slots_leave_a_larger_budget_as_it_is() -> None:
    """A budget may exceed all tokens that were announced: slots follow as they come."""
    selector: Any = Ranking(decode="grow")
    store = LayerStore(LayerSpec(0, selector, Plain(), "grow"))
    q, k, v = draw(PROMPT, 1)
    store.initialize(k)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(1.0))
    keep = torch.tensor([60])
    expected = torch.tensor([PROMPT])
    store.compress(pending, RowBudget(keep, torch.zeros_like(keep), expected))
    for more, budget in ((20, 60), (48, 60), (50, 62)):
        store.reserve(more)
        assert store.contents.expected_len == [PROMPT + more] and store.tensors.budget.tolist() == [budget]

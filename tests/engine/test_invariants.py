"""Every invariant fails where a layer was broken by hand, and names the rule."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_store import LayerStore
from tests.conformance.bench import Bench, draw
from tests.engine.paged import HEADS, Run
from tests.readers.bench import Layer
from tests.readers.bench import draw as draw_for_readers

Damage = Callable[[Any], object]
CODED = "tokenwise:group_size=2:residual_length=3:block_size=4"


def slots(policy: str) -> LayerStore:
    """A layer whose heads have equal budgets, after two prompts of two rows and a step."""
    bench = Bench(policy, [12, 8])
    for number, count in enumerate((20, 5, 1)):
        bench.forward(*draw(count, number, batch=2))
    return bench.layer


def pages(codec: str) -> LayerStore:
    """A layer whose heads have budgets of their own, after a prompt of two rows."""
    run = Run("h2o", AdaKV(), [24, 12], codec=codec)
    run.prompt([40, 33])
    assert run.store.tensors.pages is not None
    return run.store


def read_in_part(reader: str) -> LayerStore:
    """A layer of which steps read a part, after a prompt."""
    layer = Layer(f"full+{reader}", [26])
    layer.prompt(*draw_for_readers(26, 0))
    return layer.store


def put(path: str, at: Any, value: Any) -> Damage:
    """Write a number into a tensor or a list of a store."""

    def damage(store: LayerStore) -> None:
        attrgetter(path)(store)[at] = value

    return damage


def repeat_a_position(store: Any) -> None:
    store.tensors.positions[0, 0] = int(store.tensors.length[0]) - 1


def lose_the_newest(store: Any) -> None:
    store.tensors.positions[store.tensors.positions == store.tensors.length[:, None, None] - 1] = -1


def add_a_row(store: Any) -> None:
    store.contents.expected_len.append(3)


def count_steps(store: Any) -> None:
    """A layer that must wait for a demotion has a limited number of steps."""
    store.contents.free_steps = 99


def leave_nan_in_an_empty_slot(store: Any) -> None:
    store.tensors.positions[0, 0, 0] = -1
    store.tensors.keys[0, 0, 0] = torch.nan


def leave_nan_in_a_buffer(store: Any) -> None:
    store.tensors.keys[store.tensors.positions[..., : store.layout.exact] < 0] = torch.nan


def use_a_slot_of_a_longer_row(store: Any) -> None:
    first = store.layout.exact
    store.tensors.positions[1, :, -1] = store.tensors.positions[1, :, first]
    store.tensors.positions[1, :, first] = -1


def give_all_pages_to_one_head(store: Any) -> None:
    store.tensors.paged().owner[store.tensors.paged().owner < store.shape.heads] = 0


def take_all_pages_of_a_head(store: Any) -> None:
    mine = store.tensors.paged().owner == 1
    store.tensors.positions[mine] = -1
    store.tensors.paged().owner[mine] = store.shape.heads


def complete_too_early(store: Any) -> None:
    store.tensors.paged().complete[:] = ~store.tensors.paged().complete


def write_behind_a_buffer(store: Any) -> None:
    page, slot = (store.tensors.positions[0] >= 0).nonzero()[-1].tolist()
    store.tensors.positions[0, -1, -1] = store.tensors.positions[0, page, slot].item()
    store.tensors.positions[0, page, slot] = -1


def widen_an_index(store: Any) -> None:
    store.tensors.reads.index.bounds[0, 0, 0] += 1


def read_more(store: Any) -> None:
    store.tensors.reads.limit.add_(1)


CODES = "h2o+kivi:group_size=4:residual_length=3@0.5"
QUEST = "quest:read=8:page=4:dense=0"
BROKEN: list[tuple[Callable[[str], LayerStore], str, Damage, str]] = [
    (slots, "h2o@0.5", repeat_a_position, "holds a position once"),
    (slots, "h2o@0.5", put("tensors.positions", (0, 0, 0), 999), "of tokens that the row has seen"),
    (slots, "h2o@0.5", lose_the_newest, "its row's newest token"),
    (slots, "h2o@0.5", put("tensors.budget", ..., 3), "at most its budget"),
    (slots, "h2o@0.5", put("contents.expected_len", 0, 3), "has slots for"),
    (slots, "h2o@0.5", add_a_row, "expected_len has all rows"),
    (slots, "h2o@0.5", put("tensors.columns", ..., 1), "no more tokens than columns"),
    (slots, "h2o@0.5", put("contents.schedule.ranked_len", 0, 999), "no row was ranked with tokens"),
    (slots, "h2o@0.5", leave_nan_in_an_empty_slot, "keys of empty slots are finite"),
    (slots, CODES, leave_nan_in_a_buffer, "keys of empty slots are finite"),
    (slots, CODES, count_steps, "no step is counted that has no slot"),
    (slots, CODES, put("tensors.limits.flush_threshold", ..., 1), "a full buffer was demoted"),
    (slots, CODES, use_a_slot_of_a_longer_row, "no more slots of stage 0"),
    (slots, "h2o+merge@0.5", put("tensors.counts", (0, 0, 0), -1.0), "at least one token"),
    (slots, "h2o+merge@0.5", put("tensors.counts", (0, 0, 0), 9.0), "tokens that the row has seen"),
    (pages, "plain", repeat_a_position, "holds a position once"),
    (pages, "plain", lose_the_newest, "its row's newest token"),
    (pages, "plain", take_all_pages_of_a_head, "its row's newest token"),
    (pages, "plain", put("tensors.budget", ..., 3), "at most the budget of their layer"),
    (pages, "plain", put("tensors.pages.owner", (0, 0), HEADS), "a page without an owner holds nothing"),
    (pages, "plain", put("tensors.pages.owner", (0, 0), HEADS + 1), "the owner of a page is a head, or none"),
    (pages, "plain", give_all_pages_to_one_head, "holds a position once"),
    (pages, "plain", complete_too_early, "`complete` equals a recount"),
    (pages, CODED, write_behind_a_buffer, "nothing stands behind the end of a buffer"),
    (pages, CODED, put("tensors.pages.owner", (slice(None), -1), 0), "the pages of a buffer belong to its head"),
    (pages, CODED, put("tensors.limits.flush_threshold", ..., 1), "a full buffer was demoted"),
    (read_in_part, QUEST, widen_an_index, "the index equals a recomputation"),
    (read_in_part, QUEST, read_more, "as many entries as it would alone"),
]


@pytest.mark.parametrize(("make", "words", "damage", "rule"), BROKEN)
def test_what_is_broken_is_named(make: Callable[[str], LayerStore], words: str, damage: Damage, rule: str) -> None:
    store = make(words)
    check_invariants(store)
    damage(store)
    with pytest.raises(AssertionError, match=rule):
        check_invariants(store)


def test_a_layer_before_its_first_prompt() -> None:
    check_invariants(Bench("h2o@0.5", [4]).layer)

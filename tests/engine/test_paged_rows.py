"""Rows with head budgets are selected, repeated and reordered, and go on as each would alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.even import Even
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.engine.pages import owned_by
from kvpolicy.protocols import HeadRequest, ModelInfo
from kvpolicy.statistics.windows import ScoreTransform
from tests.engine.paged import HEADS, SCALE, Run
from tests.engine.parts import pages_of

CODECS = ["plain", "tokenwise:group_size=2:residual_length=3:block_size=4"]
"""The second has parameters of each head."""
BUDGETS = [70, 9]
"""Their pages differ in size, so that those of one row are cut in a batch."""


@pytest.mark.parametrize(("index", "codec"), [([1, 1, 0], CODECS[0]), ([1, 0], CODECS[1]), ([1, 1, 0], CODECS[1])])
def test_rows_that_evict(index: list[int], codec: str) -> None:
    """In steps, in a prompt in which a row has nothing, and in steps after it."""
    run = Run("h2o", AdaKV(safeguard=0.0), BUDGETS, codec=codec)
    run.prompt([80, 33])
    for _ in range(3):
        run.step()
    run.select(index)
    for number in range(6):
        run.step(valid=[number % 3 != 1, *[True] * (len(index) - 1)])
    run.prompt([*[7] * (len(index) - 1), 0])  # nothing for the row of larger pages
    for _ in range(5):
        run.step()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_grow(codec: str) -> None:
    run = Run("h2o", Even(), BUDGETS, grows=True, codec=codec)
    run.prompt([80, 30], extra=5)
    for number in range(8):
        run.step(valid=[number % 2 == 0, True])
    run.select([1, 0])
    for number in range(20):
        run.step(valid=[True, number % 4 != 0])


@pytest.mark.parametrize("codec", CODECS)
def test_a_row_that_grows_and_begins_later(codec: str) -> None:
    """It has no token in the prompt of the other row, and pages when its first one comes, also in a step."""
    run = Run("h2o", AdaKV(), [20, 12], grows=True, codec=codec)
    run.prompt([30, 0], extra=5)
    run.step(valid=[True, False])
    store = copy.deepcopy(run.store)
    for count in range(1, 7):
        store.append(*run.draw(1), None, ScoreTransform(SCALE))
        store.count_step()
        store.ensure_capacity()
        assert store.geometry.tokens_by_head()[1].tolist() == [count] * HEADS
    run.prompt([6, 18], extra=5)
    for number in range(12):
        run.step(valid=[True, number % 3 != 1])


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_which_one_was_announced_too_few_tokens(codec: str) -> None:
    """The other one has all the pages of its budget, and evicts."""
    run = Run("h2o", AdaKV(), [60, 8], last=22, codec=codec)
    run.prompt([20, 20])
    run.rows[0].room = [60] * HEADS
    for _ in range(4):
        run.step()
    run.select([1, 0])
    for _ in range(40):
        run.step()
    assert run.store.geometry.tokens_by_head().tolist() == [[8] * HEADS, [60] * HEADS]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("idle", [0, 1])
def test_a_row_without_a_token_keeps_its_budget_and_its_pages(idle: int, codec: str) -> None:
    """Whatever budget it is given with the prompt of the other row."""
    run = Run("h2o", AdaKV(safeguard=0.0), [*BUDGETS], codec=codec)
    run.prompt([80, 33])
    run.budgets[idle] = 40
    run.prompt([7 * (row != idle) for row in range(2)])
    assert int(run.store.tensors.budget[idle]) == BUDGETS[idle]
    for _ in range(5):
        run.step()


def test_only_rows_without_a_free_slot_are_given_pages() -> None:
    run = Run("h2o", Even(), [60, 60], last=22)
    run.prompt([20, 10])
    run.rows[0].room = run.rows[1].room = [60] * HEADS
    given: list[list[bool]] = []
    for _ in range(20):
        free = pages_of(run.store)._free_slots().tolist()
        before = list(run.store.contents.expected_len)
        run.step()
        added = [after > tokens for after, tokens in zip(run.store.contents.expected_len, before, strict=True)]
        assert added == [slots == 1 for slots in free], "the step took the last one"
        given.append(added)
    assert [True, False] in given and [False, True] in given


def test_pages_that_cannot_be_divided_go_to_the_first_heads_also_where_they_are_added() -> None:
    """A budget of 10 tokens for each of three heads is seven pages of 4 slots."""
    run = Run("h2o", Even(), [10], last=6)
    run.prompt([5])
    run.rows[0].room = [12, 8, 8]
    for _ in range(20):
        run.step()
    assert run.store.geometry.tokens_by_head().tolist() == [[12, 8, 8]]


@pytest.mark.parametrize(("more", "codec"), [(1, CODECS[0]), (7, CODECS[1]), (17, CODECS[0]), (17, CODECS[1])])
def test_reserved_pages_have_room_and_leave_statistics_as_they_are(more: int, codec: str) -> None:
    run = Run("h2o", AdaKV(), [24, 12], grows=True, codec=codec)
    run.prompt([50, 30], extra=2)
    run.step()

    def statistics() -> list[dict[int, float]]:
        positions, state = pages_of(run.store)._body.held_slots()
        pairs = zip(positions.flatten(0, 1).tolist(), state.score.flatten(0, 1).tolist(), strict=True)
        return [{p: score for p, score in zip(*head, strict=True) if p >= 0} for head in pairs]

    before = statistics()
    run.store.reserve(more)
    assert statistics() == before
    assert int(pages_of(run.store)._free_slots().min()) >= more
    assert run.store.reserve(more) == 0, "there is room already"
    run.step()


class Noting:
    """Divides evenly, and notes what it is asked for."""

    def __init__(self) -> None:
        self.requests: list[HeadRequest] = []
        self.compares_heads = False

    def check(self, model: ModelInfo) -> None:
        """Any model will do."""

    def divide(self, request: HeadRequest) -> Tensor:
        self.requests.append(request)
        return Even().divide(request)


def test_a_head_may_always_have_an_equal_share() -> None:
    """Also in a row without a new token, which keeps its pages while fewer tokens are announced than before."""
    heads = Noting()
    run = Run("h2o", Even(), [70, 70], last=47)
    pages_of(run.store)._allocator = heads
    run.prompt([20, 20])
    run.last = 22
    for lengths in ([2, 0], [0, 2]):
        run.prompt(lengths)
    assert len(heads.requests) == 3
    for request in heads.requests:
        assert (request.most >= request.pages // HEADS).all()


def test_the_parameters_of_a_head_are_fitted_to_its_own_first_codes(tmp_path: Path) -> None:
    """Heads that keep little are encoded for the first time in a step, when others hold codes already."""
    HEAD_FILES.save(tmp_path / "heads.json", HeadFile(((0.5, 0.1, 0.9), (0.2, 0.3, 0.5))))
    heads = DuoAttention(file=str(tmp_path / "heads.json"), sinks=2, recent=4)
    codec = "tokenwise:group_size=2:residual_length=8:block_size=9"
    run = Run("snapkv:window=6:kernel=3", heads, [40], last=50, grows=True, codec=codec)
    run.prompt([60], extra=20)
    store = run.store
    pages: Any = pages_of(store)._body

    def coded() -> list[bool]:
        body = pages._parts(store.tensors.positions)[0]
        return (owned_by(pages.owner, HEADS)[0] & (body[0] >= 0).any(-1)).any(-1).tolist()

    assert sorted(coded()) == [False, False, True] or sorted(coded()) == [False, True, True]
    for _ in range(14):
        run.step()
    assert all(coded())

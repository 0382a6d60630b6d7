"""Random operations on layers whose heads have budgets of their own, with attention as uneven as it can be."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError
from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.allocators.even import Even
from kvpolicy.engine.decode import NO_PAGE
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.protocols import HeadRequest
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.testing.part_checks import check_divided
from tests.conformance.extremes import EXTREMES
from tests.engine.paged import HEADS, SCALE, SELECTORS, NearTie, Run
from tests.sampling import product

CODEC = "tokenwise:group_size=2:residual_length=3:block_size=4"
ALLOCATORS = [AdaKV(), AdaKV(safeguard=0.0), AdaKV(safeguard=0.5), Even()]


def walk(seed: int, merger: str) -> None:
    """A prompt, then steps, chunks, rejected drafts and choices of rows; the slow version of each row goes along."""
    dice = Random(seed)
    selector = dice.choice([*SELECTORS])
    least = 8 if selector.startswith("snapkv") else 4  # its window must fit into whole pages
    budgets = [dice.randint(least, 50) for _ in range(dice.randint(1, 3))]
    grows = dice.random() < 0.2
    codec = dice.choice(["plain", "plain", CODEC])
    run = Run(selector, dice.choice(ALLOCATORS), budgets, grows=grows, codec=codec, merger=merger)
    extra = 5 if grows else 0
    extreme = dice.choice(EXTREMES)
    lengths = [dice.randint(1, 60) for _ in budgets]
    run.prompt(lengths, run.draw(max(lengths), extreme=extreme, place=dice.randint(0, 9)), extra)
    for _ in range(dice.randint(5, 20)):
        extreme = dice.choice([extreme, extreme, *EXTREMES])
        place = dice.randint(0, 9)
        operation = dice.choice(["step", "step", "step", "chunk", "rows", "draft"])
        if operation == "step":
            run.step(run.draw(1, extreme=extreme, place=place), [dice.random() < 0.8 for _ in run.rows])
        elif operation == "chunk":
            lengths = [*(dice.choice([0, 2, 9]) for _ in run.rows[1:]), dice.randint(1, 9)]
            run.prompt(lengths, run.draw(max(lengths), extreme=extreme, place=place), extra)
        elif operation == "rows":
            run.select([dice.randrange(len(run.rows)) for _ in range(dice.randint(1, 3))])
        else:
            reject(run, dice.randint(1, 3))


def reject(run: Run, tokens: int) -> None:
    """Write a draft of some tokens, and take it back."""
    run.store.journal.mark(tokens)
    for _ in range(tokens):
        run.store.append(*run.draw(1), None, ScoreTransform(SCALE))
        run.store.count_step()
        run.store.ensure_capacity()
        check_invariants(run.store)
    run.store.journal.roll_back(0)
    run.check()


SAMPLE = [*((seed, "drop") for seed in range(16)), *((seed, "compensate") for seed in range(10))]


@product("seed,merger", range(3000), ["drop", "compensate"], sample=SAMPLE)
def test_uneven_attention(seed: int, merger: str) -> None:
    with contextlib.suppress(NearTie):
        walk(seed, merger)


class Greedy(Even):
    """A head allocator that gives the first head all pages."""

    def divide(self, request: HeadRequest) -> Tensor:
        """All pages to the first head."""
        return torch.nn.functional.pad(request.pages[:, None], (0, HEADS - 1))


@pytest.mark.parametrize("codec", ["plain", CODEC])
def test_a_head_without_a_page_is_refused(codec: str) -> None:
    run = Run("h2o", Greedy(), [24], codec=codec)
    with pytest.raises(KVPolicyError, match="must give every head at least 1 page, got"):
        run.prompt([40])
    with pytest.raises(AssertionError, match="must have a page"):
        check_divided(Greedy(), HEADS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", ["plain", CODEC])
def test_a_step_writes_nothing_where_a_head_owns_no_page(codec: str, backend: str) -> None:
    """The page that the head would write into belongs to another one."""
    run = Run("h2o", AdaKV(), [24], codec=codec)
    run.prompt([40])
    store = run.store
    store.tensors.paged().owner[store.tensors.paged().owner == 1] = 2
    store.contents.note_slots()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return store.append(q, k, v, None, ScoreTransform(SCALE))

    torch._dynamo.reset()
    held = (store.tensors.positions, store.tensors.keys, store.tensors.values)
    before = [t.clone() for t in held]
    with pytest.raises(RuntimeError, match=NO_PAGE):
        torch.compile(step, fullgraph=True, backend=backend)(*run.draw(1))
    assert all(map(torch.equal, held, before))


def test_a_row_without_a_token_may_have_no_page() -> None:
    run = Run("h2o", AdaKV(), [24, 16])
    run.prompt([40, 30])
    run.store.tensors.paged().owner[1, run.store.tensors.paged().owner[1] == 0] = 1
    run.store.contents.note_slots()  # what an edit of its pages ends with
    run.store.append(*run.draw(1), torch.tensor([[True], [False]]), ScoreTransform(SCALE))
    with pytest.raises(RuntimeError, match=NO_PAGE):
        run.store.append(*run.draw(1), None, ScoreTransform(SCALE))

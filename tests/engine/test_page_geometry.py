"""Pages of heads against one list of tokens for each head: kept positions, outputs, and growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.even import Even
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.engine.geometry import step_bytes
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.pages import row_pages
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.budget import fewest_tokens, page_size
from tests.engine.paged import DIM, HEADS, LOOKING, SCALE, SELECTORS, Run
from tests.reference import head_allocators
from tests.sampling import product, star

ALLOCATORS = [AdaKV(), AdaKV(safeguard=0.0), AdaKV(safeguard=1.0), AdaKV(safeguard=0.7), Even()]


@product(
    "selector,heads",
    [*SELECTORS],
    ALLOCATORS,
    sample=star([*SELECTORS], ALLOCATORS, centers=[("", ALLOCATORS[0]), ("snapkv:window=6:kernel=3", None)]),
    ids=str,
)
def test_prompts_and_steps_are_those_of_a_list(selector: str, heads: Any) -> None:
    run = Run(selector, heads, [40, 17])
    run.prompt([60, 33])
    for number in range(20):
        run.step(valid=[True, number % 3 != 1])
    run.prompt([9, 0])  # a chunk or a turn in which the second row has nothing
    run.steps(5)


@pytest.mark.parametrize(
    ("selector", "sinks", "recent"),
    [("window", 0, 60), ("snapkv:window=6:kernel=3", 2, 4), ("snapkv:window=6:kernel=3", 0, 60)],
)
def test_streaming_heads_keep_little(selector: str, sinks: int, recent: int, tmp_path: Path) -> None:
    """Also where streaming heads would take more than there is, and where retrieval heads cannot use what is left."""
    HEAD_FILES.save(tmp_path / "heads.json", HeadFile(((0.5, 0.1, 0.9), (0.2, 0.3, 0.5))))
    heads = DuoAttention(file=str(tmp_path / "heads.json"), sinks=sinks, recent=recent)
    run = Run(selector, heads, [40, 17], last=50)
    run.prompt([70, 33])
    for number in range(10):
        run.step(valid=[True, number % 3 != 1])
    run.prompt([9, 0])
    run.steps(3)


def test_heads_differ_in_the_memory_of_the_pages() -> None:
    run = Run("snapkv:window=6:kernel=3", AdaKV(), [64])
    run.prompt([200])
    held = run.store.geometry.tokens_by_head()[0]
    assert held.sum() == 64 * HEADS and held.max() > held.min()
    assert run.store.tensors.keys.numel() == 64 * HEADS * DIM
    assert run.store.tensors.positions.shape == (1, 24, 8)
    assert run.store.tensors.paged().owner.shape == (1, 24)


@pytest.mark.parametrize(("budget", "last"), [(200, 47), (90, 90)])
def test_a_row_that_fits_keeps_every_token(budget: int, last: int) -> None:
    """Also where the budget is no multiple of a page; slots follow when more tokens come than were announced."""
    run = Run("h2o", AdaKV(), [budget], last=last)
    run.prompt([40])
    if last == 47:
        run.rows[0].room = [200] * HEADS
    run.steps(60)
    if last == 47:
        assert run.store.geometry.tokens_by_head().tolist() == [[100] * HEADS]


CODED = "tokenwise:group_size=2:residual_length=3:block_size=4"
GROWING = [
    ("h2o", AdaKV(), "plain", 5),
    ("h2o", AdaKV(), "plain", 16),
    *((selector, heads, "plain", 8) for selector, heads in zip(LOOKING, [AdaKV(safeguard=0.0), Even()], strict=True)),
    *((selector, AdaKV(), CODED, 5) for selector in ["h2o", *LOOKING]),
]


@pytest.mark.parametrize(("selector", "heads", "codec", "extra"), GROWING, ids=str)
def test_a_growing_cache(selector: str, heads: Any, codec: str, extra: int) -> None:
    """The next prompt ranks anew what is held, by the queries or keys so far, generated tokens included."""
    run = Run(selector, heads, [24, 16], grows=True, codec=codec)
    run.prompt([60, 33], extra=extra)
    for number in range(30):
        run.step(valid=[True, number % 4 != 0])
    run.prompt([9, 0], extra=extra)
    run.prompt([1, 20], extra=extra)
    run.steps(12)


def test_a_growing_cache_whose_heads_have_different_room() -> None:
    """A head that holds every token of the prompt has free slots in its last page, and the others have none."""
    run = Run("h2o", AdaKV(safeguard=0.0), [29], grows=True)
    run.prompt([30], extra=4)
    assert run.store.geometry.tokens_by_head().tolist() == [[30, 28, 24]], "of 36, 32 and 28 slots"
    run.steps(10)


@pytest.mark.parametrize(("budget", "length"), [(4, 20), (5, 20), (7, 20), (8, 1)])
def test_the_smallest_budgets(budget: int, length: int) -> None:
    run = Run("h2o", AdaKV(), [budget, 31])
    run.prompt([length, 40])
    run.steps(9)


def test_equal_scores_are_broken_by_position_and_head() -> None:
    run = Run("h2o:recent=0.9", AdaKV(safeguard=0.0), [16])
    q, k, v = run.draw(30)
    run.prompt([30], (torch.zeros_like(q), k, v))
    for _ in range(10):
        q, k, v = run.draw(1)
        run.step((torch.zeros_like(q), k, v))


@pytest.mark.parametrize("codec", ["plain", CODED])
def test_one_graph_for_heads_of_any_size(codec: str) -> None:
    def step(store: LayerStore, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return store.append(q, k, v, None, ScoreTransform(SCALE))

    def demote(store: LayerStore) -> None:
        store.geometry.demote()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # a reset leaves the counts of other tests
    compiled: Any = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
    block: Any = torch.compile(demote, fullgraph=True, backend="eager", dynamic=False)
    shares = set[tuple[int, ...]]()
    for seed in range(3):
        run = Run("h2o", AdaKV(safeguard=0.0), [40], codec=codec)
        run.dice.manual_seed(seed)
        run.prompt([100])
        shares.add(tuple(run.store.geometry.tokens_by_head()[0].tolist()))
        for _ in range(6):
            q, k, v = run.draw(1)
            expected = run.rows[0].forward(q[0], k[0], v[0], SCALE)
            torch.testing.assert_close(compiled(run.store, q, k, v)[0], expected.float(), atol=1e-5, rtol=1e-4)
            if codec != "plain":
                block(run.store)
            run.rows[0].tick()
            run.store.count_step()
            run.check()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1 if codec == "plain" else 2)
    assert len(shares) == 3, "heads differ from prompt to prompt"


def test_a_step_reads_all_pages() -> None:
    run = Run("h2o", AdaKV(), [40])
    run.prompt([60])
    expected = step_bytes(run.store.geometry).moved
    run.step()
    kinds = run.store.nbytes_by_kind()
    assert run.store.contents.link.moved == expected == kinds["exact"] + kinds["positions"]


def test_sizes_are_the_largest_of_which_a_head_has_eight() -> None:
    for tokens in [*range(1, 70), 100, 127, 128, 255, 256, 511, 512, 10**6]:
        assert page_size(tokens) == head_allocators.page_size(tokens), tokens


def test_the_fewest_tokens_leave_an_average_head_enough() -> None:
    for tokens in [*range(1, 70), 100, 513]:
        fewest = fewest_tokens(tokens)
        enough = [n for n in range(4, fewest + 1) if n // page_size(n) * page_size(n) >= tokens]
        assert enough == [fewest], tokens


@pytest.mark.parametrize("keep", [4, 31, 32, 100, 1000])
def test_pages_of_a_row(keep: int) -> None:
    for last in (3, 99, 100, 101, 5000):
        rows = row_pages(torch.tensor([keep]), torch.tensor([5]), torch.tensor([last]), HEADS)
        expected = head_allocators.room(keep, last, HEADS)
        assert (int(rows.size), int(rows.body)) == (expected.size, expected.pages), last
        assert int(rows.tail) * expected.size >= 5 > (int(rows.tail) - 1) * expected.size, last
        if keep >= last:
            assert int(rows.body) * expected.size >= HEADS * last, "nothing is lost to rounding"
        else:
            assert int(rows.body) * expected.size <= HEADS * keep, "the budget is not exceeded"


def test_a_batch_has_the_pages_of_its_largest_row_in_the_smallest_size() -> None:
    for keep in ([512, 33], [33, 512]):
        rows = row_pages(torch.tensor(keep), torch.tensor([0, 0]), torch.tensor([999, 999]), HEADS)
        assert rows.size.tolist() == [64 if tokens == 512 else 4 for tokens in keep]
        assert rows.allocated(HEADS) == (512 * HEADS // 4, 4)

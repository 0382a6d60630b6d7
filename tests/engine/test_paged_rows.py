"""Rows with head budgets are selected, repeated and reordered, and go on as each would alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy
from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.even import Even
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.codecs import common
from kvpolicy.engine import page_codes
from kvpolicy.engine.coded_pages import CodedPageBody
from kvpolicy.engine.page_attention import BufferedPages, ExactPages, attend_pages
from kvpolicy.engine.pages import Owners, owned_by
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.protocols import ALONE, HeadRequest, ModelInfo
from kvpolicy.statistics.windows import ScoreTransform
from tests.codecs.compiling import call_directly
from tests.conformance.models import build
from tests.conformance.play import make_batch, talk
from tests.engine.paged import HEADS, SCALE, Run
from tests.engine.parts import pages_of
from tests.sampling import each_once, product

CODECS = ["plain", "tokenwise:group_size=2:residual_length=3:block_size=4"]
"""The second has parameters of each head."""
BUDGETS = [70, 9]
"""Their pages differ in size, so that those of one row are cut in a batch."""


@pytest.mark.parametrize(("index", "codec"), [([1, 1, 0], CODECS[0]), ([1, 0], CODECS[1]), ([1, 1, 0], CODECS[1])])
def test_rows_that_evict(index: list[int], codec: str) -> None:
    """In steps, in a prompt in which a row has nothing, and in steps after it."""
    run = Run("h2o", AdaKV(safeguard=0.0), BUDGETS, codec=codec)
    run.prompt([80, 33])
    run.steps(3)
    run.select(index)
    for number in range(6):
        run.step(valid=[number % 3 != 1, *[True] * (len(index) - 1)])
    run.prompt([*[7] * (len(index) - 1), 0])  # nothing for the row of larger pages
    run.steps(5)


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
    run.steps(4)
    run.select([1, 0])
    run.steps(40)
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
    run.steps(5)


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
    run.steps(20)
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
    run.steps(14)
    assert all(coded())


GROWING = ["blend", "elastic", "kvmerger", "merge", "keepkv", "zsmerge", "d2o", "regress", "compensate"]

SNAPKV = "snapkv:window=6:kernel=3"


BOTH: dict[str, Any] = {"softcap": 2.0, "sinks": torch.linspace(-2, 3, HEADS * 2)}


@pytest.mark.parametrize(
    ("merger", "selector", "codec", "transform"),
    [
        ("compensate", "h2o", CODECS[0], {}),
        ("compensate", "h2o", CODECS[0], BOTH),
        ("compensate", "window", CODECS[1], {}),
        ("compensate", SNAPKV, CODECS[1], {}),
        *((merger, "h2o", CODECS[1], {}) for merger in ("merge", "keepkv", "zsmerge", "d2o")),
        *((merger, SNAPKV, CODECS[0], {}) for merger in ("blend", "elastic", "kvmerger", "regress")),
        ("drop", "h2o", CODECS[0], {"softcap": 2.0}),
        ("drop", "h2o", CODECS[0], {"sinks": BOTH["sinks"]}),
    ],
)
def test_prompts_and_steps(merger: str, selector: str, codec: str, transform: dict[str, Any]) -> None:
    """A prompt, steps that evict, a later prompt that divides the pages again, and steps behind it.

    Mergers that compare keys merge into buffers, which a codec has for each head.
    """
    run = Run(selector, AdaKV(safeguard=0.0), [70, 12], codec=codec, merger=merger, **transform)
    run.prompt([120, 33])
    run.steps(9)
    run.prompt([7, 40])
    for number in range(9):
        run.step(valid=[True, number % 3 != 1])
    if merger == "compensate":
        assert run.store.tensors.log_counts is not None and float(run.store.tensors.log_counts.max()) > 2


@pytest.mark.parametrize("codec", CODECS)
def test_retrieval_heads_keep_all_and_streaming_heads_one_slot_for_the_rest(codec: str, tmp_path: Path) -> None:
    """RazorAttention: one head of three retrieves."""
    path = str(tmp_path / "heads.json")
    HEAD_FILES.save(path, HeadFile(((0.1, 0.9, 0.2),), sinks=2, recent=10))
    run = Run(
        "window", DuoAttention(file=path, sparsity=0.67, sinks=2, recent=10), [36], codec=codec, merger="compensate"
    )
    run.prompt([60])
    counts = run.rows[0].heads
    assert [max(token.count for token in head.tokens) for head in counts] == [60 - 12 + 1, 1, 60 - 12 + 1]
    run.steps(25)
    assert [sum(token.count for token in head.tokens) for head in counts] == [85, 85, 85], "no token is lost"


@product("merger,codec", GROWING, CODECS, sample=each_once(GROWING, CODECS))
def test_mergers_in_prompts_of_a_cache_that_grows(merger: str, codec: str) -> None:
    run = Run(SNAPKV, AdaKV(), [40, 24], grows=True, codec=codec, merger=merger)
    run.prompt([80, 33], extra=5)
    run.steps(8)
    run.prompt([0, 20], extra=5)
    run.step()


ENCODING = [
    CODECS[1],
    "tokenwise:normalize=false:residual_length=0:block_size=1",
    "bfp:block_channels=3:residual_length=2:block_size=5",
    "turboquant:residual_length=3:block_size=2",
]


@pytest.mark.parametrize(
    ("codec", "transform", "direct"),
    [
        *((codec, {}, False) for codec in ENCODING),
        ("tokenwise:group_size=4:residual_length=3:block_size=4", {}, True),
        *((codec, BOTH, True) for codec in ENCODING),
    ],
)
def test_prompts_and_steps_are_those_of_a_list(
    codec: str, transform: dict[str, Any], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages that are decoded, and read without: but for blocks of 3 of 8 channels, which are unequal."""
    called = call_directly(monkeypatch) if direct else []
    run = Run("h2o", AdaKV(safeguard=0.0), [24, 12], codec=codec, dim=8, **transform)
    run.prompt([40, 23])
    for number in range(9):
        run.step(valid=[True, number % 3 != 1])
    reads = [name for name in called if name != "quantize"]
    assert len(reads) == (18 if direct and not codec.startswith("bfp") else 0)
    run.prompt([7, 0])  # a chunk or a turn in which the second row has nothing
    run.steps(5)


def test_pages_that_change_hands_keep_the_parameters_of_their_head() -> None:
    """Heads swap which attends to many tokens, so that pages of one head become the other's."""
    run = Run("h2o", AdaKV(safeguard=0.0), [24], codec=CODECS[1])
    for turn in range(3):
        q, k, v = run.draw(30)
        # Channels of very different means by head: the parameters of another head would be far off.
        k = k + torch.arange(HEADS)[:, None, None] * torch.linspace(-50, 50, k.shape[-1])
        q = q * torch.tensor([0.0, 0.02, 1.0]).roll(turn).repeat_interleave(2)[:, None, None]
        run.prompt([30], (q, k, v))
        run.step()
    assert len({*run.store.geometry.tokens_by_head()[0].tolist()}) > 1


def test_an_automatic_buffer_grows_with_its_row() -> None:
    run = Run("h2o", AdaKV(), [20], grows=True, codec="tokenwise:group_size=2")
    store = run.store
    q, k, v = run.draw(30)
    store.initialize(k, group=2)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(SCALE))
    keep, extra, last = (torch.tensor([count]) for count in (20, 5, 30))
    store.compress(pending, RowBudget(keep, extra, keep + extra, last))
    small = store.layout.exact
    store.reserve(130)
    assert store.tensors.limits is not None
    assert store.layout.exact == int(store.tensors.limits.flush_threshold) > small, "as many as wait for a demotion"
    held = store.geometry.tokens_by_head()
    for count in range(1, 8):
        store.append(*run.draw(1), None, ScoreTransform(SCALE))
        store.count_step()
        assert torch.equal(store.geometry.tokens_by_head(), held + count)


def test_a_few_pages_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_codes, "CHUNK_SLOTS", 9)
    run = Run("h2o", AdaKV(), [40], codec=CODECS[1])
    run.prompt([60])
    body = pages_of(run.store)._body
    assert isinstance(body, CodedPageBody)
    pages = run.store.tensors.paged().owner.shape[1]
    assert body.owner.shape[1] < pages, "the buffers stand behind the pages of codes"
    monkeypatch.setattr(common, "MAX_CHUNKS", pages)
    run.steps(3)


@pytest.mark.parametrize(
    "spec",
    [
        "uniform/adakv+h2o+tokenwise@0.3",
        "squeeze/adakv+snapkv:window=4:kernel=3+bfp:residual_length=3@0.5",
        "uniform/adakv+h2o:decode=grow+turboquant@0.4",
        "uniform/even+h2o+tokenwise:bits=fp8:block_size=6@12000B",
        "uniform/adakv+expected:sinks=2:horizon=6:decode=grow@0.5",
    ],
)
def test_the_plan_is_what_is_held(spec: str) -> None:
    model = build("llama")
    tokens, mask = make_batch([40, 27], [43])
    with kvpolicy.attach(model, spec):
        cache = kvpolicy.PolicyCache(model)
        talk(model, tokens, mask, [40, 1, 1, 1], cache)
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        assert cache.nbytes <= 12000 or "B" not in spec.partition("@")[2]
        for layer, shown in zip(cache.policy_layers, cache.report().layers, strict=True):
            assert [list(row) for row in shown.heads] == layer.store.geometry.tokens_by_head().tolist()
    for layer in cache.policy_layers:
        assert layer.owner is not None and layer.owner.shape == layer.positions.shape[:2]
        held = [set(layer.positions[0][layer.owner[0] == head].flatten().tolist()) - {-1} for head in range(2)]
        assert [len(head) for head in held] == layer.store.geometry.tokens_by_head()[0].tolist()


@pytest.mark.parametrize("codec", ["kivi", "gear", "rotate", "kvquant", "mikv", "zipcache", "staircase", "minicache"])
def test_codecs_that_share_more_than_a_head_are_refused(codec: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must encode every token by itself .* try tokenwise or bfp"):
        Policy.parse(f"uniform/adakv+snapkv+{codec}@0.5")


@pytest.mark.parametrize("policy", ["uniform/adakv+expected@0.5", "uniform/even+keydiff:decode=grow@0.5"])
def test_selectors_that_look_at_keys_in_steps_are_refused(policy: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must not look at keys, or all slots .* try snapkv, h2o or exp"):
        Policy.parse(policy)


@pytest.mark.parametrize("above", [-200.0, 0.0, 200.0])
def test_scores_of_a_buffer_may_be_far_from_those_of_pages(above: float) -> None:
    """Exponentials of their difference would be infinite."""
    keys = torch.ones(1, 1, 4, 1)
    values = torch.zeros(1, 1, 4, 1)
    buffer = torch.full((1, 1, 4, 1), 1 + above), torch.ones(1, 1, 4, 1)
    occupied = torch.ones(1, 2, 4, dtype=torch.bool)
    owner = torch.zeros(1, 2, dtype=torch.int64)
    pages = BufferedPages(ExactPages(keys, values), *buffer, 4)
    found = attend_pages(torch.ones(1, 1, 1, 1), pages, ~occupied, Owners.of(owner, 1, ALONE.once), ScoreTransform(1.0))
    want = {-200.0: 0.0, 0.0: 0.5, 200.0: 1.0}[above]
    assert found.out.flatten().tolist() == [want]
    assert found.weights.sum(-1).flatten().tolist() == [1 - want, want]


def test_a_head_without_a_token_attends_to_nothing() -> None:
    """Whether its page is empty or it has none; in a row that has not begun, no head has one."""
    pages = ExactPages(torch.ones(2, 2, 4, 1), torch.ones(2, 2, 4, 1))
    empty = torch.tensor([[False, True], [True, True]])[..., None].expand(2, 2, 4)
    owners = Owners.of(torch.tensor([[0, 1], [0, 3]]), 3, ALONE.once)
    found = attend_pages(torch.ones(2, 3, 1, 1), pages, empty, owners, ScoreTransform(1.0))
    assert found.out.flatten().tolist() == [1, 0, 0, 0, 0, 0]
    assert found.weights.sum((2, 3)).tolist() == [[1, 0], [0, 0]]

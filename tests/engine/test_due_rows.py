"""Block work of a batch of many lengths: each row is encoded when it is due, and no other one with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine import decode, layer_store, reranking
from kvpolicy.engine.due_rows import Rows, due_rows, only_rows
from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.state import map_state, select_rows, tensors
from kvpolicy.protocols import View, rerank_every
from kvpolicy.registry import lookup
from kvpolicy.testing import check_cache
from tests.conformance.access import coded_positions, kept_positions
from tests.conformance.models import build, layers_for
from tests.conformance.play import forward, make_batch
from tests.conformance.policies import CODECS, SELECTORS, words
from tests.engine.test_layer_store import Exact, draw, prompted
from tests.sampling import product

LENGTHS = [38, 37, 36, 35, 33, 32, 31, 30]
IDLE = [0, 3, 1, 2, 2, 0, 3, 1]
"""Steps that each row waits after its prompt: blocks of one token each are demoted at other steps then."""
STEPS = 20
BLOCKS = [name for name in CODECS if lookup(name)[1]().traits.block]
"""Codecs that demote tokens."""
RERANKING = [name for name in SELECTORS if rerank_every(lookup(name)[1]())]


def due_now(store: LayerStore) -> list[int]:
    """The rows with a full buffer."""
    full = store.geometry.full_rows()
    return [] if full is None else full.nonzero()[:, 0].tolist()


def run(
    policy: str, told: Callable[[PolicyCache], None] = lambda cache: None, rows: list[int] | None = None
) -> tuple[PolicyCache, Tensor]:
    """The cache after a ragged prompt and decode steps, and the logits of these; it is `told` after each forward.

    With `rows`, no others are in the batch.
    """
    model = build("llama", layers=layers_for(policy))
    ids, mask = make_batch(LENGTHS, [LENGTHS[0]] + [1] * STEPS)
    for row, steps in enumerate(IDLE):
        mask[row, LENGTHS[0] : LENGTHS[0] + steps] = 0
    some = [*range(len(LENGTHS))] if rows is None else rows
    ids = ids[some]
    mask = mask[some]
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, prompt=[LENGTHS[row] for row in some], new=STEPS)
        forward(model, ids, mask, 0, LENGTHS[0], cache)
        told(cache)
        logits: list[Tensor] = []
        for column in range(LENGTHS[0], LENGTHS[0] + STEPS):
            logits.append(forward(model, ids, mask, column, column + 1, cache))
            told(cache)
    check_cache(cache)
    return cache, torch.cat(logits, 1)


def of_all_rows(due: Tensor | None) -> list[Rows]:
    """`due_rows` as if one due row made the work of all."""
    if due is None or not bool(due.any()):
        return []
    return [Rows([*range(len(due))], slice(0, len(due)))]


@pytest.mark.parametrize(
    ("due", "parts"),
    [
        ([], []),
        ([3], [[3]]),
        ([2, 3, 4], [[2, 3, 4]]),
        ([0, 5], [[0, 5]]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ([0, 2, 3, 4, 7], [[0, 2], [3, 4], [7]]),
    ],
)
def test_due_rows_come_in_ranges_or_in_small_parts(due: list[int], parts: list[list[int]]) -> None:
    found = due_rows(torch.tensor([row in due for row in range(8)]))
    assert [rows.numbers for rows in found] == parts
    for rows in found:
        assert torch.arange(8)[rows.at].tolist() == rows.numbers
        assert isinstance(rows.at, slice) == (rows.numbers[-1] - rows.numbers[0] < len(rows.numbers))


def test_no_codec_has_no_due_rows() -> None:
    assert due_rows(None) == []


ROWS_OF_TWO = [Rows([1], slice(1, 2)), Rows([1], torch.tensor([1]))]


@pytest.mark.parametrize("rows", ROWS_OF_TWO)
def test_what_is_written_to_some_rows_is_written_to_the_layer(rows: Rows) -> None:
    store = a_layer()
    whole = store.tensors
    positions = whole.positions
    codes = [t.data_ptr() for t in tensors(whole.codes)]
    before = positions.clone()
    with only_rows(store.contents, rows):
        assert store.tensors.positions.shape[0] == len(store.tensors.length) == len(store.contents.expected_len) == 1
        assert torch.equal(store.tensors.positions, before[1:])
        store.tensors.positions.fill_(7)
        for t in tensors(store.tensors.codes):
            t.fill_(3)
    assert store.tensors is whole and whole.positions is positions and len(store.contents.expected_len) == 2
    assert torch.equal(positions[0], before[0]) and bool((positions[1] == 7).all())
    assert codes == [t.data_ptr() for t in tensors(whole.codes)], "compiled steps refer to these"
    for t in tensors(whole.codes):
        assert bool((t[1] == 3).all()) and not bool((t[0] == 3).all())


@pytest.mark.parametrize("rows", ROWS_OF_TWO)
def test_a_layer_has_all_its_rows_again_after_an_error(rows: Rows) -> None:
    store = a_layer()
    whole = store.tensors
    with pytest.raises(ZeroDivisionError), only_rows(store.contents, rows):
        raise ZeroDivisionError
    assert store.tensors is whole and len(store.contents.expected_len) == 2


def test_only_the_parts_that_are_named_are_written_back() -> None:
    store = a_layer()
    before = store.tensors.positions.clone()
    with only_rows(store.contents, ROWS_OF_TWO[1], written=("state",)):
        store.tensors.positions.fill_(7)
        for t in tensors(store.tensors.state):
            t.fill_(5)
    assert torch.equal(store.tensors.positions, before)
    for t in tensors(store.tensors.state):
        assert bool((t[1] == 5).all()) and not bool((t[0] == 5).all())


def a_layer() -> LayerStore:
    """A layer of two rows with codes, after a prompt."""
    codec = Exact(block=2, residual=1)
    return prompted(LayerStore(LayerSpec(0, kvpolicy.H2O(), codec, "evict")), *draw(6, 0))


PAGED = "uniform/adakv+h2o+tokenwise:residual_length=4:block_size=4@0.5"
LOW_RANK = "h2o+gear:bits=4:group_size=4:rank=2:residual_length=4@0.5"
POLICIES = [*(words("h2o", codec) for codec in BLOCKS), PAGED, LOW_RANK]
EVERY = [(policy,) for policy in POLICIES]


def spy(kind: Any, name: str, told: list[int], patch: pytest.MonkeyPatch) -> None:
    """Tell how many rows the arguments of a method of a class have."""
    real = getattr(kind, name)

    def call(self: Any, *given: Any) -> Any:
        told.append(next(len(argument) for argument in given if isinstance(argument, Tensor)))
        return real(self, *given)

    patch.setattr(kind, name, call)


@product("policy", POLICIES, sample=EVERY)
def test_only_due_rows_are_encoded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step and in each layer, the codec is given the rows that are due, and no others."""
    encoded: list[int] = []
    dues: list[int] = []
    written: list[int] = []
    real = LayerStore.demote

    def demote(self: LayerStore) -> None:
        due = due_now(self)
        encoded.clear()
        real(self)
        assert all(count <= len(due) for count in encoded), f"{len(due)} rows are due, and {encoded} are encoded"
        group = self.contents.group
        demotion = self.spec.codec_traits.demotion
        if len(self.spec.stages) == 1 and (demotion is None or not demotion.recodes):
            waits = group is not None and self.contents.number == 0
            assert sum(encoded) == (0 if waits else len(due))
        dues.append(len(due))
        written.append(sum(encoded))

    def watch(cache: PolicyCache) -> None:
        if not dues_begin:
            dues_begin.append(len(dues))
            for kind in {type(stage) for layer in cache.policy_layers for stage in layer.store.spec.stages}:
                spy(kind, "write_group" if hasattr(kind, "write_group") else "write", encoded, monkeypatch)

    dues_begin: list[int] = []
    monkeypatch.setattr(LayerStore, "demote", demote)
    run(policy, told=watch)
    assert 0 < max(dues) < len(LENGTHS), "some rows are due where others are not"
    assert sum(written)


IN_GROUPS = [policy for policy in POLICIES if kvpolicy.Policy.parse(policy).codec.traits.group_size > 1]


@product("policy", IN_GROUPS, sample=[(policy,) for policy in IN_GROUPS])
def test_a_write_starts_no_more_groups_than_its_tokens_fill(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs fit parameters for so many groups only; see `Stage.write`."""
    codec = kvpolicy.Policy.parse(policy).codec
    size = codec.traits.group_size
    started: list[int] = []

    def watch(kind: Any) -> None:
        real = kind.write

        def write(self: Any, store: Any, keys: Any, values: Any, slots: Tensor, mask: Tensor, occupied: Tensor) -> None:
            after = F.pad(occupied, (0, 1)).scatter(-1, slots.where(mask, occupied.shape[-1]), True)[..., :-1]
            before, now = (t.unflatten(-1, (-1, size)).any(-1) for t in (occupied, after))
            new = int((now & ~before).sum(-1).max())
            assert new <= -(-slots.shape[-1] // size)
            started.append(new)
            real(self, store, keys, values, slots, mask, occupied)

        monkeypatch.setattr(kind, "write", write)

    for kind in {type(stage) for stage in codec.stages}:
        watch(kind)
    run(policy)
    assert {0, 1} < {*started}, "tokens continue groups, a block starts one group, and a prompt starts several"


@product("policy", POLICIES, sample=EVERY)
def test_what_is_held_is_what_work_on_all_rows_would_leave(policy: str) -> None:
    """Bit for bit, in every tensor of every layer, after many steps."""
    check_alike(policy)


READING = [
    "full+kivi:group_size=4:residual_length=4+quest:read=8:page=2:dense=0@1.0",
    "h2o+zipcache:recode_every=5+exact:read=6@0.5",
    "h2o+zipcache:recode_every=5+retrieval:recent=1:read=6:cluster=3:sinks=2@0.5",
    "window+mikv:high=0.3:high_bits=8:residual_length=2:block_size=3+reuse:every=2:dense=0:full=false/exact:read=6@0.5",
    "window+zipcache:recode_every=5+reuse:every=2:dense=0:full=false/exact:read=6@0.5",
]


@product("policy", READING, sample=[(policy,) for policy in READING])
def test_so_does_the_index_of_a_reader(policy: str) -> None:
    check_alike(policy)


@product("selector", RERANKING, sample=[(RERANKING[0],), (RERANKING[-1],)])
def test_only_due_rows_are_ranked_again(selector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that work on all rows would rank, and to the same ranks."""
    policy = words(selector)
    ranked: list[int] = []
    dues: list[int] = []
    real_rank = reranking.rank_again

    def rank(selector: Any, state: Any, seen: Any, view: View) -> None:
        ranked.append(len(view.positions))
        real_rank(selector, state, seen, view)

    monkeypatch.setattr(reranking, "rank_again", rank)
    real = reranking.due_rows

    def noted(due: Tensor | None) -> list[Rows]:
        if due is not None:
            dues.append(int(due.sum()))
        return real(due)

    monkeypatch.setattr(reranking, "due_rows", noted)
    run(policy)
    assert sum(ranked) == sum(dues) > 0 and min(ranked) < len(LENGTHS)
    monkeypatch.undo()
    due = torch.tensor([])

    def all_rows(found: Tensor | None) -> list[Rows]:
        nonlocal due
        due = due if found is None else found
        return of_all_rows(found)

    def rank_all(selector: Any, state: Any, seen: Any, view: View) -> None:
        before = map_state(torch.clone, state)
        real_rank(selector, state, seen, view)
        decode.assign_state(state, select_rows(due, state, before))

    check_alike(policy, all_rows, rank_all)


def check_alike(
    policy: str, all_rows: Callable[[Tensor | None], list[Rows]] = of_all_rows, rank: Any = reranking.rank_again
) -> None:
    """Logits, and every tensor of every layer, are what they would be if one due row made the work of all."""
    mine, logits = run(policy)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layer_store, reranking):
            patch.setattr(module, "due_rows", all_rows)
        patch.setattr(reranking, "rank_again", rank)
        whole, others = run(policy)
    assert torch.equal(logits, others)
    for one, other in zip(mine.policy_layers, whole.policy_layers, strict=True):
        assert one.store.contents.numbers() == other.store.contents.numbers()
        parts = other.store.tensors.parts()
        for name, part in one.store.tensors.parts().items():
            if name == "reads":  # `check_cache` computes it again, but for empty slots, whose entries are never read
                continue
            for a, b in zip(tensors(part), tensors(parts[name]), strict=True):
                assert torch.equal(a, b), f"layer {one.layer_idx}, {name}"


ALONE = ["full+gear:bits=4:group_size=4:rank=2:residual_length=4@1.0", *(words("h2o", codec) for codec in BLOCKS)]


@product("policy", ALONE, sample=[(ALONE[0],), *((words("h2o", name),) for name in ("kivi", "staircase", "zipcache"))])
def test_a_row_holds_what_it_would_alone(policy: str) -> None:
    """Positions in every slot of every layer, after many steps; numbers differ by the noise of the model."""
    together, logits = run(policy)
    for row in (0, 3, 7):
        alone, own = run(policy, rows=[row])
        assert (own[0] - logits[row])[IDLE[row] :].abs().max() < 0.1
        for mine, ours in zip(alone.policy_layers, together.policy_layers, strict=True):
            assert kept_positions(mine)[0] == kept_positions(ours)[row]
            assert coded_positions(mine.store)[0] == [
                [stage[: len(own_stage)] for stage, own_stage in zip(head, own_head, strict=True)]
                for head, own_head in zip(coded_positions(ours.store)[row], coded_positions(mine.store)[0], strict=True)
            ]


def test_a_demotion_asks_the_device_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are due, whether any is left, and how many steps are free."""
    asked: list[int] = []
    store_demote = LayerStore.demote
    waits = {name: getattr(Tensor, name) for name in ("tolist", "__bool__", "__int__", "item", "nonzero")}

    def demote(self: LayerStore) -> None:
        due = due_now(self)
        count = 0

        def counting(real: Any) -> Any:
            def call(*given: Any, **more: Any) -> Any:
                nonlocal count
                count += 1
                return real(*given, **more)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name, real in waits.items():
                patch.setattr(Tensor, name, counting(real))
            store_demote(self)
        asked.append(count if due else 0)

    monkeypatch.setattr(LayerStore, "demote", demote)
    run("h2o+kivi:group_size=4:residual_length=4@0.5")
    assert max(asked) == 3

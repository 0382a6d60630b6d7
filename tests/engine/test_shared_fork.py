"""`PolicyCache.fork(shared=True)`: the slots of a text are held once for all rows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.shared_prefix import SharedPrefix
from kvpolicy.planning.result import SHARED
from kvpolicy.text.errors import KVPolicyStateError
from tests.conformance.access import addresses, kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.sampling import each_once, product

TEXT = 40
ROWS = 3
TURNS = [TEXT, 6, 1, 1, 1, 1, 1]
"""A text, a question behind it, and an answer."""

GROWING = ["full", "window:decode=grow@0.5", "snapkv:window=4:decode=grow@0.5", "keydiff:decode=grow@0.5"]
HEADS = "uniform/adakv+snapkv:window=4:decode=grow@0.5"
CODED = [
    "snapkv:window=4:decode=grow+kivi:bits=4:group_size=4:residual_length=4@0.7",
    "full+csr:prompt_atoms=4:block_size=8",
    "full+turboquant",
    "h2o+mikv@0.5",
]


def conversation(lengths: list[int], turns: list[int] = TURNS) -> tuple[Tensor, Tensor]:
    """The same text in each row, and behind it a question of its own, padded on its left to the longest one."""
    ids, mask = make_batch([turns[0]] * len(lengths), turns)
    ids[:, : turns[0]] = ids[0, : turns[0]].clone()
    for row, length in enumerate(lengths):
        mask[row, turns[0] : turns[0] + turns[1] - length] = 0
    return ids.where(mask.bool(), 0), mask


def read_text(model: Any, ids: Tensor) -> PolicyCache:
    """A cache with the text of a conversation, in one row."""
    cache = PolicyCache(model, new=0)
    forward(model, ids[:1], torch.ones_like(ids[:1]), 0, TEXT, cache)
    return cache


@contextmanager
def reading(lengths: list[int], policy: str = "snapkv:window=4@0.5", family: str = "llama") -> Generator[Any]:
    """A model under a policy, a cache with the text of a conversation, and the conversation."""
    model = build(family)
    ids, mask = conversation(lengths)
    with kvpolicy.attach(model, policy):
        yield model, read_text(model, ids), ids, mask


@pytest.mark.parametrize("own", ["full", "window@4", "full+tokenwise"])
@pytest.mark.parametrize("chunks", ["select", "hold"])
def test_prompts_that_wait_in_codes_do_not_wait_behind_a_prefix(own: str, chunks: Any) -> None:
    """Whose tokens need not be in codes, whatever those of the prefix are in."""
    model = build("llama")
    ids, mask = conversation([6, 4, 5])
    found: list[list[Tensor]] = []
    for hold in ("plain", "codes"):
        with kvpolicy.attach(model, "full+tokenwise", chunks=chunks, hold=hold):
            cache = read_text(model, ids).fork([0] * ROWS, shared=True, own=own)
            found.append(go_on(model, cache, ids, mask))
    assert all(map(torch.equal, *found))


def go_on(model: Any, cache: PolicyCache, ids: Tensor, mask: Tensor, turns: list[int] = TURNS) -> list[Tensor]:
    """Logits of the turns behind the text."""
    start = turns[0]
    logits = []
    for size in turns[1:]:
        logits.append(forward(model, ids, mask, start, start + size, cache))
        start += size
        for layer in cache.policy_layers:
            check_invariants(layer.store)
    return logits


def assert_alike(some: list[Tensor], others: list[Tensor], mask: Tensor, turns: list[int] = TURNS) -> None:
    """Logits agree where there is no padding."""
    start = turns[0]
    for one, other in zip(some, others, strict=True):
        there = mask[:, start : start + one.shape[1]].bool()
        torch.testing.assert_close(one[there], other[there], atol=1e-5, rtol=5e-5)
        start += one.shape[1]


FAMILIES = ["gpt_oss", "llama", "gemma2"]
KEEPING = [*GROWING, HEADS]
LENGTHS = [[6, 1, 4], [6, 6, 6]]


@product("family,policy,lengths", FAMILIES, KEEPING, LENGTHS, sample=each_once(FAMILIES, KEEPING, LENGTHS))
def test_rows_answer_as_copies_do(family: str, policy: str, lengths: list[int]) -> None:
    """Where copies keep the same tokens: with softcap, learned sinks and sliding windows too."""
    with reading(lengths, policy, family) as (model, text, ids, mask):
        copies = text.fork([0] * ROWS)
        copies.hold_next()
        want = go_on(model, copies, ids, mask)
        shared = text.fork([0] * ROWS, shared=True)
        assert_alike(go_on(model, shared, ids, mask), want, mask)
        assert shared.nbytes < copies.nbytes
        assert shared.full_nbytes == copies.full_nbytes
        assert shared.plan is not None


@pytest.mark.parametrize("policy", CODED)
def test_codes_are_read_as_codes(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step answers as one that decodes them first, with keys that are coded without their rotation too."""
    model, _ = kvpolicy.tiny()
    ids, mask = conversation([6, 6, 2])
    with kvpolicy.attach(model, policy):
        text = read_text(model, ids)
        assert sum(text.policy_layers[0].layout.coded)
        found = go_on(model, text.fork([0] * ROWS, shared=True), ids, mask)
        monkeypatch.setattr(SharedPrefix, "attend_step", SharedPrefix.attend_prompt)
        want = go_on(model, text.fork([0] * ROWS, shared=True), ids, mask)
        for one, two in zip(found, want, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_memory_is_shared_and_counted_once() -> None:
    policy = "snapkv:window=4+kivi:bits=4:group_size=4:residual_length=4@0.5"
    with reading([6, 6, 6], policy) as (model, text, ids, mask):
        forks = [text.fork([0] * count, shared=True) for count in (1, ROWS)]
        for fork in forks:
            go_on(model, fork, ids[: fork.batch_size], mask[: fork.batch_size])
            for layer, source in zip(fork.policy_layers, text.policy_layers, strict=True):
                assert layer.prefix is not None and layer.prefix.source is source.store
                assert layer.prefix.source.tensors.keys.data_ptr() == source.keys.data_ptr()
                held = layer.held()
                assert held[SHARED] == sum(source.store.nbytes_by_kind().values())
            assert fork.plan is not None and fork.plan.nbytes == fork.nbytes == fork.report().nbytes
        digest = 8  # that of the mask, of the text's row
        own = [fork.nbytes - (text.nbytes - digest) for fork in forks]
        others = 3 * 8  # the number of columns, one for all rows of each layer
        assert own[1] - others == ROWS * (own[0] - others)


PREFIXES = ["snapkv:window=4@0.5", "full+tokenwise", "uniform/adakv+snapkv:window=4@0.5"]
OWN = ["full", "window@4"]


@product("family,policy,own", ["llama", "gemma2"], PREFIXES, OWN)
def test_a_plan_is_what_a_cache_holds_when_the_end_is_known(family: str, policy: str, own: str) -> None:
    """That of a config, too."""
    with reading([6, 2, 6], policy, family) as (model, text, ids, mask):
        shared = text.fork([0] * ROWS, shared=True, own=own)
        shared.expect([TEXT + 6, TEXT + 2, TEXT + 6], new=5)
        go_on(model, shared, ids, mask, TURNS[:2])
        assert shared.plan is not None
        early = shared.plan.nbytes
        go_on(model, shared, ids, mask, [TEXT + 6, *TURNS[2:]])
        assert early == shared.nbytes, "no slot was added"
        assert "40 tokens of a shared prefix" in str(shared.report())
    text = kvpolicy.plan(model, policy, prompt=TEXT)
    planned = kvpolicy.plan(model, own, batch=ROWS, prompt=[6, 2, 6], new=5, prefix=text)
    assert planned.by_kind()[SHARED] == sum(layer.held()[SHARED] for layer in shared.policy_layers)
    assert (planned.nbytes, planned.full_nbytes) == (shared.nbytes, shared.full_nbytes)
    assert planned.moved == shared.plan.moved


def test_plans_that_rows_cannot_share() -> None:
    model = build("llama")
    two, text = (kvpolicy.plan(model, "window@0.5", prompt=TEXT, batch=batch) for batch in (2, 1))
    for wrong in (two, "window@0.5"):
        with pytest.raises(KVPolicyError, match="prefix must be the plan of one row of the same model"):
            kvpolicy.plan(model, "full", prompt=6, prefix=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KVPolicyError, match="own must be a policy that selects tokens"):
        kvpolicy.plan(model, "h2o@8", prompt=6, prefix=text)
    with pytest.raises(KVPolicyError, match="Every slot must be read"):
        kvpolicy.plan(model, "full", prompt=6, prefix=kvpolicy.plan(model, "full+quest:page=4:read=8", prompt=TEXT))


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_goes_on_behind_the_text(beams: int) -> None:
    """With questions of different lengths, or with beams of one; each row as alone, and as with copies."""
    model = build("llama")
    ids, mask = (t[:, : TEXT + 6] for t in conversation([6, 3, 4] if beams == 1 else [6]))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["num_beams"] = beams
    with torch.no_grad(), kvpolicy.attach(model, "snapkv:window=4:decode=grow@0.5"):
        text = read_text(model, ids)
        copies = text.fork([0] * ROWS)
        copies.hold_next()
        want = model.generate(ids, attention_mask=mask, cache=copies, **options)
        shared = text.fork([0] * ROWS, shared=True)
        assert torch.equal(model.generate(ids, attention_mask=mask, cache=shared, **options), want)
        assert shared.plan is not None and shared.plan.nbytes == shared.nbytes
        for row in range(ROWS) if beams == 1 else ():
            there = mask[row].bool()
            alone = model.generate(ids[row : row + 1, there], cache=text.fork(shared=True), **options)
            assert torch.equal(alone[0, -8:], want[row, -8:])


def test_rows_are_selected_before_and_behind_the_question() -> None:
    with reading([6, 6, 2]) as (model, text, ids, mask):
        want = go_on(model, text.fork([0] * ROWS, shared=True), ids, mask)
        some = text.fork(shared=True)
        some.batch_repeat_interleave(2)
        assert some.batch_size == 2
        rows = torch.tensor([1, 2])
        first = forward(model, ids[rows], mask[rows], TEXT, TEXT + 6, some)
        some.reorder_cache(torch.tensor([1, 1, 0]))
        rows = torch.tensor([2, 2, 1])
        later = go_on(model, some, ids[rows], mask[rows], [TEXT + 6, *TURNS[2:]])
        there = mask[:, TEXT : TEXT + 6].bool()
        torch.testing.assert_close(first[1][there[2]], want[0][2][there[2]], atol=1e-5, rtol=1e-5)
        for now, then in zip(later, want[1:], strict=True):
            torch.testing.assert_close(now, then[rows], atol=1e-5, rtol=1e-5)


def test_a_reset_returns_to_the_end_of_the_text() -> None:
    with reading([6, 6, 2]) as (model, text, ids, mask):
        shared = text.fork([0] * ROWS, shared=True)
        want = go_on(model, shared, ids, mask)
        shared.batch_select_indices(torch.tensor([0]))
        shared.reset()
        assert (shared.get_seq_length(), shared.batch_size, shared.plan) == (TEXT, ROWS, None)
        assert all(map(torch.equal, go_on(model, shared, ids, mask), want))


def test_the_text_may_be_forgotten_while_rows_share_it() -> None:
    with reading([6, 6, 6]) as (model, text, ids, mask):
        shared, other = (text.fork([0] * ROWS, shared=True) for _ in range(2))
        want = go_on(model, other, ids, mask)
        text.reset()
        forward(model, ids[1:2].flip(1), mask[1:2], 0, TEXT, text)
        assert all(map(torch.equal, go_on(model, shared, ids, mask), want))


def test_windows_are_copied_for_each_row() -> None:
    """Those of the text are overwritten when it is reset."""
    with reading([6], family="gemma2") as (model, text, ids, mask):
        shared, other = (text.fork(shared=True) for _ in range(2))
        assert shared.unmanaged_bytes() == text.unmanaged_bytes()
        many = text.fork([0] * 5, shared=True).unmanaged_bytes()
        assert many == {index: 5 * size for index, size in text.unmanaged_bytes().items()}
        want = go_on(model, other, ids, mask)
        text.reset()
        assert all(map(torch.equal, go_on(model, shared, ids, mask), want))


def test_a_copy_of_the_text_goes_on() -> None:
    with reading([6]) as (model, text, ids, mask):
        alone = read_text(model, ids)
        text.fork(shared=True)
        assert all(map(torch.equal, go_on(model, text.fork(), ids, mask), go_on(model, alone, ids, mask)))


def test_a_padded_text() -> None:
    """The columns of its padding stay in the mask; positions go on behind its tokens."""
    model = build("llama")
    ids, mask = conversation([6, 6, 2])
    mask[:, :9] = 0
    with kvpolicy.attach(model, "snapkv:window=4:decode=grow@0.5"):
        text = PolicyCache(model)
        forward(model, ids[:1], mask[:1], 0, TEXT, text)
        copies = text.fork([0] * ROWS)
        copies.hold_next()
        want = go_on(model, copies, ids, mask)
        shared = text.fork([0] * ROWS, shared=True)
        assert_alike(go_on(model, shared, ids, mask), want, mask)
        wrong = mask.clone()
        wrong[:, 0] = 1
        with pytest.raises(KVPolicyError, match="same earlier tokens"):
            forward(model, ids, wrong, TEXT, TEXT + 6, text.fork([0] * ROWS, shared=True))


def test_questions_in_tiles_and_chunks() -> None:
    model = build("llama")
    turns = [TEXT, 7, 6, 1]
    ids, mask = conversation([7, 7, 3], turns)
    with kvpolicy.attach(model, "snapkv:window=4@0.5"):
        text = read_text(model, ids)
        want = go_on(model, text.fork([0] * ROWS, shared=True), ids, mask, [TEXT, 13, 1])
        chunks = go_on(model, text.fork([0] * ROWS, shared=True), ids, mask, turns)
    with kvpolicy.attach(model, "snapkv:window=4@0.5", tile=3):
        text = read_text(model, ids)
        tiles = go_on(model, text.fork([0] * ROWS, shared=True), ids, mask, [TEXT, 13, 1])
    there = mask[:, TEXT:].bool()
    for found in (chunks, tiles):
        torch.testing.assert_close(torch.cat(found, 1)[there], torch.cat(want, 1)[there], atol=1e-5, rtol=1e-5)


def test_steps_can_be_taken_back() -> None:
    with reading([6, 6, 2]) as (model, text, ids, mask):
        shared = text.fork([0] * ROWS, shared=True)
        with pytest.raises(KVPolicyStateError, match="must hold a whole prompt before a mark"):
            shared.mark()
        forward(model, ids, mask, TEXT, TEXT + 6, shared)
        shared.mark()
        first = [forward(model, ids, mask, column, column + 1, shared) for column in (46, 47, 48)]
        shared.rollback(1)
        assert shared.get_seq_length() == 47
        again = [forward(model, ids, mask, column, column + 1, shared) for column in (47, 48)]
        assert all(map(torch.equal, first[1:], again))


@product("policy,own", PREFIXES, OWN, sample=each_once(PREFIXES, OWN))
def test_a_step_compiles_once(policy: str, own: str) -> None:
    torch.compiler.reset()
    model = build("llama", layers=1)  # the time to compile grows with the layers
    steps = 6
    turns = [TEXT, 6, *[1] * steps]
    ids, mask = conversation([6, 6, 3], turns)
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with kvpolicy.attach(model, policy):
        text = read_text(model, ids)
        want = go_on(model, text.fork([0] * ROWS, shared=True, own=own), ids, mask, turns)
        shared = text.fork([0] * ROWS, shared=True, own=own)
        shared.expect(TEXT + 6, new=steps + 1)
        counter = CompileCounterWithBackend("aot_eager")  # pyright: ignore[reportArgumentType]
        compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
        forward(model, ids, mask, TEXT, TEXT + 6, shared)
        before = addresses(shared)
        for number, column in enumerate(range(TEXT + 6, TEXT + 6 + steps)):
            now = slice(column, column + 1)
            with torch.no_grad():
                out = compiled(ids[:, now].clone(), position_ids=places[:, now].clone(), cache=shared, use_cache=True)
            shared.tick()
            torch.testing.assert_close(out.logits, want[1 + number], atol=1e-5, rtol=1e-5)
        assert counter.frame_count == 1 and addresses(shared) == before
    torch.compiler.reset()


def test_the_first_forward_and_the_text_are_not_compiled() -> None:
    torch.compiler.reset()
    model = build("llama", layers=2)
    ids, _ = conversation([6])
    with kvpolicy.attach(model, "snapkv:window=4@0.5"), torch.no_grad():
        text = read_text(model, ids)
        shared = text.fork(shared=True)
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        for cache, message in (
            (shared, "must not be the first forward after a shared prefix"),
            (text, "must not change"),
        ):
            with pytest.raises(Exception, match=message):
                compiled(ids[:, :1], cache=cache, use_cache=True)
    torch.compiler.reset()


def test_a_second_question_may_be_added_whole() -> None:
    """`hold_next` is about the own tokens of the rows, of which the first question was one prompt."""
    model = build("llama")
    turns = [TEXT, 6, 1, 5, 1]
    ids, mask = conversation([6, 6, 6], turns)
    with kvpolicy.attach(model, "snapkv:window=4@0.5"):
        shared = read_text(model, ids).fork([0] * ROWS, shared=True, own="window@4")
        with pytest.raises(KVPolicyStateError, match="before hold_next"):
            shared.hold_next()
        forward(model, ids, mask, TEXT, TEXT + 6, shared)
        forward(model, ids, mask, TEXT + 6, TEXT + 7, shared)
        shared.hold_next()
        forward(model, ids, mask, TEXT + 7, TEXT + 12, shared)
        assert kept_positions(shared.policy_layers[0])[0][0] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
        assert shared.plan is not None and shared.plan.nbytes == shared.nbytes

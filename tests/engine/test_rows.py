"""Rule 4: row i of a batch gives what the same prompt gives alone, in a padded one, and where rows come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from tests.conformance.access import addresses, kept_positions
from tests.conformance.models import build, layers_for
from tests.conformance.play import make_batch, talk
from tests.conformance.policies import SELECTORS, words
from tests.engine.filled import attached, text
from tests.sampling import each_once, product
from tests.walks.life import changes, state_of


def same_row(alone: PolicyCache, together: PolicyCache, row: int) -> None:
    """A cache of one row holds what a row of a batch holds, under the same budget."""
    for mine, ours in zip(alone.policy_layers, together.policy_layers, strict=True):
        assert kept_positions(mine)[0] == kept_positions(ours)[row]
        assert int(mine.budget) == int(ours.budget[row]) > 0


CHUNKS = [12, 12, 12, 1, 1, 1, 6, 1, 1]

BEGIN = [["uniform", "squeeze"], ["plain", "kvquant", "rotate", "csr"]]


@product("allocator,codec", *BEGIN, sample=[("squeeze", "plain"), *each_once(*BEGIN)[1:]])
def test_rows_that_begin_in_a_later_chunk(allocator: str, codec: str) -> None:
    """What is settled once of a row, its pins and its measure, waits until the row has a token."""
    model = build("llama", layers=layers_for(allocator))
    policy = words(allocator, "h2o", codec)
    ids, mask = make_batch([36, 20, 5], [36, *CHUNKS[3:]])
    with kvpolicy.attach(model, policy):
        together = PolicyCache(model, prompt=[36, 20, 5], new=11)
        logits = talk(model, ids, mask, CHUNKS, together)
        for row, length in enumerate([36, 20, 5]):
            skip = 36 - length
            turns = [12 - skip % 12, *CHUNKS[skip // 12 + 1 :]]
            alone = PolicyCache(model, prompt=length, new=11)
            own = talk(model, ids[row : row + 1, skip:], mask[row : row + 1, skip:], turns, alone)
            assert (own[0] - logits[row, skip:]).abs().max() < (5e-5 if codec == "plain" else 0.01)
            same_row(alone, together, row)
            for mine, ours in zip(alone.policy_layers, together.policy_layers, strict=True):
                limits = mine.store.tensors.limits, ours.store.tensors.limits
                if limits[0] is not None and limits[1] is not None:
                    assert torch.equal(limits[0].pins[0], limits[1].pins[row])
            if allocator == "squeeze":
                assert torch.allclose(together.cosines()[row], alone.cosines()[0], atol=1e-6)


CHUNK_AND_STEP = [16, *[1] * 7, 6, 1]
ONLY_STEPS = [1] * 20
OTHERS = ["h2o@0.5", "h2o+kivi:group_size=4:residual_length=4@16", "uniform/even+h2o@8"]


@pytest.mark.parametrize(
    ("policy", "turns"),
    [
        *((words("uniform", selector, budget="8"), CHUNK_AND_STEP) for selector in SELECTORS),
        *((policy, turns) for policy in OTHERS for turns in (CHUNK_AND_STEP, ONLY_STEPS)),
    ],
)
def test_rows_that_begin_in_a_step(policy: str, turns: list[int]) -> None:
    """A row gets its budget before its first token, which comes in a decode step of the others."""
    lengths = [17, 1]
    columns = 17
    with attached(policy, lengths, [columns, sum(turns) - columns]) as (model, ids, mask):
        together = PolicyCache(model, prompt=lengths, new=8)
        logits = talk(model, ids, mask, turns, together)
        alone = PolicyCache(model, prompt=1, new=8)
        own = talk(model, ids[1:, 16:], mask[1:, 16:], turns[turns.index(1) if turns[0] > 1 else 16 :], alone)
    assert (own[0] - logits[1, 16:]).abs().max() < (0.1 if "kivi" in policy else 5e-5)
    same_row(alone, together, 1)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "gemma4_shared"])
@pytest.mark.parametrize("policy", ["full", "h2o@8"])
def test_rows_that_begin_in_a_step_beside_sliding_windows(family: str, policy: str) -> None:
    """Windows keep what a row without a token attends to, and no mask hides NaN."""
    model = build(family)
    ids = text(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with kvpolicy.attach(model, policy):
        logits = talk(model, ids, mask, [5, 1, 1, 1, 1], PolicyCache(model))
        own = talk(model, ids[:1, 6:], mask[:1, 6:], [1, 1, 1], PolicyCache(model))
    assert (own[0] - logits[0, 6:]).abs().max() < 1e-4


KIVI = "kivi:bits=4:group_size=4:residual_length=8"
JOINING = [
    "snapkv:window=4@0.4",
    "full",
    "window@16",
    "h2o@16",
    "tova@16",
    "h2o:decode=grow@0.3",
    "squeeze+kvcrush/snapkv:window=4@0.5",
    "tokenwise:bits=8",
    KIVI,
    f"h2o+{KIVI}@40",
    "snapkv:window=4+tokenwise:bits=8@0.4",
    "uniform/adakv+snapkv:window=4@0.6",
    "uniform/adakv+snapkv:window=4+tokenwise:bits=8@0.6",
    "uniform/adakv+h2o:decode=grow@0.6",
    "snapkv:window=4+quest:page=4:read=8@0.6",
    "h2o+merge@16",
    "pyramid+h2o@20",
    "minicache:start=0",
    "reuse/quest",
]
PROMPTS = [37, 12, 50, 5, 30]
ANSWERS = [6, 14, 9, 20, 4]
LONGEST = 96


def prompted(model: Any, prompt: Tensor) -> tuple[PolicyCache, Tensor]:
    """The cache of a prompt, and the token that follows it, [1, 1]."""
    cache = PolicyCache(model, new=LONGEST - prompt.shape[1])
    return cache, model(prompt, cache=cache).logits[:, -1:].argmax(-1)


def alone(model: Any, prompt: Tensor, count: int) -> list[int]:
    """The greedy answer to a prompt by itself."""
    cache, token = prompted(model, prompt)
    answer = [token]
    for _ in range(count - 1):
        answer.append(model(answer[-1], cache=cache).logits[:, -1:].argmax(-1))
    return torch.cat(answer, 1)[0].tolist()


def together(model: Any, rows: PolicyCache, prompts: list[Tensor], counts: list[int]) -> list[list[int]]:
    """The answers to prompts in a cache whose rows come and go, which is checked after each change."""
    answers: list[list[int]] = [[] for _ in prompts]
    running: dict[int, int] = {}
    waiting = [*range(len(prompts))]
    newest = torch.zeros(rows.batch_size, 1, dtype=torch.int64)
    while waiting or running:
        while waiting and rows.free_rows():
            number = waiting.pop(0)
            row = rows.free_rows()[-1]
            cache, token = prompted(model, prompts[number])
            rows.put(row, cache)
            newest[row] = token
            running[row] = number
            same_row(cache, rows, row)
            check_rows(rows)
        for row, number in [*running.items()]:
            answers[number].append(int(newest[row]))
            if len(answers[number]) == counts[number]:
                rows.drop(row)
                del running[row]
                check_rows(rows)
        if running:
            newest = model(newest, cache=rows).logits[:, -1:].argmax(-1)
            check_rows(rows)
    return answers


def check_rows(rows: PolicyCache) -> None:
    """Every invariant holds, and a free row holds nothing."""
    for layer in rows.policy_layers:
        check_invariants(layer.store)
        held = layer.store.geometry.tokens_by_head().sum(-1).tolist()
        assert [row for row, count in enumerate(held) if not count] == rows.free_rows()


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *(("llama", policy) for policy in JOINING),
        *((family, "h2o@16") for family in ("qwen3_5", "falcon_h1", "deepseek_v3", "opt", "gpt_neox")),
    ],
)
def test_answers_in_rows_that_come_and_go(family: str, policy: str) -> None:
    """States and latent vectors come and go with their rows, too."""
    model = build(family, layers=layers_for(policy, family))
    prompts = [text(1, length, seed) for seed, length in enumerate(PROMPTS)]
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        rows = handle.rows(3, LONGEST)
        expected = [alone(model, *pair) for pair in zip(prompts, ANSWERS, strict=True)]
        assert together(model, rows, prompts, ANSWERS) == expected
        assert rows.free_rows() == [0, 1, 2]
        assert rows.plan is not None and rows.nbytes == rows.plan.nbytes


@pytest.mark.parametrize("policy", ["h2o@16", f"h2o+{KIVI}@40", "uniform/adakv+h2o@24"])
def test_a_compiled_step_is_one_graph_whatever_rows_hold(policy: str) -> None:
    torch.compiler.reset()
    model = build("llama", layers=2)
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        both = [handle.rows(3, LONGEST) for _ in range(2)]
        rows, eager = both
        step = torch.compile(model, fullgraph=True, backend=counter)

        def put(row: int, length: int) -> None:
            cache = prompted(model, text(1, length, length))[0]
            for each in both:
                each.put(row, cache)

        put(1, 40)
        before = addresses(rows)
        coming = {2: (0, 44), 5: (2, 50), 12: (0, 41)}
        going = {9: 0, 15: 2, 16: 1}
        for number in range(20):
            if number in coming:
                put(*coming[number])
            if number in going:
                for each in both:
                    each.drop(going[number])
            tokens = text(3, 1, number)
            logits = step(tokens, cache=rows, use_cache=True).logits
            rows.tick()
            own = model(tokens, cache=eager).logits
            assert (logits - own).abs().max() < 1e-4
            assert bool(own.isfinite().all())
        assert counter.frame_count == 1
        assert addresses(rows) == before
    torch.compiler.reset()


@pytest.mark.parametrize("policy", ["full", "window@200", "uniform/adakv+h2o:decode=grow@0.5"])
def test_a_row_whose_answer_was_not_announced_has_slots_to_the_end(policy: str) -> None:
    """As many as it has alone where they are announced, and no slots are added in a step."""
    model = build("llama", layers=2)
    prompt = text(1, 30)
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        rows = handle.rows(2, LONGEST)
        announced, token = prompted(model, prompt)
        cache = PolicyCache(model)
        model(prompt, cache=cache)
        rows.put(1, cache)
        before = addresses(rows)
        for _ in range(LONGEST - 30):
            own = model(token, cache=announced).logits
            logits = model(token.expand(2, 1), cache=rows).logits
            assert (own[0] - logits[1]).abs().max() < 5e-5
            token = own.argmax(-1)
        assert addresses(rows) == before
        assert rows.policy_layers[0].length.tolist() == [0, LONGEST]


def awaiting(cache: PolicyCache) -> PolicyCache:
    """A copy that is told of more tokens of its prompt."""
    copied = cache.fork()
    copied.expect(40, 4)
    return copied


REFUSED: dict[str, Callable[[PolicyCache, PolicyCache], object]] = {
    "row must be between 0 and 1, got 2": lambda rows, cache: rows.put(2, cache),
    "row must be free to be filled, got 0": lambda rows, cache: rows.put(0, cache),
    "row must hold a text to be dropped, got the free row 1": lambda rows, cache: rows.drop(1),
    "a kvpolicy.PolicyCache of one row, got int": lambda rows, cache: rows.put(1, 5),  # pyright: ignore[reportArgumentType]
    "with a cache must be called on an ordinary cache": lambda rows, cache: rows.put(1, rows),
    "A row must be filled with a cache of one row, got 2": lambda rows, cache: rows.put(1, cache.fork([0, 0])),
    "must be filled with a cache that holds a whole prompt": lambda rows, cache: rows.put(1, awaiting(cache)),
    "must be called on a cache whose rows come and go": lambda rows, cache: cache.drop(0),
    r"crop\(\) must be called on an ordinary cache": lambda rows, cache: rows.crop(-1),
    r"save\(\) must be called on an ordinary cache": lambda rows, cache: rows.save("nowhere"),
    r"mark\(\) must be called on an ordinary cache": lambda rows, cache: rows.mark(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_rows_refuse_changes_nothing(message: str) -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "h2o@16", chunks="hold") as handle:
        rows = handle.rows(2, LONGEST)
        cache = prompted(model, text(1, 30))[0]
        rows.put(0, cache)
        before = state_of(rows)
        with pytest.raises(KVPolicyError, match=message):
            REFUSED[message](rows, cache)
        assert changes(before, state_of(rows)) == []


def test_steps_of_rows_that_are_refused() -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "h2o@16") as handle:
        rows = handle.rows(2, 32)
        one = torch.ones(2, 1, dtype=torch.int64)
        with pytest.raises(KVPolicyError, match="A row must hold a text before a step"):
            model(one, cache=rows)
        rows.put(0, prompted(model, text(1, 30))[0])
        with pytest.raises(KVPolicyError, match=r"must have one token for each of the 2 rows, got \[2, 3\]"):
            model(one.expand(2, 3), cache=rows)
        with pytest.raises(KVPolicyError, match="attention_mask must be None"):
            model(one, attention_mask=one, cache=rows)
        with pytest.raises(KVPolicyError, match="A row must have at most 32 tokens, got a cache of 40"):
            rows.put(1, prompted(model, text(1, 40))[0])
        assert rows.policy_layers[0].length.tolist() == [30, 0]


@pytest.mark.parametrize(
    ("family", "policy", "message"),
    [
        ("llama", "h2o@64KiB", "The budget must be that of each row where rows come and go"),
        ("gemma3", "h2o@16", "got a sliding window in layer 0"),
        ("gpt2", "h2o@16", "length must be at most 512"),
    ],
)
def test_policies_and_models_whose_rows_cannot_come_and_go(family: str, policy: str, message: str) -> None:
    with kvpolicy.attach(build(family), policy) as handle, pytest.raises(KVPolicyError, match=message):
        handle.rows(2, 1024)

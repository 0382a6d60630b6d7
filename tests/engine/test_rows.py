"""Rule 4: row i of a batch gives what the same prompt gives alone, in a padded one, and where rows come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from tests.conformance.access import kept_positions
from tests.conformance.models import FAMILIES, build, layers_for
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import ALLOCATORS, CODECS, SELECTORS, words
from tests.engine.filled import text
from tests.sampling import each_once, product

LENGTHS = [26, 6]
"""A short row beside a far longer one: padding is no sink, in no window, no mean and no threshold."""


def same_row(alone: PolicyCache, together: PolicyCache, row: int) -> None:
    """A cache of one row holds what a row of a batch holds, under the same budget."""
    for mine, ours in zip(alone.policy_layers, together.policy_layers, strict=True):
        assert kept_positions(mine)[0] == kept_positions(ours)[row]
        assert int(mine.budget) == int(ours.budget[row]) > 0


def check(policy: str, family: str, lengths: list[int]) -> None:
    model = build(family, layers=layers_for(policy, family))
    # Rows alone differ from a batch by fp32's noise, which may tip a number of a codec to the next code.
    tolerance = 0.1 if Policy.parse(policy).codec.stages else 5e-5
    ids, mask = make_batch(lengths)
    with kvpolicy.attach(model, policy):
        together = PolicyCache(model, new=sum(TURNS[1:]))
        logits = talk(model, ids, mask, TURNS, together)
        for row, length in enumerate(lengths):
            skip = TURNS[0] - length
            alone = PolicyCache(model, new=sum(TURNS[1:]))
            own_ids = ids[row : row + 1, skip:]
            own_mask = mask[row : row + 1, skip:]
            own = talk(model, own_ids, own_mask, [length, *TURNS[1:]], alone)
            assert (own[0] - logits[row, skip:]).abs().max() < tolerance
            same_row(alone, together, row)


@product("allocator,selector,codec", ALLOCATORS, SELECTORS, CODECS, sample=each_once(ALLOCATORS, SELECTORS, CODECS))
def test_methods(allocator: str, selector: str, codec: str) -> None:
    check(words(allocator, selector, codec), "llama", LENGTHS)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_families(family: str) -> None:
    check("squeeze+h2o+kivi:group_size=4:residual_length=4@0.5", family, LENGTHS)


@pytest.mark.parametrize("budget", ["0.25", "5"])
def test_budgets(budget: str) -> None:
    """A share is of each row's own length."""
    check(f"h2o@{budget}", "llama", LENGTHS)


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
    model = build("llama")
    ids, mask = make_batch(lengths, [columns, sum(turns) - columns])
    with kvpolicy.attach(model, policy):
        together = PolicyCache(model, prompt=lengths, new=8)
        logits = talk(model, ids, mask, turns, together)
        alone = PolicyCache(model, prompt=1, new=8)
        own = talk(model, ids[1:, 16:], mask[1:, 16:], turns[turns.index(1) if turns[0] > 1 else 16 :], alone)
    assert (own[0] - logits[1, 16:]).abs().max() < (0.1 if "kivi" in policy else 5e-5)
    same_row(alone, together, 1)


JOINING = [
    "full",
    "window@16",
    "snapkv:window=4@0.4",
    "h2o@16",
    "tova@16",
    "kivi:bits=4:group_size=4:residual_length=8",
]
PROMPTS = [37, 12, 50, 5, 30]
ANSWERS = [6, 14, 9, 20, 4]
LONGEST = 96


def alone(model: Any, prompt: Tensor, count: int) -> list[int]:
    """The greedy answer to a prompt by itself."""
    cache = PolicyCache(model, new=LONGEST - prompt.shape[1])
    answer = [model(prompt, cache=cache).logits[:, -1:].argmax(-1)]
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
            cache = PolicyCache(model, new=LONGEST - prompts[number].shape[1])
            newest[row] = model(prompts[number], cache=cache).logits[0, -1].argmax()
            rows.put(row, cache)
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
    for layer in rows.policy_layers:
        check_invariants(layer.store)


@pytest.mark.parametrize("policy", JOINING)
def test_answers_in_rows_that_come_and_go(policy: str) -> None:
    model = build("llama", layers=layers_for(policy))
    prompts = [text(1, length, seed) for seed, length in enumerate(PROMPTS)]
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        rows = handle.rows(3, LONGEST)
        expected = [alone(model, *pair) for pair in zip(prompts, ANSWERS, strict=True)]
        assert together(model, rows, prompts, ANSWERS) == expected
        assert rows.free_rows() == [0, 1, 2]
        assert rows.plan is not None and rows.nbytes == rows.plan.nbytes

"""Rule 4: row i of a padded batch gives what the same prompt gives alone."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy import Policy, PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import FAMILIES, build, layers_for
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import ALLOCATORS, CODECS, SELECTORS, words
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

"""Rule 4: row i of a padded batch gives what the same prompt gives alone."""

from __future__ import annotations

import pytest

import kvpolicy
from kvpolicy import Policy, PolicyCache
from tests.conformance.models import FAMILIES, build
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import ALLOCATORS, CODECS, SELECTORS, every, words
from tests.conformance.replay import kept_positions

LENGTHS = [26, 17, 11, 6]


def check(policy: str, family: str, lengths: list[int]) -> None:
    model = build(family)
    # Rows alone differ from a batch by fp32's noise, which may tip a number of a codec to the next code.
    tolerance = 0.1 if Policy.parse(policy).codec.stages else 5e-5
    ids, mask = make_batch(lengths)
    with kvpolicy.attach(model, policy):
        together = PolicyCache(model, new=14)
        logits = talk(model, ids, mask, TURNS, together)
        for row, length in enumerate(lengths):
            skip = TURNS[0] - length
            alone = PolicyCache(model, new=14)
            own_ids, own_mask = ids[row : row + 1, skip:], mask[row : row + 1, skip:]
            own = talk(model, own_ids, own_mask, [length, *TURNS[1:]], alone)
            assert (own[0] - logits[row, skip:]).abs().max() < tolerance
            for mine, ours in zip(alone.slots, together.slots, strict=True):
                assert kept_positions(mine)[0] == kept_positions(ours)[row]
                assert int(mine.budget) == int(ours.budget[row])


@pytest.mark.parametrize(("allocator", "selector", "codec"), every(ALLOCATORS, SELECTORS, CODECS))
def test_methods(allocator: str, selector: str, codec: str) -> None:
    check(words(allocator, selector, codec), "llama", LENGTHS)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_families(family: str) -> None:
    check("squeeze+h2o+kivi:group_size=4:residual_length=4@0.5", family, LENGTHS)


@pytest.mark.parametrize("budget", ["0.25", "5"])
def test_budgets(budget: str) -> None:
    """A share is of each row's own length."""
    check(f"h2o@{budget}", "llama", LENGTHS)


@pytest.mark.parametrize("selector", SELECTORS)
def test_width_of_the_padding_does_not_matter(selector: str) -> None:
    """A short row beside a far longer one: padding is no sink, in no window, no mean and no threshold."""
    check(words("squeeze", selector), "llama", [26, 6])

"""The automatic size of a full-precision buffer: the rule, and that it is what the same numbers are when given."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.protocols import SizedCodec, traits_for
from kvpolicy.registry import lookup, names
from tests.conformance.access import coded_positions, kept_positions
from tests.conformance.calibration import write
from tests.conformance.models import build
from tests.conformance.play import make_batch, talk
from tests.conformance.policies import GROUPING
from tests.sampling import each_once, product

LARGEST = {"kivi": (128, 32), "gear": (64, 64), "staircase": (32, 32), "zipcache": (0, 100), "csr": (0, 32)}
"""Largest residual and block of codecs for which they are not 32 and 32."""
GROUPED = ("kivi", "gear", "staircase")
OPTIONS: dict[str, dict[str, Any]] = {
    "rotate": {"sinks": 2},
    "csr": {"nnz": 4, "prompt_atoms": 2, "dictionary": str(write("csr"))},
    "kvquant": {"sinks": 2, "calibration": str(write("kvquant"))},
    "lowrank": {"rank": 4, "calibration": str(write("lowrank"))},
    "gear": {"group_size": 8},
    "kivi": {"group_size": 8},
    "minicache": {"start": 0},
}
FIXED = ("plain", "kvarn", "oscar")
"""Codecs whose residual is a number, as in their papers, or that encode nothing."""
SIZED = [name for name in names("codec") if name not in FIXED]


def made(name: str, **options: Any) -> Any:
    return lookup(name)[1](**options)


def expected(name: str, tokens: int) -> tuple[int, int]:
    """Residual and block, written down once more: a 32nd of the tokens (zipcache: an 8th), the block first."""
    residual, block = LARGEST.get(name, (32, 32))
    share = tokens // (8 if name == "zipcache" else 32)
    if name in GROUPED:
        return min(share, residual), block
    taken = sorted([1, share, block])[1]
    return sorted([0, share - taken, residual])[1], taken


@pytest.mark.parametrize("name", SIZED)
def test_the_rule(name: str) -> None:
    codec = made(name)
    assert isinstance(codec, SizedCodec)
    for tokens in [*range(140), 500, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 10**6]:
        traits = traits_for(codec, tokens)
        assert (traits.residual, traits.block) == expected(name, tokens), tokens
        assert traits._replace(residual=0, block=0) == codec.traits._replace(residual=0, block=0)
    assert (codec.traits.residual, codec.traits.block) == expected(name, 10**9)


@pytest.mark.parametrize("name", SIZED)
def test_a_layout_holds_all_tokens_and_never_shrinks(name: str) -> None:
    codec = made(name)
    before = codec.layout(0)
    demotion = codec.traits.demotion
    recodes = demotion is not None and demotion.recodes
    for tokens in range(1, 1300):
        layout = codec.layout(tokens)
        buffered = traits_for(codec, tokens)
        if layout.coded:
            assert layout.slots - buffered.block >= tokens or recodes
            assert layout.exact >= buffered.block + buffered.residual
        else:
            assert layout.exact == tokens
        if len(before.coded) == len(layout.coded):
            assert all(new >= old for new, old in zip(layout.coded, before.coded, strict=True)), tokens
            assert layout.exact >= before.exact
        before = layout


def explicit(codec: Any, tokens: int) -> Any:
    """The codec with the numbers that a row of `tokens` tokens has."""
    traits = traits_for(codec, tokens)
    sizes = {"residual_length": traits.residual, "block_size": traits.block, "recode_every": traits.block}
    known = {field.name for field in fields(codec)}
    return replace(codec, **{key: size for key, size in sizes.items() if key in known})


LENGTHS = [200, 96, 70, 9]
TURNS = [200, *[1] * 12, 5, *[1] * 12]


BOTH = ["h2o", "window:decode=grow"]


@product(
    "name,selector",
    SIZED,
    BOTH,
    sample=each_once(SIZED[::3], BOTH),
    allowed=lambda row: row[1] == "h2o" or row[0] not in ("mikv", "zipcache"),
)
def test_rows_of_a_batch_have_the_sizes_that_they_have_alone(name: str, selector: str) -> None:
    """Rows of several lengths demote blocks of several sizes side by side; some codecs need a ranking of the tokens."""
    model = build("llama", layers=2)
    ids, mask = make_batch(LENGTHS, TURNS)
    codec = made(name, **OPTIONS.get(name, {}))
    ranking = "streaming" if name in GROUPING else selector
    policy = Policy(selector=Policy.parse(f"{ranking}@0.7").selector, codec=codec, budget=0.7)
    with kvpolicy.attach(model, policy):
        together = PolicyCache(model, new=len(TURNS) + 4)
        logits = talk(model, ids, mask, TURNS, together)
    for row, length in enumerate(LENGTHS):
        skip = TURNS[0] - length
        own_ids = ids[row : row + 1, skip:]
        own_mask = mask[row : row + 1, skip:]
        turns = [length, *TURNS[1:]]
        with kvpolicy.attach(model, policy):
            alone = PolicyCache(model, new=len(TURNS) + 4)
            own = talk(model, own_ids, own_mask, turns, alone)
        # A batch rounds differently, which turns a few codes; another size of a block would move tokens.
        assert (own[0] - logits[row, skip:]).abs().max() < 0.25
        for mine, ours in zip(alone.policy_layers, together.policy_layers, strict=True):
            assert kept_positions(mine)[0] == kept_positions(ours)[row]


@pytest.mark.parametrize("name", SIZED)
def test_one_row_is_as_with_the_numbers_given(name: str) -> None:
    """Bit for bit, as long as the number of tokens that a row may hold does not change."""
    model = build("llama", layers=2)
    ids, mask = make_batch([130], [130, *[1] * 10])
    codec = made(name, **OPTIONS.get(name, {}))
    results: list[tuple[torch.Tensor, PolicyCache]] = []
    for part in (codec, explicit(codec, 97)):
        selector = Policy.parse(f"{'streaming' if name in GROUPING else 'h2o'}@97").selector
        policy = Policy(selector=selector, codec=part, budget=97)
        with kvpolicy.attach(model, policy):
            cache = PolicyCache(model, new=10)
            results.append((talk(model, ids, mask, [130, *[1] * 10], cache), cache))
    (auto, first), (given, second) = results
    assert torch.equal(auto, given)
    for mine, other in zip(first.policy_layers, second.policy_layers, strict=True):
        assert mine.layout == other.layout
        assert coded_positions(mine.store) == coded_positions(other.store)
    sizes = 16 * len(first.policy_layers)  # two numbers a row, which sizes that are given do not need
    assert first.nbytes == second.nbytes + (sizes if codec != explicit(codec, 97) else 0)
    plan = first.plan
    assert plan is not None and plan.nbytes == first.nbytes


def test_auto_is_a_word_of_the_grammar() -> None:
    assert Policy.parse("h2o+tokenwise:block_size=auto") == Policy.parse("h2o+tokenwise")
    assert str(Policy.parse("h2o+tokenwise:residual_length=auto:block_size=8@9")) == "h2o+tokenwise:block_size=8@9"
    with pytest.raises(kvpolicy.KVPolicyError, match="must be an integer or auto, got 'most'"):
        Policy.parse("h2o+tokenwise:block_size=most")
    with pytest.raises(kvpolicy.KVPolicyError, match=r"KIVI\.residual_length must be at least 0, got -1; try 'auto'"):
        made("kivi", residual_length=-1)

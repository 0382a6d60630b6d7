"""Allocators x selectors x codecs x families x {one row, padded batch} x {fp32, bf16} against the reference.

`-m full` runs every selector x codec x family, with an allocator, rows and a dtype that are drawn; all combinations
would be 32,000, and grow with every method. By default, each family, selector and codec meets each allocator, both
kinds of rows and both dtypes. Every selector meets every codec in `test_layer`. What a family has of its own, such as
its rotary embedding, is tested with `ROTARY`.
"""

from __future__ import annotations

import dataclasses
from itertools import cycle
from typing import Any

import torch

from kvpolicy import Policy, PolicyCache
from kvpolicy.registry import lookup, name_of
from tests.conformance.calibration import DIM
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import ROWS, play
from tests.conformance.policies import ALLOCATORS, CODECS, SELECTORS, words
from tests.conformance.replay import Tape, Twin, reference_codec, replay
from tests.conformance.turning import turns
from tests.reference import allocators
from tests.sampling import Row, pairwise, product

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXES = (ALLOCATORS, SELECTORS, CODECS, [*FAMILIES, *UNNAMED], [*ROWS], [*DTYPES])
ALLOCATOR, SELECTOR, CODEC, FAMILY, ROW_COUNT, DTYPE = range(6)
ROTARY = [name for name in CODECS if lookup(name)[1]().traits.key_space == "unrotated"]
"""Codecs that undo a family's rotary embedding."""


def sample() -> list[Row]:
    """A pairwise sample, in which selectors, codecs and families need not meet; families meet one of `ROTARY`."""
    rows = pairwise(*AXES, seed=2, apart=[(SELECTOR, CODEC), (SELECTOR, FAMILY), (CODEC, FAMILY)])
    met = {row[FAMILY] for row in rows if row[CODEC] in ROTARY}
    left = [family for family in AXES[FAMILY] if family not in met]
    return [*rows, *(("uniform", "h2o", codec, family, "padded", "fp32") for codec, family in zip(cycle(ROTARY), left))]


def compare(allocator: str, selector: str, codec: str, family: str, rows: str, dtype: str) -> None:
    policy = Policy.parse(words(allocator, selector, codec))
    model = build(family, DTYPES[dtype])
    tape, cache, logits = play(model, policy, ROWS[rows])
    twin = Twin(reference_codec(policy.codec), turns(build(family), DIM))
    assert torch.isfinite(logits).all()
    check_budgets(policy, cache, tape, ROWS[rows])
    if dtype == "fp32":
        verdict = replay(policy, tape, twin=twin)
        assert verdict.turns >= len(tape) * 5, "most choices were within fp32's noise"
    else:
        prompt = replay(policy, {layer: some[:1] for layer, some in tape.items()}, exact=False, twin=twin)
        # One bit that rounding turns moves a token, and with it every cut of KVCrush's order behind it.
        assert prompt.alike >= (0.9 if selector == "kvcrush" else 0.95) * prompt.tokens, prompt
        verdict = replay(
            policy, tape, exact=False, twin=twin
        )  # a token that rounding evicted is gone for the rest of it
        assert verdict.alike >= 0.9 * verdict.tokens, verdict


def check_budgets(policy: Policy, cache: PolicyCache, tape: Tape, lengths: list[int]) -> None:
    """Layers weights the budget as the reference's allocator says, after the prompt and after the continuation."""
    metrics: Any = cache.cosines() if policy.allocator.layer_metric else None
    coming, seen = cache.new or 0, [0] * len(lengths)
    for number, turn in enumerate(next(iter(tape.values()))):
        for b, length in enumerate(lengths):
            seen[b] += length if number == 0 else turn.q.shape[2]
            if turn.q.shape[2] > 1:
                got = [some[number].keep[b] for some in tape.values()]
                cosines = None if metrics is None else metrics[b].tolist()
                assert got == expected_budgets(policy, cosines, seen[b], coming, len(got)), (number, b)


def expected_budgets(policy: Policy, cosines: list[float] | None, length: int, coming: int, layers: int) -> list[int]:
    """What the reference gives each layer of one row."""
    floor = policy.selector.min_tokens
    assert not isinstance(policy.budget, str)
    total = allocators.base_budget(policy.budget, length, floor) * layers
    config = dataclasses.asdict(policy.allocator)  # pyright: ignore[reportArgumentType]
    name = name_of(type(policy.allocator))
    return allocators.budgets(name, config, cosines, total, layers, floor, length + coming)


@product("allocator,selector,codec,family,rows,dtype", *AXES, sample=sample(), drawn=(ALLOCATOR, ROW_COUNT, DTYPE))
def test_methods_and_families(allocator: str, selector: str, codec: str, family: str, rows: str, dtype: str) -> None:
    compare(allocator, selector, codec, family, rows, dtype)

"""Allocators x selectors x codecs x families x {one row, padded batch} x {fp32, bf16} against the reference.

`-m full` runs every selector x codec x family, with an allocator, rows and a dtype that are drawn; all combinations
would be 32,000, and grow with every method. By default, each family meets the allocator that looks at its residual
stream and a codec that undoes its rotary embedding, and every third one bf16. `test_layer` has selectors and codecs
without a model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvpolicy import Policy, PolicyCache
from kvpolicy.codecs.apart import is_divisible
from kvpolicy.registry import lookup, name_of
from kvpolicy.statistics import Moments, OutputNorms
from kvpolicy.statistics.statistic import first_of
from tests.conformance.calibration import DIM
from tests.conformance.models import FAMILIES, LATENT, UNNAMED, build, layers_for
from tests.conformance.play import ROWS, play
from tests.conformance.policies import ALLOCATORS, CODECS, SELECTORS, is_refused, words
from tests.conformance.replay import Tape, Twin, reference_codec, replay
from tests.conformance.turning import turns
from tests.reference import allocators
from tests.reference.coding import keys_alone
from tests.sampling import Row, product

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXES = (ALLOCATORS, SELECTORS, CODECS, [*FAMILIES, *UNNAMED], [*ROWS], [*DTYPES])
ALLOCATOR, _, _, FAMILY, ROW_COUNT, DTYPE = range(6)
ROTARY = [name for name in CODECS if lookup(name)[1]().traits.key_space == "unrotated"]
"""Codecs that undo a family's rotary embedding."""


UNREADABLE = ("jetmoe",)
"""Families whose output projection is in experts, and cannot be read."""


APART = (*LATENT, "mimo_v2_flash")
"""Families whose values are a part of their keys, or of another size: a codec must encode both apart."""


FILED = ("qfilters", "triattention")
"""Selectors whose files know the keys of one size; see `tests.conformance.calibration`."""


def fits(family: str, selector: str, codec: str) -> bool:
    """Whether a family takes a selector and a codec; see `kvpolicy.hf.model_spec`."""
    asked = lookup(selector)[1]().statistics
    turns = any(each.undoes_rotation or isinstance(each, Moments) for each in asked)
    if family in UNREADABLE and reads_projection(selector):
        return False
    if (family in LATENT and turns) or (family in APART and selector in FILED):
        return False
    if codec == "turboquant":  # the reference has a matrix of one size
        return family not in APART
    return family not in APART or is_divisible(lookup(codec)[1]())


def reads_projection(selector: str) -> bool:
    """Whether a selector needs norms of values behind the output projection."""
    return first_of(OutputNorms, lookup(selector)[1]().statistics) is not None


def sample() -> list[Row]:
    """Each family in padded rows in fp32, compared exactly; every third one in one row of bf16; all else in turn.

    What a family decides itself is in the first of these: its residual stream, which an allocator looks at, its rotary
    embedding, which a codec of `ROTARY` undoes, and its masks.
    """
    looking, others = (
        [name for name in ALLOCATORS if lookup(name)[1]().layer_metric == wanted] for wanted in ("cosine", "")
    )
    rows: list[Row] = []
    for number, family in enumerate(AXES[FAMILY]):
        known = [name for name in SELECTORS if fits(family, name, "plain")]
        selector, another = (known[(number + shift) % len(known)] for shift in (1, 6))
        rotary, every = ([name for name in names if fits(family, "h2o", name)] for names in (ROTARY, CODECS))
        rotary = rotary or [name for name in every if name != "plain"]
        allocator = looking[number % len(looking)]
        codec = rotary[number % len(rotary)]
        rows.append((allocator, selector, codec, family, "padded", "fp32"))
        if number % 3 == 0:
            allocator = others[number // 3 % len(others)]
            codec = every[number // 3 % len(every)]
            another = "h2o" if is_refused(another, codec) else another
            rows.append((allocator, another, codec, family, "one", "bf16"))
    return rows


def compare(allocator: str, selector: str, codec: str, family: str, rows: str, dtype: str) -> None:
    policy = Policy.parse(words(allocator, selector, codec))
    layers = layers_for(allocator, family)
    model = build(family, DTYPES[dtype], layers=layers)
    tape, cache, logits = play(model, policy, ROWS[rows])
    slow = reference_codec(policy.codec)
    slow = keys_alone(slow) if slow is not None and family in LATENT else slow
    twin = Twin(slow) if family in LATENT else Twin(slow, turns(build(family, layers=layers), DIM))
    assert torch.isfinite(logits).all()
    check_budgets(policy, cache, tape, ROWS[rows])
    if dtype == "fp32":
        verdict = replay(policy, tape, twin=twin)
        # Shares of windows of a few tokens are often nearly equal, in gemma4 from the second turn of a layer on.
        least = 3 if selector == "cur" else 5
        wanted = 2 if (selector, family) == ("cur", "gemma4") else len(tape) * least
        assert verdict.turns >= wanted, "most choices were within fp32's noise"
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
    metrics: Any = cache.cosines() if policy.allocator.layer_metric in ("cosine", "attention") else None
    coming = cache.new or 0
    seen = [0] * len(lengths)
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
    assert isinstance(policy.budget, int | float)
    total = allocators.base_budget(policy.budget, length, floor) * layers
    config = dataclasses.asdict(policy.allocator)  # pyright: ignore[reportArgumentType]
    name = name_of(type(policy.allocator))
    return allocators.budgets(name, config, cosines, total, layers, floor, length + coming)


def allowed(row: Row) -> bool:
    """Whether the family takes the selector and the codec."""
    _, selector, codec, family, _, _ = row
    return fits(family, selector, codec)


@product(
    "allocator,selector,codec,family,rows,dtype",
    *AXES,
    sample=sample(),
    allowed=allowed,
    drawn=(ALLOCATOR, ROW_COUNT, DTYPE),
)
def test_methods_and_families(allocator: str, selector: str, codec: str, family: str, rows: str, dtype: str) -> None:
    compare(allocator, selector, codec, family, rows, dtype)

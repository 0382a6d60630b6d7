"""The policy of each layer for a budget, and the knapsack that chooses it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, Policy
from kvpolicy.hf.identity import identity
from kvpolicy.planning.curves import Curves, load_tuned, save_curves, save_layers
from kvpolicy.planning.tuned import UNITS, Option, byte_limit, choose, options, reasons, solve
from kvpolicy.policy import LayeredPolicy, TunedPolicy
from kvpolicy.policy.tuned import TunedFile
from kvpolicy.protocols import LayerShape
from tests.conformance.models import build
from tests.reference.knapsack import least_loss
from tests.sampling import each_once, product

SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
FORMS = ("h2o", "window+tokenwise:bits=4:group_size=4:residual_length=4:block_size=4", "uniform/adakv+h2o")
SHAPE = LayerShape(2, 8, torch.float32)


def draw_curves(seed: int, layers: int = 3, model: Any = None, forms: tuple[str, ...] = FORMS) -> Curves:
    """Distortions that fall with the share, at another rate in each layer."""
    dice = Random(seed)
    candidates = tuple(Policy.parse(f"{form}@{share}") for form in forms for share in SHARES)
    table: list[list[float | None]] = []
    for _ in range(layers):
        scale = 10 ** dice.uniform(-2, 1)
        rate = dice.uniform(1, 6)
        rough = [0.0 if "tokenwise" not in form else 0.02 * scale for form in forms]
        worth = [dice.uniform(0.7, 1.4) for _ in forms]
        table.append(
            [
                rough[number] + scale * worth[number] * math.exp(-rate * share) * (share < 1)
                for number in range(len(forms))
                for share in SHARES
            ]
        )
    given = (
        {"layers": layers, "heads": SHAPE.heads, "head_dim": SHAPE.head_dim, "weights": None}
        if model is None
        else model
    )
    text = {"sha256": "of a test", "windows": 2, "prompt": 60.0, "new": 8.0}
    return Curves(given, text, "output", tuple(range(layers)), layers, candidates, table, table)


@product("seed", range(8), sample=[(seed,) for seed in range(3)])
def test_within_one_percent_of_the_optimum(seed: int) -> None:
    curves = draw_curves(seed)
    for share in (0.15, 0.3, 0.5):
        limit = byte_limit(Policy.parse(f"h2o@{share}"), SHAPE, 3, 68)
        assert limit is not None
        everything = list(range(len(curves.candidates)))
        items = [options(curves, number, everything, SHAPE, 60, 8) for number in range(3)]
        best = least_loss([[(choice.nbytes, choice.loss) for choice in choices] for choices in items], limit)
        chosen = solve(curves, SHAPE, 60, 8, limit)
        found = [next(c for c in choices if c.policy == policy) for choices, policy in zip(items, chosen, strict=True)]
        assert best is not None and sum(choice.nbytes for choice in found) <= limit
        assert best - 1e-12 <= sum(choice.loss for choice in found) <= 1.01 * best


BUDGETS = ["0.15", "0.4", "1.0", "12", "9000B", "0.15:least=20"]
LENGTHS = [68, 40, 200]
"""As long as the texts that it was tuned on, and others."""


@product(
    "budget,length", BUDGETS, LENGTHS, sample=[*each_once(BUDGETS, LENGTHS), ("9000B", 200), ("0.15:least=20", 40)]
)
def test_bytes_of_a_cache_are_within_the_budget(budget: str, length: int, tmp_path: Path) -> None:
    model = build("llama", layers=3)
    save_curves(tmp_path / "plan.json", draw_curves(1, model=identity(model)))
    spec = f"tuned:file={tmp_path}/plan.json@{budget}"
    with kvpolicy.attach(model, spec) as handle, torch.no_grad():
        cache = kvpolicy.PolicyCache(model, new=8)
        model(torch.arange(length - 8)[None] % 40, cache=cache)
        token = 2 * 3 * cache.policy_layers[0].store.shape.heads * model.config.head_dim * 4
        limit = {"0.15": 0.15 * token * length, "0.4": 0.4 * token * length, "12": token * 12, "9000B": 9000}.get(
            budget
        )
        limit = max(0.15 * token * length, 20 * token) if "least" in budget else limit
        assert isinstance(handle.policy, LayeredPolicy) and str(handle.policy) == spec
        if limit is None:
            assert all(bool((layer.head_positions >= 0).sum(-1).eq(length - 8).all()) for layer in cache.policy_layers)
        else:
            assert cache.nbytes <= limit
            assert cache.nbytes >= 0.8 * min(limit, token * (length - 8)), "much is left"
    planned = kvpolicy.plan(model.config, spec, prompt=length - 8, new=8, dtype=torch.float32)
    assert planned.nbytes == cache.nbytes and planned.policy == handle.policy


def test_bytes_of_a_share_with_a_least_number() -> None:
    """Of the same text as a fraction, or as a number of tokens if these are more."""
    budgets = [("0.3:least=20", 68, "0.3"), ("0.3:least=21", 68, "21"), ("1.0:least=20", 68, "1.0")]
    for budget, length, plain in budgets:
        both = (Policy.parse(f"h2o@{each}") for each in (budget, plain))
        first, second = (byte_limit(policy, SHAPE, 3, length) for policy in both)
        assert first == second


def test_the_layer_that_loses_more_gets_more_and_says_why() -> None:
    curves = draw_curves(3, forms=("h2o",))
    steep = curves._replace(
        distortion=[[(10.0 if layer == 1 else 0.1) * (1 - share) for share in SHARES] for layer in range(3)]
    )
    chosen = solve(steep, SHAPE, 60, 8, 3 * SHAPE.token_nbytes * 30)
    first, second, third = (float(str(policy.budget)) for policy in chosen)
    assert second == 1.0 and first < 0.5 and third < 0.5
    why = reasons(steep, SHAPE, 60, 8, chosen)
    assert why[1].loss == 0 and why[1].half is not None and why[1].half > why[0].loss


def test_what_cannot_be_mixed_is_solved_by_itself() -> None:
    """Selectors that replay, and caches that grow, stand in all layers or in none."""
    forms = ("h2o", "kvzip:chunk=7:sinks=2", "h2o:decode=grow")
    for best in range(3):
        curves = draw_curves(0, forms=forms)
        table = [[1.0 * (number // 5 != best) + 1 - SHARES[number % 5] for number in range(15)]] * 3
        chosen = solve(curves._replace(distortion=table), SHAPE, 60, 8, 3 * SHAPE.token_nbytes * 40)
        assert {str(policy).partition("@")[0] for policy in chosen} == {forms[best]}
        Policy.by_layer(chosen, budget=0.5)


def test_layers_that_read_a_part_have_their_own_bytes() -> None:
    """The first layer reads everything, and so has no index."""
    curves = draw_curves(0, layers=2, forms=("h2o+labels:read=4:dense=1",))
    sizes = [
        [choice.nbytes for choice in options(curves, number, range(len(SHARES)), SHAPE, 60, 8)] for number in range(2)
    ]
    assert all(first < second for first, second in zip(*sizes, strict=True))


def test_candidates_without_a_measurement_are_not_chosen() -> None:
    curves = draw_curves(0, forms=("h2o", "window"))
    table: list[list[float | None]] = [[None] * 5 + [1 - share for share in SHARES]] * 3
    chosen = solve(curves._replace(distortion=table), SHAPE, 60, 8, 3 * SHAPE.token_nbytes * 40)
    assert all("window" in str(policy) for policy in chosen)


def test_refused(tmp_path: Path) -> None:
    model = build("llama", layers=3)
    file = tmp_path / "plan.json"
    save_curves(file, draw_curves(1, model=identity(model)))
    assert load_tuned(str(file)) == draw_curves(1, model=identity(model))
    with pytest.raises(KVPolicyError, match="must fit a text of 60 and 8 tokens, got 500 bytes, which is less than"):
        kvpolicy.attach(model, f"tuned:file={file}@500B")
    with pytest.raises(KVPolicyError, match="must be for this model, got one that was made for another model"):
        kvpolicy.attach(build("qwen2", layers=3), f"tuned:file={file}@0.5")
    with pytest.raises(KVPolicyError, match="with 3 layers instead of 2"):
        kvpolicy.attach(build("llama", layers=2), f"tuned:file={file}@0.5")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"distortion": [[1.0]]}))
    with pytest.raises(KVPolicyError, match="whole curves"):
        kvpolicy.attach(model, f"tuned:file={file}@0.5")
    assert not kvpolicy.hf.attachment.attachments.get(model)  # pyright: ignore


def test_length_is_that_of_the_texts_or_as_given(tmp_path: Path) -> None:
    """A budget in bytes is a larger share of a shorter text."""
    model = build("llama", layers=3)
    save_curves(tmp_path / "plan.json", draw_curves(2, model=identity(model)))
    found = [
        kvpolicy.plan(model.config, f"tuned:file={tmp_path}/plan.json{length}@9000B", prompt=60, new=8).policy
        for length in ("", ":length=68", ":length=300")
    ]
    assert found[0] == found[1] and found[0] != found[2]
    assert dataclasses.is_dataclass(found[0].at(0))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"layers": None},
        {"text": {}},
        {"text": None},
        {"text": {"prompt": 3, "new": 1}},
        {"text": {"prompt": math.inf, "new": 1, "windows": 1}},
        {"text": {"prompt": 1e30, "new": 1, "windows": 1}},
        {"text": {"prompt": "3", "new": 1, "windows": 1}},
        {"model": None},
        {"measure": "taste"},
        {"layers": ["a"] * 3},
        {"depth": "3"},
        {"evidence": {"0.1": {}}},
        {"evidence": "good"},
        {"distortion": []},
        {"distortion": [[1.0]]},
        {"spread": [[]]},
        {"candidates": []},
        {"candidates": [1]},
        {"candidates": None},
    ],
)
def test_files_that_are_no_curves(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save_curves(file, draw_curves(0))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(KVPolicyError, match=r"whole curves|by a dictionary|format 1 or older|curves or layers"):
        load_tuned(str(file))


@pytest.mark.parametrize("name", ["a b", "a+b", "a@b:c", "50%", "~", "ä/ö", "none", "auto", "a=b,c"])
def test_any_file_name(name: str, tmp_path: Path) -> None:
    """A spec writes what it must not contain as URLs do."""
    file = tmp_path / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    save_curves(file, draw_curves(0))
    policy = TunedPolicy(TunedFile(file=str(file)), 0.3)
    assert Policy.parse(str(policy)) == policy and eval(repr(policy)) == policy
    assert not set(str(policy)) & set(" ,'\"") and isinstance(policy.source.file, str)
    load_tuned(Policy.parse(str(policy)).source.file)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("part", ["allocator", "selector", "merger", "codec", "reader", "heads", "decode", "distinct"])
def test_parts_are_unknown_without_a_model(part: str) -> None:
    with pytest.raises(KVPolicyError, match="must be read after it is attached"):
        getattr(Policy.parse("tuned:file=a.json"), part)


def cost(items: list[list[Option]], chosen: list[int]) -> int:
    return sum(options[index].cost for options, index in zip(items, chosen, strict=True))


def loss(items: list[list[Option]], chosen: list[int]) -> float:
    return sum(options[index].loss for options, index in zip(items, chosen, strict=True))


def draw(dice: Random, count: int, options: int) -> list[list[Option]]:
    """Items whose losses fall with cost, as curves of distortion do, and options that nobody should choose."""
    items: list[list[Option]] = []
    for _ in range(count):
        scale = 10 ** dice.uniform(-2, 1)
        costs = sorted(dice.randint(1, 60) for _ in range(options))
        items.append([Option(c, scale * dice.uniform(0.5, 1.5) / c ** dice.uniform(0.5, 2)) for c in costs])
    return items


@product("seed", range(60), sample=[(seed,) for seed in range(20)])
def test_random_options(seed: int) -> None:
    dice = Random(seed)
    items = draw(dice, dice.randint(1, 12), dice.randint(1, 12))
    for limit in (0, 10, 50, 120, 300, 700):
        chosen = choose(items, limit)
        best = least_loss(items, limit)
        if best is None:
            assert chosen is None
            continue
        assert chosen is not None and cost(items, chosen) <= limit
        assert loss(items, chosen) >= best - 1e-12
        # What one step of one item can be away from the optimum of the relaxation.
        largest = max(max(o.loss for o in options) - min(o.loss for o in options) for options in items)
        assert loss(items, chosen) <= best + largest


@product("seed", range(10), sample=[(seed,) for seed in range(3)])
def test_within_one_percent_of_the_optimum_for_many_options(seed: int) -> None:
    """As in a tuning: many layers, and many sizes of each."""
    dice = Random(seed)
    items: list[list[Option]] = []
    for _ in range(16):
        scale = 10 ** dice.uniform(-1, 1)
        power = dice.uniform(0.5, 2)
        items.append([Option(c, scale * dice.uniform(0.9, 1.1) / c**power) for c in range(2, 60)])
    for limit in (80, 160, 320, 640):
        chosen = choose(items, limit)
        best = least_loss(items, limit)
        assert chosen is not None and best is not None
        assert loss(items, chosen) <= 1.01 * best


@pytest.mark.parametrize("seed", range(6))
def test_costs_of_more_units_than_are_counted(seed: int) -> None:
    """Costs are then rounded up, so that what is chosen fits; the optimum of the exact costs is near."""
    dice = Random(seed)
    items = draw(dice, 8, 8)
    # Just above a multiple of the scale, so that a cost that is rounded down is too small by a whole unit.
    large = [[Option(option.cost * 1000 + dice.randint(1, 9), option.loss) for option in options] for options in items]
    for limit in (120, 200, 300):
        chosen = choose(large, limit * 1000)
        best = least_loss(items, limit - 1)
        assert best is not None and chosen is not None
        assert cost(large, chosen) <= limit * 1000 and loss(large, chosen) <= 1.05 * best


@pytest.mark.parametrize("scale", [1, 1000, UNITS + 1])
def test_the_whole_limit_is_used(scale: int) -> None:
    """By an option on the hull, and by one beside it that its rounded cost leaves out."""
    items = [[Option(scale, 9.0), Option(3 * scale, 1.0)], [Option(scale, 2.0), Option(2 * scale, 1.5)]]
    assert choose(items, 4 * scale) == [1, 0]
    assert choose(items, 5 * scale) == [1, 1]
    beside = [Option(scale, 10.0), Option(2 * scale, 8.0), Option(4 * scale, 1.0)]
    assert choose([beside], 2 * scale) == [1] and choose([beside], 2 * scale - 1) == [0]


def test_ties_and_equal_options() -> None:
    same = [Option(2, 1.0)] * 3
    assert choose([same, same], 4) == [0, 0]
    assert choose([same, same], 3) is None
    assert choose([[Option(0, 1.0), Option(0, 0.5)]], 0) == [1]
    assert choose([], 0) == []
    assert choose([[Option(1, 1.0), Option(2, 2.0)]], 10) == [0], "it costs more and loses more"


def test_layers_have_no_length(tmp_path: Path) -> None:
    save_layers(tmp_path / "layers.json", ["window@0.5"] * 3)
    model = build("llama", layers=3)
    kvpolicy.attach(model, f"tuned:file={tmp_path}/layers.json@0.5").detach()
    with pytest.raises(KVPolicyError, match="length must be given only for curves, got length=68 for the layers of"):
        kvpolicy.attach(model, f"tuned:file={tmp_path}/layers.json:length=68@0.5")

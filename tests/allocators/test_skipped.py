"""The option `skip` of allocators: the first and last layers keep every token, in full precision."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import Policy
from kvpolicy.allocators.profile import save_profile
from kvpolicy.allocators.skipped import SkippedLayers
from kvpolicy.codecs.plain import Plain
from kvpolicy.registry import ALLOCATORS, lookup, name_of
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.policies import COMPARING
from tests.reference.allocators import skip

PROMPT = torch.arange(60, 260).repeat(2)[None]
"""400 tokens."""


@pytest.mark.parametrize("base", ["uniform", "pyramid:beta=5", "squeeze"])
def test_as_the_slow_version(base: str) -> None:
    rng = random.Random(0)
    for _ in range(60):
        layers = rng.randint(3, 9)
        ceiling = rng.randint(4, 60)
        floor = rng.randint(1, 4)
        first, last = rng.choice([(1, 0), (0, 1), (1, 1), (0, 2)])
        least = (first + last) * ceiling + floor * (layers - first - last)
        total = rng.choice([least, rng.randint(least, layers * ceiling + 20), layers * ceiling])
        allocator: Any = Policy.parse(f"{base}:skip={first}-{last}+snapkv").allocator
        metrics = torch.rand(1, layers, generator=torch.Generator().manual_seed(rng.randint(0, 99)))
        got = allocator.budgets(metrics, torch.tensor([total]), floor, torch.tensor([ceiling]), layers)
        config = {
            "first": first,
            "last": last,
            "base": {"name": name_of(type(allocator.base)), **dataclasses.asdict(allocator.base)},
        }
        want = skip.budgets(config, metrics[0].tolist(), total, layers, floor, ceiling)
        assert got.tolist() == [want] and sum(want) == total


def test_rows_are_alone() -> None:
    allocator = SkippedLayers(first=1, last=1)
    total = torch.tensor([40, 100, 22])
    ceiling = torch.tensor([10, 20, 9])
    together = allocator.budgets(None, total, 1, ceiling, 4)
    assert together.sum(-1).tolist() == total.tolist()
    for row in range(3):
        assert torch.equal(allocator.budgets(None, total[row, None], 1, ceiling[row, None], 4)[0], together[row])


CODED = "kivi:bits=2:group_size=8:residual_length=8"
KEPT = [
    f"uniform:skip=first:2,last:2+snapkv+{CODED}@0.7",
    f"squeeze:skip=1-2+h2o+{CODED}@0.8",
    "cake:window=8:skip=2-1+snapkv+tokenwise@0.7",
    "zigzag:window=8:skip=0-1+h2o+kvarn:group_size=8:sinks=2@0.6",
    "global:skip=1-0+kvzip@0.6",
    f"uniform:skip=2-2+{CODED}",
    "uniform:skip=1-1/adakv+snapkv+tokenwise@0.7",
    "uniform:skip=2-1+snapkv+tokenwise@1600KiB",
    "uniform:skip=1-1+h2o+mikv@0.5",
    "squeeze:skip=1-1+h2o+merge@0.6",
    "uniform:skip=1-1+snapkv+lowrank:rank=8@0.6",
]


@pytest.mark.parametrize("spec", KEPT)
def test_layers_that_are_skipped_keep_every_token_as_it_is(spec: str) -> None:
    model, _ = kvpolicy.tiny()
    policy = Policy.parse(spec)
    allocator: Any = policy.allocator
    with torch.no_grad(), kvpolicy.attach(model, spec) as handle:
        model.generate(PROMPT, max_new_tokens=12, do_sample=False)
        cache: Any = handle.cache
        plan: Any = handle.plan
        assert cache.nbytes == plan.nbytes, "what is planned is what is held"
        layers = range(len(cache.layers))
        skipped = allocator.skipped(layers)
        assert len(skipped) == allocator.first + allocator.last
        for index in layers:
            held = cache.layers[index].store
            codec = held.spec.codec
            assert isinstance(codec, Plain) == (index in skipped or isinstance(policy.codec, Plain))
            if index not in skipped:
                assert isinstance(codec, type(policy.codec))
                continue
            positions = cache.layers[index].positions.flatten()
            count = torch.bincount(positions[positions >= 0], minlength=411)
            assert (count == cache.layers[index].store.shape.heads).all(), "411 tokens in every head"


@pytest.mark.parametrize("spec", ["uniform:skip=2-2+snapkv@0.6", f"squeeze:skip=1-1+h2o+{CODED}@0.6"])
def test_the_budget_is_the_mean_of_all_layers(spec: str) -> None:
    config = kvpolicy.tiny()[0].config
    found = kvpolicy.plan(config, spec, prompt=1000)
    without = kvpolicy.plan(config, spec.replace(":skip=2-2", "").replace(":skip=1-1", ""), prompt=1000)
    assert sum(layer.tokens for layer in found.layers) == sum(layer.tokens for layer in without.layers) == 8 * 600
    assert found.layers[0].tokens == 1000 > found.layers[3].tokens


def test_bytes_are_those_of_the_limit() -> None:
    config = kvpolicy.tiny()[0].config
    for limit in (2_900_000, 2_300_000):
        plan = kvpolicy.plan(config, f"uniform:skip=1-1+snapkv@{limit}B", prompt=1000, new=8)
        assert limit * 0.97 < plan.nbytes <= limit and plan.layers[0].tokens == 1008


def test_logits_of_a_full_budget_are_those_of_the_stock_cache() -> None:
    model, _ = kvpolicy.tiny()
    with torch.no_grad():
        want = model(PROMPT).logits
        with kvpolicy.attach(model, "uniform:skip=2-1+h2o@1.0"):
            torch.testing.assert_close(model(PROMPT).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "uniform:skip=2-2+snapkv@0.5",
            r"at least 201 tokens per layer to skip 4 of 8 layers with 400 tokens each, got 200",
        ),
        ("uniform:skip=2-2+snapkv@300KiB", r"The budget must be at least \d+B for 1 row"),
        ("uniform:skip=1-1+h2o+mikv@1.0", "got uniform:skip=1-1.*; try decode=grow, or a budget below 1.0"),
        ("uniform:skip=1-1+streaming+minicache:start=0@0.9", "got .*; try uniform"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, message: str) -> None:
    model, _ = kvpolicy.tiny()
    with torch.no_grad(), pytest.raises(KVPolicyError, match=message), kvpolicy.attach(model, spec):
        model(PROMPT)


def test_a_model_without_other_layers_is_refused_before_it_is_attached() -> None:
    model, _ = kvpolicy.tiny()
    with pytest.raises(KVPolicyError, match=r"must leave at least one of the 8 layers .*, got skip=4-4; try skip=3-3"):
        kvpolicy.attach(model, "uniform:skip=4-4+snapkv@0.9")


def test_the_profile_of_the_model_serves_the_layers_that_are_left(tmp_path: Path) -> None:
    model, _ = kvpolicy.tiny()
    path = tmp_path / "profile.json"
    save_profile(path, "tiny", [0.99, 0.1, 0.2, 0.3, 0.9, 0.91, 0.4, 0.99])
    with torch.no_grad(), kvpolicy.attach(model, f"squeeze:profile={path}:skip=1-1+snapkv@0.7") as handle:
        model(PROMPT)
        assert handle.plan is not None
        tokens = [layer.tokens for layer in handle.plan.layers]
    ends = PROMPT.shape[1]
    assert [tokens[0], tokens[7]] == [ends, ends] and tokens[4] == tokens[5] < min(tokens[1:4] + tokens[6:7])
    for option in ("", ":skip=1-1"):
        save_profile(path, "another", [0.1, 0.2, 0.3])
        with pytest.raises(KVPolicyError, match="must be of a model with 8 layers, got 3"):
            kvpolicy.attach(model, f"squeeze:profile={path}{option}+snapkv@0.7")
        with pytest.raises(KVPolicyError, match="must be a readable file"):
            kvpolicy.plan(model, f"squeeze:profile={tmp_path / 'none.json'}{option}+snapkv@0.7", prompt=100)


@pytest.mark.parametrize(
    ("given", "written"),
    [("first:2,last:1", "2-1"), ("first:2", "2-0"), ("last:3", "0-3"), ("2-2", "2-2")],
)
@pytest.mark.parametrize("name", [*ALLOCATORS])
def test_every_allocator_takes_it(name: str, given: str, written: str) -> None:
    policy = Policy.parse(f"{name}:skip={given}+{'kvzip' if name in COMPARING else 'snapkv'}@0.5")
    allocator: Any = policy.allocator
    assert isinstance(allocator, SkippedLayers) and isinstance(allocator.base, lookup(name)[1])
    assert str(policy).startswith(f"{name}:skip={written}+")
    assert Policy.parse(str(policy)) == policy == Policy.from_dict(policy.to_dict())


def test_it_stands_among_other_options() -> None:
    policy = Policy.parse("squeeze:keep_share=0.3:skip=first:1,last:1:groups=4/adakv+snapkv")
    allocator: Any = policy.allocator
    assert (allocator.base.keep_share, allocator.base.groups, allocator.first, allocator.last) == (0.3, 4, 1, 1)
    assert str(policy) == "squeeze:keep_share=0.3:groups=4:skip=1-1/adakv+snapkv@0.2"

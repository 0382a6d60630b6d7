"""Layers with a state, with latent vectors, or with the keys of earlier layers do what all layers do.

That is: plans, rows, forks, marks, files, resets, shared prefixes and compiled steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.states import States
from tests.conformance.models import LATENT, SHARED, build
from tests.engine.filled import prefilled, step, text

STATES = ["qwen3_5", "granite_hybrid", "falcon_h1", "lfm2", "nemotron_h"]
"""Linear attention, a state space model, both in one layer, convolutions, and layers that hold nothing."""
FAMILIES = [*STATES, *LATENT, *SHARED]
SNAPKV = "snapkv@0.5"
CODED = ["h2o+kivi:group_size=4:residual_length=4@0.5", "full+tokenwise:bits=8"]


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def states(cache: Any) -> list[Tensor]:
    """Copies of all states of a cache."""
    return [state for layer in cache.layers if isinstance(layer, States) for state in layer.copy_states()]


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *((family, SNAPKV) for family in [*FAMILIES, "mimo_v2_flash"]),
        *((family, policy) for family in [*LATENT, "mimo_v2_flash"] for policy in CODED),
    ],
)
def test_planned_bytes_are_held(family: str, policy: str) -> None:
    model = build(family)
    planned = kvpolicy.plan(model.config, policy, batch=2, prompt=20, new=8)
    with kvpolicy.attach(model, policy):
        cache = prefilled(model)
        sizes = [state.nbytes for state in states(cache)]
        for _ in range(8):
            step(model, cache)
        assert (cache.nbytes, cache.full_nbytes) == (planned.nbytes, planned.full_nbytes)
        assert [state.nbytes for state in states(cache)] == sizes, "states do not grow"
        report = cache.report()
    assert sum(layer.nbytes.get("state", 0) for layer in report.layers) == sum(sizes)
    assert cache.nbytes == report.nbytes == sum(sum(layer.nbytes.values()) for layer in report.layers)


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *((family, SNAPKV) for family in FAMILIES),
        ("deepseek_v3", "h2o+tokenwise:bits=8:residual_length=2:block_size=2@0.6"),
    ],
)
def test_rows_are_selected_repeated_forked_and_saved(family: str, policy: str, tmp_path: Path) -> None:
    model = build(family)
    path = str(tmp_path / "cache.safetensors")
    with kvpolicy.attach(model, policy):
        cache = prefilled(model, rows=3)
        fork = cache.fork([2, 0])
        repeated = cache.fork([1, 1])
        other = cache.fork([1])
        other.batch_repeat_interleave(2)
        cache.save(path)
        loaded = kvpolicy.PolicyCache.load(model, path)
        assert loaded.nbytes == cache.nbytes
        for token in (5, 6):
            expected = step(model, cache, token)
            assert torch.equal(step(model, loaded, token), expected)
            assert torch.allclose(step(model, fork, token), expected[[2, 0]], atol=1e-5)
            assert torch.equal(step(model, repeated, token), step(model, other, token))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_steps_are_undone_bit_for_bit(family: str, accepted: int) -> None:
    model = build(family)
    with kvpolicy.attach(model, "h2o@8"):
        cache = prefilled(model)
        other = cache.fork()
        before = cache.nbytes
        cache.mark(most=3)
        for token in (5, 6, 7):
            step(model, cache, token)
        assert cache.nbytes > before + 3 * sum(state.nbytes for state in states(cache))
        cache.rollback(accepted)
        assert cache.nbytes == before
        for token in (5, 6, 7)[:accepted]:
            step(model, other, token)
        assert all(torch.equal(*pair) for pair in zip(states(cache), states(other), strict=True))
        assert torch.equal(step(model, cache), step(model, other))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reset_cache_takes_another_number_of_rows(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, SNAPKV):
        cache = prefilled(model, rows=2)
        cache.reset()
        cache.expect(20, 8)
        again = model(text(3, 20), cache=cache).logits[:, -1]
        assert torch.equal(again, model(text(3, 20), cache=kvpolicy.PolicyCache(model, prompt=20, new=8)).logits[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_share_a_prefix_answer_as_one_alone(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "full"):  # what is shared is never evicted
        cache = prefilled(model, rows=1)
        alone = cache.fork()
        shared = cache.fork([0, 0], shared=True)
        for turn in (text(1, 5, 1), text(1, 1, 2), text(1, 1, 3)):
            expected = model(turn, cache=alone).logits[:, -1]
            found = model(turn.expand(2, -1), cache=shared).logits[:, -1]
            assert torch.allclose(expected.expand_as(found), found, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "backend"),
    [("granite_hybrid", "eager"), ("deepseek_v3", "aot_eager"), *((family, "eager") for family in SHARED)],
)
def test_a_compiled_step_is_one_graph(family: str, backend: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, SNAPKV):
        eager = prefilled(model)
        compiled = prefilled(model)
        run = torch.compile(model, backend=backend, fullgraph=True)
        for token in (5, 6, 7):
            expected = step(model, eager, token)
            found = run(torch.full((2, 1), token), **cache_argument(model, compiled)).logits[:, -1]
            compiled.tick()
            assert torch.allclose(found, expected, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["deepseek_v3", *SHARED])
def test_beams_are_those_of_the_stock_cache(family: str) -> None:
    model = build(family)
    mask = torch.ones(2, 20, dtype=torch.int64)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    expected = model.generate(text(2, 20), pad_token_id=0, **options)
    with kvpolicy.attach(model, "window@64"):
        assert torch.equal(model.generate(text(2, 20), pad_token_id=0, **options), expected)

"""Recipes: which policies can compress prompts in an engine, and how many tokens they keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.hf.layer import make_store
from kvpolicy.hf.model_spec import describe
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy_vllm.engine import check_compresses
from kvpolicy_vllm.recipe import Recipe
from tests.vllm.compressed import LEAST, POLICIES, recipe_of
from tests.vllm.models import Saved, make_model, make_text


def transfer(**extra: Any) -> Any:
    return SimpleNamespace(get_from_extra_config=lambda name, default: extra.get(name, default))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recipe_keeps_what_attach_keeps(policy: str) -> None:
    """Also the last token, in every head: an engine computes it again."""
    model = make_model("llama3")
    recipe = recipe_of(policy)
    assert recipe.policy.decode == "grow"
    for tokens in (LEAST, 77, 130):
        with torch.no_grad(), kvpolicy.attach(model, recipe.policy):
            cache = kvpolicy.PolicyCache(model)
            model(torch.tensor([make_text(model, tokens)]), cache=cache)
        for layer in cache.policy_layers:
            assert ((layer.positions >= 0).sum(-1) == recipe.kept(tokens)).all()
            assert (layer.positions.amax(-1) == tokens - 1).all()


def test_a_short_prompt_is_kept_whole() -> None:
    assert recipe_of("window@100").kept(70) == 70


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("kvzip@0.2", "must be one of window, streaming, .* got kvzip"),
        ("kvcrush/kvzip@0.2", "got kvzip"),
        ("full", "got full"),
        ("squeeze+snapkv@0.2", "equally many tokens in all layers and heads"),
        ("uniform/adakv+snapkv:decode=grow@0.2", "equally many tokens in all layers and heads"),
        ("snapkv+merge@0.2", "must not merge tokens"),
        ("snapkv+kivi@0.2", "must not encode tokens"),
        ("snapkv+quest@0.2", "must read all tokens"),
        ("snapkv@1MiB", "a share of a prompt or a number of tokens"),
        ("window@1", "to keep two tokens"),
        ("expected@0.003:least=3", "The budget must be at least 5 tokens"),
        ("nothing@0.2", "nothing"),
    ],
)
def test_other_policies_are_refused(policy: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Recipe.parse(policy)


@pytest.mark.parametrize("value", ["0.5", "-1", "many", "", 1.5])
def test_counts_must_be_counts(value: object) -> None:
    for name in ("threshold", "prefills", "least"):
        with pytest.raises(KVPolicyError, match=f"KVPOLICY_{name.upper()} must be a number"):
            Recipe.parse("window@0.2", **{name: value})
    with pytest.raises(KVPolicyError, match="at least 1"):
        Recipe.parse("window@0.2", prefills=0)


def test_a_fraction_has_a_least_number_of_tokens() -> None:
    kept = {length: Recipe.parse("window@0.2").kept(length) for length in (700, 2048, 10_000)}
    assert kept == {700: 700, 2048: 1024, 10_000: 2000}
    assert str(Recipe.parse("window@0.2").policy) == "window:decode=grow@0.2:least=1024"
    assert Recipe.parse("window@0.2", least="512").kept(2048) == 512 == Recipe.parse("window@0.2:least=512").kept(2048)
    assert Recipe.parse("window@0.2", least=0).kept(2048) == 409
    assert Recipe.parse("window@300").kept(2048) == 300


def test_settings_of_an_engine_come_before_the_environment() -> None:
    variables = {"KVPOLICY_POLICY": "window@0.3", "KVPOLICY_THRESHOLD": "70", "KVPOLICY_PREFILLS": "2"}
    variables["KVPOLICY_LEAST"] = "50"
    found = Recipe.of(transfer(), variables)
    assert found == Recipe.parse("window@0.3", threshold=70, prefills=2, least=50) == Recipe.of(None, variables)
    assert Recipe.of(transfer(policy="h2o@0.2", threshold=80, least=0), variables) == Recipe.parse(
        "h2o@0.2", threshold=80, prefills=2, least=0
    )
    assert Recipe.of(transfer(), {}) is None is Recipe.of(None, {"KVPOLICY_POLICY": ""})
    assert Recipe.of(transfer(policy="window@0.3"), {}) == Recipe.parse("window@0.3")


def config(cache: str = "auto", *, sleeps: bool = False, **parallel: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype=cache),
    )


@pytest.mark.parametrize(
    ("policy", "found", "message"),
    [
        ("snapkv@0.4", config(data_parallel_size=2), "data_parallel_size must be 1"),
        ("snapkv@0.4", config(pipeline_parallel_size=2), "pipeline_parallel_size must be 1"),
        ("snapkv@0.4", config(tensor_parallel_size=4), "must divide the 2 KV heads"),
        ("tova@0.4", config(tensor_parallel_size=2), "compares heads"),
        ("kvcrush/h2o@0.4", config(tensor_parallel_size=2), "compares heads"),
        ("snapkv@0.4", config("fp8"), "must be auto"),
        ("snapkv@0.4", config(sleeps=True), "--enable-sleep-mode must be off .*, got it on"),
    ],
)
def test_other_engines_are_refused(saved: Saved, policy: str, found: Any, message: str) -> None:
    shape = describe(saved.model.config)
    with pytest.raises(KVPolicyError, match=message):
        check_compresses(found, recipe_of(policy), shape)
    for dtype in ("auto", "bfloat16"):
        check_compresses(config(dtype, tensor_parallel_size=1), recipe_of(policy), shape)


def _kept(recipe: Recipe, heads: slice) -> Tensor:
    """Positions that some heads of a random prompt keep, sorted."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 90, 16, generator=generator)[:, heads].flatten(1, 2) for n in (2, 1, 1))
    store = make_store(recipe.policy, 0)
    store.initialize(k, group=2)
    _, pending = store.attend_prompt(q, k, v, None, ScoreTransform(0.25))
    store.compress(pending, recipe.budget(90))
    return store.tensors.positions.sort(-1).values


@pytest.mark.parametrize("policy", POLICIES)
def test_only_selectors_that_look_at_each_head_alone_run_on_several_ranks(policy: str) -> None:
    """What a head keeps does not depend on the other heads, but for those that are refused."""
    recipe = recipe_of(policy)
    kept = [_kept(recipe, heads) for heads in (slice(0, 2), slice(0, 1), slice(1, 2))]
    apart = torch.cat(kept[1:], 1)
    assert torch.equal(kept[0], apart) != recipe.compares_heads

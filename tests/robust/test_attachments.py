"""Attached twice, to two models, changed meanwhile; caches where they do not belong; kinds of generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.engine.test_attach import trace
from tests.robust.hostile import FEW, SOME, answer, converse, each, exact, own, prompt, refused, roomy


@SOME
def test_nested(policy: str) -> None:
    """Two models of one config, attached and detached in the wrong order, disturb nobody; the same model only once."""
    outer = own()
    inner: Any = type(outer)(outer.config).eval()
    models = [outer, inner]
    before = [trace(model) for model in models]
    stock = [answer(model) for model in models]
    first = kvpolicy.attach(outer, policy)
    want = answer(outer)
    assert torch.equal(answer(inner), stock[1])
    with refused("already attached"):
        kvpolicy.attach(outer, "h2o@0.5")
    second = kvpolicy.attach(inner, "h2o@0.5")
    other = answer(inner)
    assert torch.equal(answer(outer), want)
    first.detach()
    assert torch.equal(answer(inner), other)
    again = kvpolicy.attach(outer, policy)
    first.detach()  # which is no longer attached
    assert torch.equal(answer(outer), want)
    second.detach()
    again.detach()
    assert [trace(model) for model in models] == before
    assert all(torch.equal(answer(model), right) for model, right in zip(models, stock, strict=True))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("how", ["shared", "copied"])
def test_a_model_made_from_the_config_of_an_attached_one(how: str, implementation: str) -> None:
    """Nothing tells its attention which earlier tokens are padding, so that it is refused, also after detaching."""
    model = own()
    model.set_attn_implementation(implementation)
    handle = kvpolicy.attach(model, "window@0.5")
    other: Any = type(model)(model.config if how == "shared" else copy.deepcopy(model.config)).eval()
    for _ in range(2):
        with refused(f"set_attn_implementation.'{implementation}'"):
            answer(other)
        with torch.no_grad():
            cache = other(prompt(), use_cache=True).cache
            for new in (1, 3):
                with refused("of a model without one"):
                    other(prompt(new), cache=cache)
        handle.detach()
    other.set_attn_implementation(implementation)
    stock: Any = type(model)(copy.deepcopy(own().config)).eval()
    stock.set_attn_implementation(implementation)
    stock.load_state_dict(other.state_dict())
    assert torch.equal(answer(other), answer(stock))


@SOME
def test_a_cache_with_a_model_that_has_no_policy(policy: str) -> None:
    """Its layers would attend to the newest tokens alone."""
    with kvpolicy.attach(build("llama"), policy), torch.no_grad():
        cache = PolicyCache(build("llama"))
        with refused("got one without a policy"):
            build("qwen2")(prompt(), cache=cache)
        with kvpolicy.attach(build("qwen2"), policy), refused("another model"):
            build("qwen2")(prompt(), cache=cache)
        build("llama")(prompt(), cache=cache)
        with refused("got one without a policy"):
            build("qwen2")(prompt(1), cache=cache)
        build("llama")(prompt(1), cache=cache)


@SOME
def test_changed_while_attached(policy: str) -> None:
    """What puts the policy out of action is noticed in the next forward."""
    model = own()
    layer = model.model.layers[1]
    held = layer.self_attn
    with kvpolicy.attach(model, policy), torch.no_grad():
        want = answer(model)
        layer.self_attn = type(held)(model.config, 1)
        layer.self_attn.load_state_dict(held.state_dict())
        with refused("must attend to the cache"):
            answer(model)
        layer.self_attn = held
        assert torch.equal(answer(model), want)
        model.set_attn_implementation("eager")
        with refused("'eager'"):
            answer(model)


@SOME
def test_a_layer_that_attends_twice(policy: str) -> None:
    """In a prompt and in a step: its tokens would be taken in twice, and nobody would see it."""
    model = own()
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=2)
        attention = model.model.layers[1].self_attn
        model(prompt(), cache=cache)
        once = attention.forward
        attention.forward = lambda *args, **kwargs: (once(*args, **kwargs), once(*args, **kwargs))[1]
        for call in (lambda: model(prompt(1), cache=cache), lambda: model(prompt(), use_cache=True)):
            with refused("must attend once"):
                call()


@SOME
def test_a_cache_is_used_again(policy: str) -> None:
    """Reset, with another batch; and unused in between."""
    model = build("llama")
    turns = [20, *TURNS[1:]]
    ids, mask = make_batch([20, 9, 3], turns)
    with kvpolicy.attach(model, policy):
        _, cache = converse(model, [26, 17], seed=1)
        cache.reset()
        cache.reset()
        again = talk(model, ids, mask, turns, cache)
        assert torch.equal(talk(model, ids, mask, turns, PolicyCache(model)), again)


@each("kind", ["static", "offloaded", "quantized"], often=FEW)
def test_other_caches(policy: str, kind: str) -> None:
    if kind == "offloaded":
        try:
            torch.Stream()
        except RuntimeError as error:  # a build for GPUs, on a machine without one
            pytest.skip(f"transformers cannot make this cache here: {error}")
    model = build("llama")
    with kvpolicy.attach(model, policy):
        with refused("must be a kvpolicy.PolicyCache or an ordinary DynamicCache"):
            answer(model, cache_implementation=kind)
        answer(model)


KINDS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"num_return_sequences": 2, "do_sample": True},
    "no cache": {"use_cache": False},
    "dynamic cache": {"cache_implementation": "dynamic"},
}


@each("kind", [*KINDS], often=FEW)
def test_kinds_of_generation(policy: str, kind: str) -> None:
    """The stock tokens at a full budget; at a small one, twice the same."""
    model = build("llama")
    how = KINDS[kind]
    torch.manual_seed(0)
    stock = answer(model, **how)
    for words in (policy, roomy(policy)):
        outs: list[torch.Tensor] = []
        for _ in range(2):
            with kvpolicy.attach(model, words):
                torch.manual_seed(0)
                outs.append(answer(model, **how))
        assert torch.equal(*outs)
    if exact(policy) or "use_cache" in how:
        assert torch.equal(outs[0], stock)

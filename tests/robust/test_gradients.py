"""Gradient mode, training, checkpoints: the stock gradient, or one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.play import make_batch
from tests.robust.hostile import FEW, SOME, answer, each, own, prompt, refused, roomy


def gradient(model: Any, **how: Any) -> Tensor:
    """Of a training step on a padded batch, in which nothing is predicted from padding."""
    model.zero_grad()
    torch.manual_seed(0)
    ids, mask = make_batch([26, 17], [26])
    follows = mask.bool() & mask.roll(1, 1).bool()
    model(ids, attention_mask=mask, labels=ids.where(follows, -100), **how).loss.backward()
    return model.model.layers[1].self_attn.k_proj.weight.grad.clone()


@pytest.mark.filterwarnings("ignore:.*checkpoint")
@each("how", ["train", "dropout", "checkpoints", "eager"], often=FEW)
def test_a_training_step(policy: str, how: str) -> None:
    model = own()
    if how == "eager":
        model.set_attn_implementation("eager")
    if how == "checkpoints":
        model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3 if how in ("dropout", "eager") else 0.0
    model.train()
    stock = gradient(model, use_cache=False)
    with kvpolicy.attach(model, policy):
        assert torch.equal(gradient(model), stock)


@each("family", ["llama", "gemma2"])
def test_backward_through_a_prompt_with_a_cache(policy: str, family: str) -> None:
    """A prompt attends to itself alone, so its gradient is whole, also where scores have a cap."""
    model = own(family)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # which caps scores, unlike others of transformers
    stock = gradient(model, cache=DynamicCache(config=model.config))
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        assert torch.allclose(gradient(model, cache=cache), stock, atol=1e-6, rtol=1e-3)
    held = [t for layer in cache.policy_layers for t in (layer.keys, layer.values)]
    assert not any(t.requires_grad for t in held)
    assert "squeeze" not in policy or not cache.cosines().requires_grad


@each("turns", [[1], [1, 1, 1], [4], [4, 1]], often=FEW)
def test_backward_through_slots(policy: str, turns: list[int]) -> None:
    """They hold no graph, so a gradient would lack a part."""
    model = own()
    start = 26
    total = torch.zeros(())
    ids, _ = make_batch([26], [26, *turns])
    with kvpolicy.attach(model, roomy(policy)):
        cache = PolicyCache(model)
        model(ids[:, :26], cache=cache)
        for size in turns:
            total = total + model(ids[:, start : start + size], cache=cache).logits.sum()
            start += size
        with refused("Gradients cannot flow"):
            total.backward()


@SOME
def test_training_mode(policy: str) -> None:
    """`generate` gives the same as in evaluation; attention that is dropped at random is refused."""
    model = own()
    with kvpolicy.attach(model, policy):
        want = answer(model)
        model.train()
        assert torch.equal(answer(model), want)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        with refused("at random"):
            answer(model)


@pytest.mark.filterwarnings("ignore:.*checkpoint")
@SOME
def test_checkpoints_with_a_cache(policy: str) -> None:
    """Transformers takes the cache from the layers in training mode, and works on in evaluation."""
    model = own()
    with kvpolicy.attach(model, policy):
        want = answer(model)
        model.gradient_checkpointing_enable()
        assert torch.equal(answer(model), want)
        model.train()
        with refused("must attend to the cache"):
            model(prompt(), cache=PolicyCache(model))

"""Models on meta, moved between dtypes and devices, of another dtype than their config, and under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import TURNS, forward, make_batch, talk
from tests.conformance.policies import CODECS, MERGERS, SELECTORS, words
from tests.robust.hostile import FEW, NEW, SOME, converse, each, own, prompt, refused
from tests.sampling import each_once, product


def on_meta() -> Any:
    config = build("llama").config
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@SOME
def test_meta(policy: str) -> None:
    model = on_meta()
    with kvpolicy.attach(model, policy), refused("meta device"), torch.no_grad():
        model(prompt().to("meta"), use_cache=True)


@SOME
def test_loaded_after_attaching(policy: str) -> None:
    """From meta to the CPU: the answers are the loaded weights'."""
    model = own()
    other = own()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with kvpolicy.attach(other, policy):
        want, _ = converse(other, [26, 17])
    with kvpolicy.attach(model, policy):
        model.load_state_dict(other.state_dict())
        assert torch.equal(converse(model, [26, 17])[0], want)


@SOME
def test_another_dtype_between_prompts(policy: str) -> None:
    model = own()
    other = own().to(torch.bfloat16)
    with kvpolicy.attach(other, policy):
        want, fresh = converse(other, [26, 17])
    with kvpolicy.attach(model, policy):
        converse(model, [26, 17])
        model.to(torch.bfloat16)
        got, cache = converse(model, [26, 17])
    assert torch.equal(got, want)
    assert [kept_positions(a) for a in cache.policy_layers] == [kept_positions(b) for b in fresh.policy_layers]
    assert cache.plan is not None and cache.nbytes == fresh.nbytes


@each("new", [1, 3], often=FEW)
def test_another_dtype_in_a_conversation(policy: str, new: int) -> None:
    model = own()
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        model.to(torch.bfloat16)
        with refused("got torch.bfloat16"):
            model(prompt(new), cache=cache)


@SOME
def test_to_meta_in_a_conversation(policy: str) -> None:
    """The same for devices, of which a CPU has no other."""
    model = own()
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        model.to("meta")
        with refused("meta device"):
            model(prompt(1).to("meta"), cache=cache)


@pytest.mark.gpu
@SOME
def test_another_device_between_prompts_and_in_a_conversation(policy: str) -> None:
    model = own()
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        model.cuda()
        with refused("on cuda"):
            model(prompt(1).cuda(), cache=cache)
        fresh = PolicyCache(model)
        ids, mask = (t.cuda() for t in make_batch([26, 17]))
        assert torch.isfinite(talk(model, ids, mask, TURNS, fresh)[0]).all()
    assert all(layer.positions.device.type == "cuda" for layer in fresh.policy_layers)


@SOME
def test_out_of_inference_mode(policy: str) -> None:
    """A prompt in inference mode, and the steps outside, with and without gradients."""
    model = build("llama")
    ids, mask = make_batch([26, 17])
    with kvpolicy.attach(model, policy):
        want, _ = converse(model, [26, 17])
        cache = PolicyCache(model, new=NEW)
        start = 0
        for number, size in enumerate(TURNS):
            with torch.inference_mode(number % 3 == 0):
                logits = forward(model, ids, mask, start, start + size, cache)
            assert torch.equal(logits, want[:, start : start + size])
            start += size
        fresh = PolicyCache(model)
        with torch.inference_mode():
            model(prompt(), cache=fresh)
        model(prompt(1), cache=fresh)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("policy", ["full", "uniform/adakv+h2o:decode=grow@0.5", words("h2o:decode=grow", "rotate")])
def test_slots_are_added_in_the_mode_of_the_cache(policy: str, first: bool) -> None:
    """Else a step in the other mode could not write to them, nor a rollback."""
    model = build("llama", layers=1)
    ids, _ = make_batch([20], [20, 60])
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        with torch.no_grad(), torch.inference_mode(first):
            model(ids[:, :20], cache=cache)
        grown = 0
        for column in range(20, 60):
            slots = cache.policy_layers[0].positions.numel()
            with torch.no_grad(), torch.inference_mode((column % 20 < 17) != first):
                model(ids[:, column : column + 1], cache=cache)
            grown += cache.policy_layers[0].positions.numel() > slots
            if column == 40:
                cache.mark(most=30)
        assert grown > 1
        with torch.inference_mode(first):
            cache.rollback(2)
            cache.expect(None, 40)
        with torch.no_grad():
            cache.tick()
            model(ids[:, :1], cache=cache)


@SOME
def test_autocast(policy: str) -> None:
    """Keys and values in one dtype, bytes as planned, and near to what the model says without."""
    model = build("llama")
    with kvpolicy.attach(model, policy):
        plain, _ = converse(model, [26])
        with torch.autocast("cpu", torch.bfloat16):
            got, cache = converse(model, [26])
            stock = talk(model, *make_batch([26]), TURNS[:1], transformers.DynamicCache())
        assert torch.isfinite(got).all()
        assert (got[:, :26] - plain[:, :26]).abs().max() < 3 * (stock - plain[:, :26]).abs().max()
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        assert {layer.keys.dtype for layer in cache.policy_layers if layer.keys is not None} == {torch.bfloat16}
        with refused("autocast"), torch.no_grad():
            model(prompt(1), cache=cache)


DTYPES = [torch.bfloat16, torch.float16]
OUTSIDE = [
    "full+quest:read=8:page=2:dense=0",
    "full+labels:read=8:dense=0:host=true",
    "full+sparq:read=8",
    "full+centroids:read=8:page=2",
    "full+retrieval:recent=1:read=8:cluster=4",
    "full+shadowkv:read=8:page=2:rank=3:sinks=1:recent=2",
    "uniform/even+h2o+turboquant:bits=4@0.5",
    "uniform/adakv+snapkv:window=4+tokenwise:bits=4@0.5",
    "squeeze+h2o+gear:group_size=4:residual_length=4@0.5",
    "expected:sinks=2@0.5",
]


@product("policy,dtype", OUTSIDE, DTYPES, sample=each_once(OUTSIDE, DTYPES))
def test_a_policy_computes_outside_autocast(policy: str, dtype: torch.dtype) -> None:
    """As for a model in this dtype: its parts are written for the dtypes of their tensors."""
    model = build("llama")
    with kvpolicy.attach(model, policy), torch.no_grad():
        plain, _ = converse(model, [26, 17])
        with torch.autocast("cpu", dtype):
            got, cache = converse(model, [26, 17])
        assert torch.isfinite(got).all() and cache.plan is not None and cache.nbytes == cache.plan.nbytes
        assert (got - plain)[0, :26].abs().max() < 0.2 * plain.abs().max()


PARTS = [*SELECTORS, *MERGERS, *CODECS]


@product("name", PARTS, sample=[(name,) for name in ("expected", "compactor", "merge", "blend", "kivi")])
def test_double_precision(name: str) -> None:
    model = build("llama", torch.float64)
    with kvpolicy.attach(model, words(*(() if name in SELECTORS else ("h2o",)), name)), torch.no_grad():
        got, cache = converse(model, [26, 17])
    assert torch.isfinite(got).all() and got.dtype == torch.float64
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes


def test_a_plan_has_the_dtype_of_the_weights() -> None:
    model = own()
    whole = kvpolicy.plan(model, "full", prompt=64)
    half = kvpolicy.plan(model.to(torch.bfloat16), "full", prompt=64)
    model.config.dtype = torch.float32
    again = kvpolicy.plan(model, "full", prompt=64)
    assert again.full_nbytes == half.full_nbytes == whole.full_nbytes / 2
    assert kvpolicy.plan(model, "full", prompt=64, dtype=torch.float32).full_nbytes == whole.full_nbytes
    assert kvpolicy.plan(model.config, "full", prompt=64).full_nbytes == whole.full_nbytes


def test_a_model_without_weights_is_planned_and_refuses_its_first_forward() -> None:
    model = own().to("meta")
    with kvpolicy.attach(model, "h2o@0.5"), pytest.raises(kvpolicy.KVPolicyError, match="must have its weights"):
        model(torch.ones(1, 9, dtype=torch.int64))
    assert kvpolicy.plan(model, "h2o@0.5", prompt=64).nbytes > 0

"""Models on meta, moved between dtypes and devices, under autocast, and under other defaults of PyTorch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import PolicyCache, registry
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import CODECS, MERGERS, SELECTORS, words
from tests.robust.hostile import FEW, POLICIES, SOME, converse, each, own, prompt, refused
from tests.sampling import each_once, product


@SOME
def test_without_weights(policy: str) -> None:
    """On meta it is planned, and refuses its first forward."""
    model = own().to("meta")
    assert kvpolicy.plan(model, policy, prompt=64).nbytes > 0
    with kvpolicy.attach(model, policy), torch.no_grad():
        with refused("tokens on the meta device"):
            model(prompt().to("meta"), use_cache=True)
        with refused("must have its weights"):
            model(prompt(), use_cache=True)


@each("how", ["dtype", "weights"], often=tuple(POLICIES))
def test_changed_between_prompts(policy: str, how: str) -> None:
    """The answers are those of the weights that it has now."""
    model = own()
    other = own()
    if how == "dtype":
        other.to(torch.bfloat16)
    else:
        for parameter in other.parameters():
            parameter.data.mul_(0.5)
    with kvpolicy.attach(other, policy):
        want, fresh = converse(other, [26, 17])
    with kvpolicy.attach(model, policy):
        converse(model, [26, 17])
        model.to(other.dtype).load_state_dict(other.state_dict())
        got, cache = converse(model, [26, 17])
    assert torch.equal(got, want)
    assert [kept_positions(a) for a in cache.policy_layers] == [kept_positions(b) for b in fresh.policy_layers]
    assert cache.plan is not None and cache.nbytes == fresh.nbytes


@each("where", [torch.bfloat16, "meta"], often=FEW)
def test_moved_in_a_conversation(policy: str, where: Any) -> None:
    """Devices, of which a CPU has no other than meta, and dtypes."""
    for new in (1, 3):
        model = own()
        with kvpolicy.attach(model, policy), torch.no_grad():
            cache = PolicyCache(model)
            model(prompt(), cache=cache)
            model.to(where)
            with refused("meta device" if where == "meta" else "got torch.bfloat16"):
                model(prompt(new).to(model.device), cache=cache)


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


DTYPES = [torch.bfloat16, torch.float16]
OUTSIDE = [
    *POLICIES.values(),
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
        assert {layer.keys.dtype for layer in cache.policy_layers if layer.keys is not None} == {dtype}
        assert (got - plain)[0, :26].abs().max() < 0.2 * plain.abs().max()
        with refused("autocast"):
            model(prompt(1).expand(2, -1), cache=cache)


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


@contextmanager
def defaults(dtype: torch.dtype = torch.bfloat16) -> Generator[None]:
    """Another default dtype; and a device without numbers, so that what is created there by mistake is an error."""
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)  # "cpu" would leave a mode behind
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


LONG = [90, *[1] * 12]


def run(model: Any, policy: str, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of a prompt and of steps."""
    with kvpolicy.attach(model, policy):
        return talk(model, ids, mask, LONG, kvpolicy.PolicyCache(model))


SPECS = {
    "allocator": "{}+snapkv@0.5",
    "head_allocator": "uniform/{}+snapkv@0.5",
    "selector": "{}@0.5",
    "merger": "h2o+{}@0.5",
    "codec": "h2o+{}@0.7",
    "reader": "full+{}:read=0.3",
}
OTHERS = {"full": "full", "minicache": "full+minicache", "all": "full+all", "reuse": "full+reuse"}
EVERY = [OTHERS.get(name, SPECS[kind].format(name)) for kind, names in registry.BUILT_IN.items() for name in names]
TAKEN = ["compactor@0.5", "zigzag+snapkv@0.5", "h2o+d2o@0.5", "h2o+csr@0.7", "h2o+gear@0.7", "full+retrieval:read=0.3"]


@product("policy", EVERY, sample=[(policy,) for policy in TAKEN])
def test_the_defaults_of_pytorch_change_no_logits(policy: str, tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids, mask = make_batch([90, 73], LONG)
    wanted = run(model, policy, ids, mask)
    with defaults():
        found = run(model, policy, ids, mask)
    assert torch.equal(found, wanted)


def test_the_defaults_of_pytorch_change_no_edits_of_a_cache_and_no_drafts(
    tiny: tuple[Any, Any], tmp_path: Path
) -> None:
    model, _ = tiny
    ids, _ = make_batch([90, 90], LONG)

    def edited(path: Path) -> tuple[Tensor, Tensor, int]:
        with torch.no_grad(), kvpolicy.attach(model, "h2o+kivi:residual_length=32@0.5"):
            cache = kvpolicy.PolicyCache(model, new=12)
            model(ids[:, :90], cache=cache)
            cache.mark(most=2)
            model(ids[:, 90:91], cache=cache)
            cache.rollback(0)
            model(ids[:, 90:91], cache=cache)
            cache.batch_repeat_interleave(2)
            cache.save(path)
            loaded = kvpolicy.PolicyCache.load(model, path)
            last = ids[:, 91:92].repeat_interleave(2, 0)
            logits = model(last, cache=loaded).logits
        drafted = kvpolicy.speculate(model, "snapkv@0.5", ids[:1, :90], max_new_tokens=12)
        return logits, drafted, kvpolicy.plan(model, "h2o@0.5", prompt=90).nbytes

    wanted = edited(tmp_path / "plain")
    with defaults():
        found = edited(tmp_path / "other")
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]) and found[2] == wanted[2]

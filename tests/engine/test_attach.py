"""Attaching leaves no trace, and says in one sentence what it cannot do."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from tests.conformance.access import Attend, attending, selector_state
from tests.conformance.models import FAMILIES, build
from tests.conformance.play import make_batch
from tests.engine.filled import attached

POLICY = "squeeze+kvcrush/h2o+kivi:group_size=4:residual_length=4@0.5"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def trace(model: nn.Module) -> list[Any]:
    """All that attaching could change: attributes, hooks and configs of every module."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found.append((name, sorted(key for key in vars(module) if not key.startswith("_forward"))))
        found.append((name, type(module), vars(module).get("forward")))
        found += [(name, hook, list(vars(module).get(hook, ()))) for hook in HOOKS]
        config = getattr(module, "config", None)
        if config is not None:
            found.append((name, getattr(config, "_attn_implementation", None), repr(config)))
    return found


def logits(model: Any, **how: Any) -> torch.Tensor:
    ids, mask = make_batch([20, 13], [20])
    with torch.no_grad():
        return model(ids, attention_mask=mask, **how).logits


@pytest.mark.parametrize("family", [*FAMILIES])
def test_no_trace(family: str) -> None:
    model = build(family)
    before = trace(model)
    stock = logits(model)
    with kvpolicy.attach(model, POLICY) as handle:
        assert trace(model) != before
        logits(model, use_cache=True)
        assert handle.cache is not None
    assert trace(model) == before
    assert torch.equal(logits(model), stock)


class Boom(Exception):
    pass


def broken_in(nth: int) -> AbstractContextManager[None]:
    """Raise Boom in one of the layers under the policy."""
    calls: list[int] = []

    def around(real: Attend) -> Attend:
        def attend(cache: PolicyCache, layer_idx: int, *rest: Any) -> Tensor:
            calls.append(layer_idx)
            if len(calls) == nth + 1:
                raise Boom
            return real(cache, layer_idx, *rest)

        return attend

    return attending(around)


@pytest.mark.parametrize("family", ["llama", "falcon_grouped", "gemma2"])
def test_no_trace_after_an_exception_inside_a_forward(family: str) -> None:
    model = build(family)
    before = trace(model)
    stock = logits(model)
    with pytest.raises(Boom), broken_in(1), kvpolicy.attach(model, POLICY):
        logits(model, use_cache=True)
    assert trace(model) == before
    assert torch.equal(logits(model), stock)


def test_a_failed_attach_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before = trace(model)
    monkeypatch.setattr("kvpolicy.hf.attach.offer_cache", lambda *_args: (_ for _ in ()).throw(Boom()))
    with pytest.raises(Boom):
        kvpolicy.attach(model, POLICY)
    assert trace(model) == before
    monkeypatch.undo()
    kvpolicy.attach(model, POLICY).detach()
    assert trace(model) == before


@pytest.mark.parametrize("policy", ["nonsense", "window@2MiBi", "streaming@2"])
def test_a_bad_policy_leaves_the_model_alone(policy: str) -> None:
    model = build("llama")
    before = trace(model)
    with pytest.raises(ValueError):
        kvpolicy.attach(model, policy)
    assert trace(model) == before


def test_a_model_that_does_not_name_its_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def unknown() -> Any:
        raise NotImplementedError

    monkeypatch.setattr(model, "get_input_embeddings", unknown)
    kvpolicy.attach(model, "kvzip:reply=3@0.5").detach()


def test_twice_is_refused() -> None:
    """The decoder inside has the same modules: two policies would fight over them."""
    model = build("llama")
    for again in (model, model.model):
        with kvpolicy.attach(model, "window"), pytest.raises(ValueError, match="already attached"):
            kvpolicy.attach(again, "h2o")
    with kvpolicy.attach(model, "h2o"):
        pass


def test_detach_is_idempotent() -> None:
    model = build("llama")
    before = trace(model)
    handle = kvpolicy.attach(model, POLICY)
    handle.detach()
    handle.detach()
    assert trace(model) == before
    with kvpolicy.attach(model, "window"):
        handle.detach()
        assert trace(model) != before


def test_a_cache_outlives_its_policy_only_as_an_error() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "window") as handle:
        logits(model, use_cache=True)
        cache = handle.cache
    with pytest.raises(ValueError, match="detached"):
        model(torch.ones(2, 1, dtype=torch.int64), **cache_argument(model, cache))
    again = "must be attached to its model, got a detached one"  # attaching alone does not bring it back
    with kvpolicy.attach(model, "window"):
        for _ in range(2):  # which a refusal does not change
            with pytest.raises(ValueError, match=again):
                model(torch.ones(2, 1, dtype=torch.int64), cache=cache)


def test_a_cache_needs_an_attached_model() -> None:
    with pytest.raises(ValueError, match="must have a policy attached"):
        PolicyCache(build("llama"))
    wrong: Any
    for wrong in (build("llama").config, "llama", None):
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module .*, got \w+; try kvpolicy.attach"):
            PolicyCache(wrong)


def test_training_makes_no_cache() -> None:
    model = build("llama")
    ids, _ = make_batch([20], [20])
    with kvpolicy.attach(model, POLICY) as handle:
        model.train()
        try:
            model(ids, labels=ids).loss.backward()
        finally:
            model.eval()
        assert handle.cache is None
    model.zero_grad()


def test_slots_hold_no_graph() -> None:
    """Without `no_grad`, too, a compressed prompt is freed."""
    with attached("h2o@0.5", [20], [20]) as (model, ids, _):
        cache = PolicyCache(model)
        model(ids, cache=cache)
        model(ids[:, :1], cache=cache)
    layer = cache.policy_layers[0]
    assert not any(
        t.requires_grad for t in (layer.keys, layer.values, *selector_state(layer)) if isinstance(t, torch.Tensor)
    )


def test_report_tells_budgets_and_bytes() -> None:
    with kvpolicy.attach(build("gemma2"), "window@0.5") as handle:
        logits(build("gemma2"), use_cache=True)
        report = handle.report()
    assert report.nbytes < report.full_nbytes
    assert [layer.budget for layer in report.layers] == [(), (10, 6)] * 3
    lines = [line.split("  ") for line in str(report).splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    assert lines[0][0].startswith("window@0.5: ") and cells[1][:4] == ["layer", "budget", "kept", "seen"]
    assert cells[2][:2] == ["0, 2, 4", "unmanaged"] and cells[3][:4] == ["1, 3, 5", "6 to 10", "6 to 10", "13 to 20"]
    assert report.as_dict()["layers"][1]["kept"] == (10, 6)


@pytest.mark.parametrize("policy", ["full", "streaming+rotate@0.5"])
@pytest.mark.parametrize("family", ["llama", "afmoe"])
def test_a_subclass_that_inherits_the_attention_of_transformers(family: str, policy: str) -> None:
    """What its class is known for is that of the class which defines its forward."""
    model: Any = copy.deepcopy(build(family))
    with kvpolicy.attach(model, policy):
        expected = logits(model)
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        layer.self_attn.__class__ = type("OwnAttention", (kind,), {"__module__": __name__})
    with kvpolicy.attach(model, policy):
        assert torch.equal(logits(model), expected)
    last = model.model.layers[-1].self_attn
    own = {"__module__": __name__, "forward": lambda self: None}
    last.__class__ = type("OwnAttention", (type(last),), own)
    with pytest.raises(kvpolicy.KVPolicyError, match="must use the attention interface"):
        kvpolicy.attach(model, policy)

"""Attaching leaves no trace, says in one sentence what it cannot do, and takes a cache by either of its names."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, cache_utils
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.hf import cache_names
from kvpolicy.hf.cache_names import CACHE, NEW, OLD, cache_argument
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


def logits(model: Any, **how: Any) -> Tensor:
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


@pytest.mark.parametrize("family", ["llama", "falcon_grouped", "gemma2"])
def test_no_trace_after_an_exception_inside_a_forward(family: str) -> None:
    model = build(family)
    before = trace(model)
    stock = logits(model)

    def broken(real: Attend) -> Attend:
        def attend(cache: PolicyCache, layer_idx: int, *rest: Any) -> Tensor:
            if layer_idx:
                raise Boom
            return real(cache, layer_idx, *rest)

        return attend

    with pytest.raises(Boom), attending(broken), kvpolicy.attach(model, POLICY):
        logits(model, use_cache=True)
    assert trace(model) == before
    assert torch.equal(logits(model), stock)


def test_a_failed_attach_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before = trace(model)
    monkeypatch.setattr("kvpolicy.hf.attach.offer_cache", lambda *_args: (_ for _ in ()).throw(Boom()))
    for policy, error in [(POLICY, Boom), ("nonsense", ValueError), ("window@2MiBi", ValueError)]:
        with pytest.raises(error):
            kvpolicy.attach(model, policy)
        assert trace(model) == before
    monkeypatch.undo()
    kvpolicy.attach(model, POLICY).detach()
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


def test_what_stands_around_a_model_is_refused_by_the_name_of_the_model() -> None:
    model = build("llama")
    named = "try its attribute '{}', which is a LlamaForCausalLM."
    pipeline: Any = SimpleNamespace(model=model)
    with pytest.raises(TypeError, match=named.format("model")):
        kvpolicy.attach(pipeline, "window")
    with pytest.raises(ValueError, match=named.format("module")):
        kvpolicy.attach(nn.DataParallel(model), "window")
    with pytest.raises(ValueError, match=r"try AutoModelForCausalLM\.from_pretrained"):
        kvpolicy.attach(nn.DataParallel(nn.Linear(2, 2)), "window")


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
        model(ids, labels=ids).loss.backward()
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
    assert not any(t.requires_grad for t in (layer.keys, layer.values, *selector_state(layer)))


def test_report_tells_budgets_bytes_and_layers_without_a_policy() -> None:
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
    assert [bool(layer.note) for layer in report.layers] == [True, False] * 3 and "12" in report.layers[0].note


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


IDS = torch.arange(3, 23)[None]


class Old(nn.Module):
    """A module with code of its own, from before transformers changed the name of the cache."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None) -> Any:
        return past_key_values


class New(nn.Module):
    def forward(self, input_ids: Any = None, cache: Any = None) -> Any:
        return cache


class Wrapper(nn.Module):
    """Such as an adapter or an engine, which names no arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_the_name_is_that_of_the_forward() -> None:
    cache = DynamicCache()
    for inner, name in ((Old(), OLD), (New(), NEW)):
        for module in (inner, Wrapper(inner), Wrapper(Wrapper(inner))):
            assert cache_names.cache_name(module) == name
            assert module(**cache_argument(module, cache)) is cache
    assert cache_names.cache_name(nn.Linear(1, 1)) == CACHE


def test_a_renamed_call_has_one_name() -> None:
    found: list[Any] = [{OLD: 1}, {NEW: 1}, {OLD: 1, NEW: None}, {OLD: None, NEW: 1}, {"other": 2}]
    for given in found:
        for name in (OLD, NEW):
            call = dict(given)
            cache_names.rename_cache(call, name)
            assert call == ({"other": 2} if "other" in given else {name: 1})
        assert cache_names.passed_cache(given) == (None if "other" in given else 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, to those who pass the old name
@pytest.mark.parametrize("name", [NEW, OLD])
def test_users_may_pass_either_name(name: str) -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5") as handle:
        cache = kvpolicy.PolicyCache(model)
        assert cache_names.output_cache(model(IDS, **{name: cache})) is cache
        model.model(IDS[:, :1], **{name: cache})
        assert cache.get_seq_length() == 21
        generating = kvpolicy.PolicyCache(model)
        out = model.generate(IDS, **{name: generating}, max_new_tokens=3, return_dict_in_generate=True)
        assert cache_names.output_cache(out) is generating
        assert handle.cache is generating
        assert torch.equal(out.sequences, model.generate(IDS, max_new_tokens=3))


class OldOuter(LlamaForCausalLM):
    """A model that passes on the cache by the old name alone, such as Falcon before transformers 5.24."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kwargs.pop(NEW, None)
        return super().forward(input_ids, **cache_argument(self.model, past_key_values), **kwargs)


@pytest.mark.parametrize("name", [NEW, OLD])
def test_a_model_that_passes_on_the_old_name_alone_takes_either(name: str) -> None:
    model = OldOuter(build("llama", layers=2).config).eval()
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        cache = kvpolicy.PolicyCache(model)
        model(IDS, **{name: cache})
        assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize(("policy", "tile"), [("snapkv@0.5", 8), ("kvzip@0.5", None), ("squeeze+window@0.5", 8)])
def test_no_warning_reaches_who_does_not_pass_the_old_name(policy: str, tile: int | None) -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, policy, tile=tile):
        cache = kvpolicy.PolicyCache(model, prompt=20, new=3)
        model(IDS, **{CACHE: cache})
        model(IDS[:, :1], **{CACHE: cache})
        model.generate(IDS, max_new_tokens=3, num_beams=2)


def test_a_decoder_with_another_name_is_refused_with_the_version() -> None:
    class Renamed(nn.Module):
        def forward(self, input_ids: Any, store: Any = None) -> Any: ...

    with pytest.raises(kvpolicy.KVPolicyError, match=re.escape(transformers.__version__)):
        cache_names.check_cache_name(Renamed())
    for kind in (New, Old):
        cache_names.check_cache_name(kind())


@pytest.mark.parametrize(
    "version,refused", [("5.17.0", True), ("4.57.6", True), ("5.18.0", False), ("6.0.0.dev0", False)]
)
def test_old_versions_are_refused(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = kvpolicy.attach  # loaded first: what it imports of transformers sets the version again
    model = build("llama", layers=2)
    monkeypatch.setattr("kvpolicy.hf.cache_names.transformers.__version__", version)
    if not refused:
        return cache_names.check_version()
    with pytest.raises(kvpolicy.KVPolicyError, match=rf"must be 5.18 or newer, got {re.escape(version)}"):
        attach(model, "full")


def test_the_oldest_version_is_that_of_the_package() -> None:
    path = Path(__file__).parents[2] / "pyproject.toml"
    if not path.exists():
        pytest.skip("the source tree is not here")
    found = re.search(r"transformers>=([\d.]+)", path.read_text(encoding="utf-8"))
    assert found is not None and found[1] == ".".join(map(str, cache_names.OLDEST))


def test_where_transformers_has_none_no_layer_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    absent = runpy.run_path(cache_names.__file__)["DummyLayer"]
    assert not isinstance(cache_utils.DynamicLayer(), absent)

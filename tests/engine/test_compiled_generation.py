"""`generate` with compiled steps: the answers of uncompiled ones, one compilation for requests of any length."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyWarning, PolicyCache
from kvpolicy.hf import compiled_generation
from kvpolicy.hf.compiled_generation import is_plain_step, model_obstacle
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.conformance.policies import words
from tests.engine.graphs import Counter

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
KIVI = "kivi:group_size=4:residual_length=4"


def generate(model: Any, rows: list[int], how: dict[str, Any], **more: Any) -> Tensor:
    ids, mask = make_batch(rows, [max(rows)])
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **how, **more)


def same(policy: str, requests: list[list[int]], how: dict[str, Any]) -> int:
    """The graphs that requests are compiled to, whose answers and caches are those of uncompiled steps."""
    model = build("llama", layers=1)
    counter = Counter()
    answers: list[list[Tensor]] = [[], []]
    kept: list[list[Any]] = [[], []]
    for compiled in (False, True):
        for rows in requests:
            with kvpolicy.attach(model, policy, compile=compiled) as handle:  # anew, as programs do for each request
                more = {"compile_config": counter.config} if compiled else {}
                answers[compiled].append(generate(model, rows, how, **more))
                assert handle.cache is not None
                kept[compiled].append([kept_positions(layer) for layer in handle.cache.policy_layers])
    assert all(map(torch.equal, *answers)) and kept[0] == kept[1]
    return counter.graphs


LENGTHS = [[24], [37], [61]]
SAMPLED = GREEDY | {"do_sample": True}
PADDED = [[24, 15]]
REQUESTS: dict[str, tuple[str, list[list[int]], dict[str, Any], int]] = {
    "any length": ("h2o@0.5", LENGTHS, GREEDY, 1),
    "all slots": ("full", LENGTHS, GREEDY, 1),
    "growing slots": ("h2o:decode=grow@0.5", LENGTHS, GREEDY, 1),
    # Where keys are coded in groups of slots, their number may be in the graph.
    "groups": (f"h2o+{KIVI}@0.5", LENGTHS, GREEDY, 3),
    "codes": (words("h2o", "tokenwise"), LENGTHS, GREEDY, 1),
    "pages": ("uniform/adakv+h2o@0.5", LENGTHS, GREEDY, 1),
    # A batch of one row is a size of its own for PyTorch; all others share a graph.
    "rows": ("h2o@0.5", [*PADDED, [30, 9, 17]], GREEDY, 1),
    "sampling": ("snapkv@0.5", PADDED, SAMPLED | {"temperature": 0.8, "top_k": 20}, 1),
    "chunks": ("snapkv@0.5", PADDED, GREEDY | {"prefill_chunk_size": 7}, 1),
    "several": ("snapkv@0.5", PADDED, SAMPLED | {"num_return_sequences": 3}, 1),
    "ends": ("snapkv@0.5", PADDED, {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": [*range(0, 48, 3)]}, 1),
    "beams": ("h2o@0.5", PADDED, GREEDY | {"num_beams": 3}, 0),  # as on a static cache: transformers compiles none
}
"""A policy, the rows of requests, how they are answered, and the most graphs that they are compiled to."""


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_compiled_once(name: str) -> None:
    policy, requests, how, most = REQUESTS[name]
    assert min(most, 1) <= same(policy, requests, how) <= most


def test_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forwards that verify several tokens are compiled, nor the assistant, as with the static cache."""
    model = build("llama", layers=1)
    assistant = copy.deepcopy(model)
    counter = Counter()
    monkeypatch.setattr(compiled_generation, "_default", lambda _: counter.config)  # transformers drops the given one
    want = generate(model, [24], GREEDY)
    with kvpolicy.attach(model, "full", compile=True), kvpolicy.attach(assistant, "full", compile=True):
        got = generate(model, [24], GREEDY, assistant_model=assistant)
    assert torch.equal(got, want)
    assert counter.graphs == 0


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None: ...


def test_a_second_turn_and_a_stream() -> None:
    """The mask of the whole conversation is checked against what the cache has seen, as without compiling."""
    model = build("llama", layers=1)
    counter = Counter()
    ids, _ = make_batch([24], [24])
    answers: list[Tensor] = []
    for compile in (False, True):
        with kvpolicy.attach(model, "h2o@0.5", compile=compile):
            cache = PolicyCache(model)
            config = counter.config if compile else None
            streamer = Streamer()
            first = model.generate(ids, cache=cache, compile_config=config, streamer=streamer, **GREEDY)
            assert streamer.tokens == first[0].tolist()
            longer = torch.cat([first, ids[:, :5]], 1)
            answers.append(model.generate(longer, cache=cache, compile_config=config, **GREEDY))
            mask = torch.ones(1, answers[-1].shape[1] + 2, dtype=torch.int64)
            mask[0, 3] = 0
            with pytest.raises(KVPolicyError, match="same earlier tokens"):
                text = torch.cat([answers[-1], ids[:, :2]], 1)
                model.generate(text, attention_mask=mask, cache=cache, compile_config=config, **GREEDY)
    assert torch.equal(*answers)
    assert counter.graphs == 1


@pytest.mark.filterwarnings("ignore")  # transformers says that the config is not used
def test_off_by_default_on_a_cpu_and_where_it_is_disabled() -> None:
    model = build("llama", layers=1)
    counter = Counter()
    for compile, more in ((None, {}), (True, {"disable_compile": True})):
        with kvpolicy.attach(model, "h2o@0.5", compile=compile):
            generate(model, [24], GREEDY, compile_config=counter.config, **more)
    assert counter.graphs == 0


def test_nothing_is_left_behind() -> None:
    """Neither in the model nor of it: what was compiled does not keep it alive."""
    model = copy.deepcopy(build("llama", layers=1))
    before = {*vars(model)}
    with kvpolicy.attach(model, "h2o@0.5", compile=True):
        generate(model, [24], GREEDY, compile_config=Counter().config)
    assert {*vars(model)} == before
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def _warned(model: Any, **more: Any) -> tuple[str, Tensor]:
    """The one warning of two generations that are to be compiled, and what the last one gave."""
    with kvpolicy.attach(model, "h2o@0.5", compile=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        *_, got = (generate(model, [40], GREEDY, **more) for _ in range(2))
    (said,) = [str(each.message) for each in caught if "uncompiled" in str(each.message)]
    return said, got


def test_what_cannot_be_compiled_is_said_once() -> None:
    assert _warned(build("gemma2"))[0] == (
        "generate runs uncompiled under h2o@0.5, since layers with sliding windows, such as layer 0, keep a stock "
        "cache that grows in each step; leave compile=True out."
    )


def test_offloaded_weights_and_quantizers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", layers=1)
    assert not model_obstacle(model)
    quantizer = type("Quantizer", (), {"is_compileable": False})()
    with monkeypatch.context() as patch:
        patch.setattr(model, "hf_quantizer", quantizer, raising=False)
        assert model_obstacle(model) == "Quantizer cannot be compiled"
    monkeypatch.setattr(model, "hf_device_map", {"model.embed_tokens": 0, "model.layers.0": "cpu"}, raising=False)
    assert "a part of the weights is offloaded" in _warned(model)[0]


def test_a_failed_compilation_goes_on_uncompiled() -> None:
    """With the answer of uncompiled steps: a compilation fails before the step has changed anything."""

    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such backend")

    model = build("llama", layers=1)
    with kvpolicy.attach(model, "h2o@0.5"):
        want = generate(model, [40], GREEDY)
    said, got = _warned(model, compile_config=CompileConfig(backend=fails, mode="default"))
    assert "no such backend" in said and said.endswith("; leave compile=True out.")
    assert torch.equal(got, want)


def test_a_cache_says_whether_its_step_is_one_graph() -> None:
    for family, compile, says in (("llama", None, True), ("llama", False, False), ("gemma2", None, False)):
        model = build(family)
        with kvpolicy.attach(model, "h2o@0.5", compile=compile):
            assert PolicyCache(model).is_compileable is says


def test_plain_steps() -> None:
    """What changes more than a slot of each head is not compiled."""
    model = build("llama", layers=1)
    ids, _ = make_batch([24], [24])
    one = {"input_ids": ids[:, :1]}
    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5", chunks="hold"):
        cache = PolicyCache(model)
        assert not is_plain_step(cache, one), "no prompt yet"
        model(ids, cache=cache)
        assert is_plain_step(cache, one)
        assert not is_plain_step(cache, {"input_ids": ids})
        cache.mark(2)
        assert not is_plain_step(cache, one)
        cache.rollback(0)
        cache.hold_next()
        assert not is_plain_step(cache, one)
        announced = PolicyCache(model, prompt=25)
        model(ids, cache=announced)
        assert not is_plain_step(announced, one), "it is the last chunk"


@pytest.mark.parametrize("compile", [1, "yes"])
def test_refused(compile: Any) -> None:
    with pytest.raises(KVPolicyError, match=r"^compile must be True, False or None, got .*; try compile=True\.$"):
        kvpolicy.attach(build("llama", layers=1), "h2o@0.5", compile=compile)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", ["snapkv@0.5", f"h2o+{KIVI}@0.5"])
def test_inductor(policy: str) -> None:
    """Compiled to code, as `generate` does without a config of its own."""
    model = build("llama", layers=1)
    with kvpolicy.attach(model, policy):
        want = [generate(model, [length], GREEDY) for length in (24, 37)]
    with kvpolicy.attach(model, policy, compile=True), warnings.catch_warnings():
        warnings.simplefilter("error", KVPolicyWarning)
        warnings.filterwarnings("ignore", "The budget .* leaves fewer than", KVPolicyWarning)
        got = [generate(model, [length], GREEDY) for length in (24, 37)]
    assert all(map(torch.equal, got, want))

"""Broken off in the middle, and several threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import TURNS, forward, make_batch
from tests.robust.hostile import FEW, NEW, SOME, answer, converse, each, own, prompt, refused
from tests.sampling import each_once, product


class Impatient(StoppingCriteria, BaseStreamer):
    """Ctrl-C at the third step."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.put(None)
        return torch.zeros(len(args[0]), dtype=torch.bool)

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@each("how", ["criterion", "streamer"], often=FEW)
def test_between_steps(policy: str, how: str) -> None:
    """The model works on; so does the cache, which is whole between steps."""
    model = build("llama")
    ids = prompt()
    more: Any = {"streamer": Impatient()}
    if how == "criterion":
        more = {"stopping_criteria": StoppingCriteriaList([Impatient()])}
    with kvpolicy.attach(model, policy):
        want = answer(model)
        cache = PolicyCache(model, new=9)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, cache=cache, do_sample=False, max_new_tokens=9, min_new_tokens=9, **more)
        assert torch.equal(answer(model), want)
        length = int(cache.policy_layers[0].length)
        assert all(int(layer.length) == length for layer in cache.policy_layers)
        with torch.no_grad():
            model(prompt(1), cache=cache)


def broken(model: Any, cache: Any, ids: Tensor, where: str) -> None:
    """A forward that is interrupted before a module."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.get_submodule(where).register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    hook.remove()


@each("where,when", ["self_attn.q_proj", "mlp"], ["prompt", "step"], often=FEW)
def test_inside_a_layer(policy: str, where: str, when: str) -> None:
    """The model and other caches work on; the cache itself says that its layers do not agree."""
    model = own()
    with kvpolicy.attach(model, policy), torch.no_grad():
        want = answer(model)
        other = PolicyCache(model)
        cache = PolicyCache(model)
        model(prompt(), cache=other)
        after = model(prompt(1), cache=copy.deepcopy(other)).logits
        if when == "step":
            model(prompt(), cache=cache)
        broken(model, cache, prompt(1 if when == "step" else 19), f"model.layers.1.{where}")
        assert torch.equal(model(prompt(1), cache=other).logits, after)
        start = 26 if when == "step" else 0
        for ids in (prompt(1), prompt()):
            places = torch.arange(start, start + ids.shape[1])[None]
            for how in ({}, {"position_ids": places}):
                with refused("was interrupted"):
                    model(ids, cache=cache, **how)
        cache.reset()
        model(prompt(), cache=cache)
        assert torch.equal(model(prompt(1), cache=cache).logits, after)
        assert torch.equal(answer(model), want)


CALLS: dict[str, Callable[[PolicyCache], object]] = {
    "save": lambda cache: cache.save("nowhere"),
    "shift": lambda cache: cache.shift(4, -1),
    "crop": lambda cache: cache.crop(-1),
    "mark": lambda cache: cache.mark(),
    "hold_next": lambda cache: cache.hold_next(),
    "fork": lambda cache: cache.fork(shared=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_use_is_made_of_layers_that_disagree(call: str) -> None:
    model = own()
    with kvpolicy.attach(model, "full"), torch.no_grad():
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        broken(model, cache, prompt(1), "model.layers.1.mlp")
        with refused("was interrupted"):
            CALLS[call](cache)


AFTER = ["no cache", "compiled"]
WHERE = ["model.norm", "model.layers.1.mlp"]


@product("after,where", AFTER, WHERE, sample=each_once(AFTER, WHERE))
def test_a_later_forward_does_not_finish_what_was_broken_off(after: str, where: str) -> None:
    """One of its own would: it would find the turn whole, and let it be taken in twice."""
    model = own()
    with kvpolicy.attach(model, "full"), torch.no_grad():
        cache = PolicyCache(model)
        other = PolicyCache(model, new=4)
        model(prompt(), cache=cache)
        model(prompt(), cache=other)
        broken(model, cache, prompt(5), where)
        if after == "no cache":
            model(prompt(), use_cache=False)
        else:
            torch.compile(model, backend="eager", fullgraph=True)(prompt(1), cache=other)
        with refused("was interrupted"):
            model(prompt(5), cache=cache)


@SOME
def test_the_models_own_cache_is_broken_off(policy: str) -> None:
    model = own()
    with kvpolicy.attach(model, policy) as handle:
        want = answer(model)
        broken(model, None, prompt(), "model.layers.1.mlp")
        with refused("was interrupted"), torch.no_grad():
            model(prompt(1), cache=handle.cache)
        assert torch.equal(answer(model), want)


def test_a_refused_budget_spoils_nothing() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "streaming:sinks=4@64B"):
        with refused("must be at least"):
            answer(model)
        with refused("must be at least"):
            answer(model)


def in_threads(*jobs: Any, times: int = 2) -> list[list[Tensor]]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(lambda job=job: [job() for _ in range(times)]) for job in jobs]
        return [job.result() for job in running]


@SOME
def test_two_threads_on_two_models(policy: str) -> None:
    models = [build("llama"), build("qwen2")]
    with kvpolicy.attach(models[0], policy), kvpolicy.attach(models[1], policy):
        want = [answer(model) for model in models]
        got = in_threads(*(lambda model=model: answer(model) for model in models))
    assert all(torch.equal(one, right) for ones, right in zip(got, want, strict=True) for one in ones)


@SOME
def test_two_threads_on_one_model(policy: str) -> None:
    """Each with its own cache: right, since nothing of a forward is kept at the model."""
    model = build("llama")
    with kvpolicy.attach(model, policy):
        want = [converse(model, [26, 17], seed)[0] for seed in (1, 2)]
        got = in_threads(*(lambda seed=seed: converse(model, [26, 17], seed)[0] for seed in (1, 2)))
        assert all(torch.equal(one, right) for ones, right in zip(got, want, strict=True) for one in ones)
        right = answer(model)
        assert all(torch.equal(one, right) for ones in in_threads(*[lambda: answer(model)] * 2) for one in ones)


@SOME
def test_two_threads_on_one_cache(policy: str) -> None:
    model = own()
    inside = list[str]()
    cache = PolicyCacheInUse(model, policy)

    def meanwhile(*_: Any) -> None:
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(cache.step).exception()
        inside.append(str(error))

    with cache.handle:
        hook = model.model.layers[1].mlp.register_forward_pre_hook(meanwhile)
        cache.step()
        cache.step()
    assert "still runs in another thread" in inside[0] and inside[0].endswith(".")
    assert cache.cache.policy_layers[0].length.tolist() == [28]


class PolicyCacheInUse:
    """A conversation that two threads share."""

    def __init__(self, model: Any, policy: str) -> None:
        self.model = model
        self.handle = kvpolicy.attach(model, policy)
        self.cache = PolicyCache(model, new=NEW)
        self.ids, self.mask = make_batch([26], TURNS)
        forward(model, self.ids, self.mask, 0, 26, self.cache)

    def step(self) -> Tensor:
        with torch.no_grad():
            return self.model(prompt(1), cache=self.cache).logits


def test_one_of_many_threads_attaches() -> None:
    """One thread wins, the others are refused, and the model is afterwards as it was."""
    model = build("llama")
    stock = model.config._attn_implementation
    start = threading.Barrier(8)
    handles: list[kvpolicy.Handle] = []
    errors: list[Exception] = []

    def attach() -> None:
        start.wait()
        try:
            handles.append(kvpolicy.attach(model, "window@0.5"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=attach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == 1 and len(errors) == 7
    assert all(isinstance(error, kvpolicy.KVPolicyError) and "already" in str(error) for error in errors)
    handles[0].detach()
    assert model.config._attn_implementation == stock
    config: Any = kvpolicy.attach(model, "window@0.5")
    config.detach()

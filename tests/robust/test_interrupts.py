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
from tests.engine.test_attach import trace
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


CALLS: list[Callable[[PolicyCache], object]] = [
    lambda cache: cache.save("nowhere"),
    lambda cache: cache.shift(4, -1),
    lambda cache: cache.crop(-1),
    lambda cache: cache.mark(),
    lambda cache: cache.hold_next(),
    lambda cache: cache.fork(shared=True),
]


@each("where,when", ["self_attn.q_proj", "mlp"], ["prompt", "step"], often=FEW)
def test_inside_a_layer(policy: str, where: str, when: str) -> None:
    """The model and other caches work on; the cache itself says that its layers do not agree."""
    model = own()
    with kvpolicy.attach(model, policy) as handle, torch.no_grad():
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
        for call in CALLS:
            with refused("was interrupted"):
                call(cache)
        cache.reset()
        model(prompt(), cache=cache)
        assert torch.equal(model(prompt(1), cache=cache).logits, after)
        broken(model, None, prompt(), f"model.layers.1.{where}")
        with refused("was interrupted"):
            model(prompt(1), cache=handle.cache)
        assert torch.equal(answer(model), want)


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


def test_a_refused_budget_spoils_nothing() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "streaming:sinks=4@64B"):
        for _ in range(2):
            with refused("must be at least"):
                answer(model)


@SOME
def test_threads_on_one_model_and_on_two(policy: str) -> None:
    """Each with its own cache: right, since nothing of a forward is kept at the model."""
    model, other = build("llama"), build("qwen2")
    jobs: list[Callable[[], Tensor]] = [
        lambda: converse(model, [26, 17], 1)[0],
        lambda: converse(model, [26, 17], 2)[0],
        lambda: answer(model),
        lambda: answer(other),
    ]
    with kvpolicy.attach(model, policy), kvpolicy.attach(other, policy):
        want = [job() for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(lambda job=job: [job() for _ in range(2)]) for job in jobs]
            got = [each.result() for each in running]
    assert all(torch.equal(one, right) for ones, right in zip(got, want, strict=True) for one in ones)


@SOME
def test_two_threads_on_one_cache(policy: str) -> None:
    model = own()
    inside = list[str]()

    def step() -> None:
        with torch.no_grad():
            model(prompt(1), cache=cache)

    def meanwhile(*_: Any) -> None:
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            inside.append(str(pool.submit(step).exception()))

    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, new=NEW)
        forward(model, *make_batch([26], TURNS), 0, 26, cache)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(meanwhile)
        step()
        step()
    assert "still runs in another thread" in inside[0] and inside[0].endswith(".")
    assert cache.policy_layers[0].length.tolist() == [28]


def test_one_of_many_threads_attaches() -> None:
    """One thread wins, the others are refused, and the model is afterwards as it was."""
    model = build("llama")
    before = trace(model)
    start = threading.Barrier(8)

    def attach() -> kvpolicy.Handle | Exception:
        start.wait()
        try:
            return kvpolicy.attach(model, "window@0.5")
        except kvpolicy.KVPolicyError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        found = [job.result() for job in [pool.submit(attach) for _ in range(8)]]
    handles = [each for each in found if isinstance(each, kvpolicy.Handle)]
    assert len(handles) == 1 and sum("already" in str(each) for each in found) == 7
    handles[0].detach()
    assert trace(model) == before

"""`handle.cache`, `handle.plan` and `handle.report()`: of the answer, or of the last forward, however it was made."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_names import CACHE, output_cache
from tests.conformance.models import build
from tests.conformance.play import make_batch

HOW: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "return_dict_in_generate": True}


class Between(LogitsProcessor):
    """Runs the model within each step of a generation."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.run()
        return scores


@pytest.mark.parametrize("given", [None, "window@0.5"])
def test_a_negative_prompt_is_not_the_answer(given: str | None) -> None:
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        own = {} if given is None else {CACHE: PolicyCache(model, given)}
        out = model.generate(ids, guidance_scale=1.5, negative_prompt_ids=ids[:, :7], **own, **HOW)
        assert handle.cache is not None and handle.cache is output_cache(out)
        assert handle.plan is handle.cache.plan
        assert handle.cache.get_seq_length() == 28 and handle.report().nbytes == handle.cache.nbytes
        assert str(handle.cache.policy) == (given or "h2o@0.5")


def test_an_answer_that_returns_no_cache() -> None:
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        how = HOW | {"return_dict_in_generate": False}
        out = model.generate(ids, guidance_scale=1.5, negative_prompt_ids=ids[:, :7], **how)
        assert out.shape == (1, 29)
        assert handle.cache is not None and handle.cache.get_seq_length() == 28


@pytest.mark.parametrize("inner", ["a forward", "a forward on a cache", "generate", "generate on a cache"])
def test_what_runs_within_a_generation_is_not_the_answer(inner: str) -> None:
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])

    def run() -> None:
        cache = {CACHE: PolicyCache(model)} if inner.endswith("cache") else {}
        if inner.startswith("generate"):
            model.generate(ids[:, :9], do_sample=False, max_new_tokens=2, **cache)
        else:
            model(ids[:, :9], **cache)

    with kvpolicy.attach(model, "h2o@0.5") as handle:
        out = model.generate(ids, logits_processor=LogitsProcessorList([Between(run)]), **HOW)
        assert handle.cache is output_cache(out)
        run()
        assert handle.cache is not output_cache(out), "outside, it counts"


def test_an_assistant_of_the_same_weights_has_its_own() -> None:
    model = build("llama")
    assistant = build("qwen2")
    ids, _ = make_batch([24], [24])
    with kvpolicy.attach(model, "full") as ours, kvpolicy.attach(assistant, "full") as theirs:
        out = model.generate(ids, assistant_model=assistant, **HOW)
        assert ours.cache is output_cache(out)
        assert theirs.cache is not None and theirs.cache is not ours.cache


def test_a_loop_of_ones_own() -> None:
    """`generate(custom_generate=...)` may run on copies of the cache, and returns one of them."""
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])

    def loop(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        out = model(input_ids, **{CACHE: kwargs[CACHE]})
        copied = output_cache(out).fork()
        return model(input_ids[:, :1], **{CACHE: copied})

    with kvpolicy.attach(model, "h2o@0.5") as handle:
        out = model.generate(ids, custom_generate=loop, do_sample=False, max_new_tokens=3)
        assert handle.cache is not None and handle.cache is output_cache(out) and handle.cache.get_seq_length() == 25


def test_a_cache_of_ones_own_is_reported() -> None:
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        with pytest.raises(KVPolicyError, match="nothing to report"):
            handle.report()
        own = PolicyCache(model, "window@0.5")
        with pytest.raises(KVPolicyError, match="nothing to report"):
            handle.report()
        model(ids, **{CACHE: own})
        assert handle.cache is own and handle.plan is own.plan
        assert str(handle.report().policy) == "window@0.5" and handle.report().nbytes == own.nbytes
        model(ids[:, :9])
        assert handle.cache is not own and str(handle.report().policy) == "full"
        model(ids[:, :1], **{CACHE: own})
        assert handle.cache is own
        handle.cache = None
        assert handle.plan is None


def test_a_refused_forward_is_none() -> None:
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        with pytest.raises(KVPolicyError, match="attention mask"):
            model(ids, attention_mask=torch.zeros_like(ids))
        assert handle.cache is None
        model(ids)
        before = handle.cache
        with pytest.raises(KVPolicyError, match="attention mask"):
            model(ids, attention_mask=torch.zeros_like(ids))
        assert handle.cache is before


def test_after_an_error_the_next_forward_counts() -> None:
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])

    def fail() -> None:
        raise RuntimeError("broken off")

    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5") as handle:
        with pytest.raises(RuntimeError, match="broken off"):
            model.generate(ids, logits_processor=LogitsProcessorList([Between(fail)]), **HOW)
        own = PolicyCache(model)
        model(ids, **{CACHE: own})
        assert handle.cache is own


def test_threads_have_generations_of_their_own() -> None:
    """A forward of another thread within the time of a generation is no part of it, and the later of the two counts."""
    model = build("llama", layers=2)
    ids, _ = make_batch([24], [24])
    seen: list[bool] = []
    with kvpolicy.attach(model, "h2o@0.5") as handle:

        def run() -> None:
            own = PolicyCache(model)

            def forward() -> None:
                with torch.no_grad():
                    model(ids[:, :9], **{CACHE: own})

            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
            seen.append(handle.cache is own)

        out = model.generate(ids, logits_processor=LogitsProcessorList([Between(run)]), **HOW)
        assert seen == [True] * 5
        assert handle.cache is output_cache(out)


def test_detaching_restores_generate() -> None:
    model = build("llama", layers=2)
    before = dict(vars(model))
    with kvpolicy.attach(model, "full"):
        assert "generate" in vars(model)
    assert vars(model) == before

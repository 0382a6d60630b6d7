"""What stays behind: after a detach nothing of ours, after a refused call no change, and of a model no memory."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyWarning, PolicyCache
from kvpolicy.reporting.logging import UNFAITHFUL
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.robust.hostile import own, refused


def test_a_method_of_the_instance_is_there_again() -> None:
    """As transformers sets `generate` for a repository with code of its own."""
    model = own()
    plain = model.generate
    model.generate = lambda *args, **kwargs: plain(*args, **kwargs)
    mine = model.generate
    with kvpolicy.attach(model, "h2o@0.5"):
        assert model.generate is not mine
        model.generate(torch.arange(3, 23)[None], max_new_tokens=2, do_sample=False)
    assert model.generate is mine
    del model.generate
    kvpolicy.attach(model, "h2o@0.5").detach()
    assert "generate" not in vars(model)


@pytest.mark.parametrize("policy", ["squeeze+snapkv@0.2", "h2o@0.5", "streaming+minicache@0.9"])
def test_a_model_that_is_not_detached_is_freed(policy: str) -> None:
    model = own()
    there = weakref.ref(model)
    kvpolicy.attach(model, policy)
    with torch.no_grad():
        model(torch.arange(3, 43)[None])
    del model
    gc.collect()
    assert there() is None


def test_a_warning_that_is_an_error_leaves_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("falcon_h1")
    monkeypatch.setitem(UNFAITHFUL, "falcon_h1", "a second turn")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVPolicyWarning)
        with pytest.raises(KVPolicyWarning):
            kvpolicy.attach(model, "h2o@0.5")
    monkeypatch.undo()
    kvpolicy.attach(model, "h2o@0.5").detach()


def test_an_announcement_for_other_rows_is_refused_before_anything_changes() -> None:
    model = own()
    ids, _ = make_batch([20, 20])
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        cache = PolicyCache(model, prompt=[20, 20, 20])
        with pytest.raises(KVPolicyError, match="prompt must be one length or one per row, got 3 lengths for 2 rows"):
            model(ids, cache=cache)
        assert not cache.is_initialized
        cache.expect(torch.tensor([40, 40]), 1)
        model(ids, cache=cache)
        cache.shift(30, -20)
        assert cache.prompt is not None and cache.prompt.tolist() == [20, 20], "a shorter text is announced so"


def test_a_mark_without_memory_marks_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own()
    with torch.no_grad(), kvpolicy.attach(model, "h2o@8"):
        cache = PolicyCache(model)
        model(torch.arange(3, 23)[None], cache=cache)
        held = cache.nbytes
        last = cache.policy_layers[-1].store.journal

        def fail(most: int) -> None:
            raise torch.OutOfMemoryError("too much")

        monkeypatch.setattr(last, "mark", fail)
        with pytest.raises(torch.OutOfMemoryError):
            cache.mark(4)
        assert cache.nbytes == held
        model(torch.tensor([[5]]), cache=cache)
        assert cache.nbytes == held


def test_the_cache_of_an_answer_is_not_that_of_its_healed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers generates the last token of the prompt anew before it begins with the answer."""
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\nlion=1234\n?tiger=", return_tensors="pt").input_ids

    def heal(input_ids: Any, *_: Any) -> Any:
        model.generate(input_ids[:, :5], max_new_tokens=1, do_sample=False)
        return input_ids

    monkeypatch.setattr(model, "heal_tokens", heal)
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        model.generate(ids, max_new_tokens=4, do_sample=False, token_healing=True, tokenizer=tokenizer)
        assert handle.cache is not None
        assert int(handle.cache.policy_layers[0].length) >= ids.shape[1]


def test_a_cache_that_saw_nothing_has_nothing_to_do() -> None:
    model = own()
    with kvpolicy.attach(model, "h2o@8") as handle:
        for cache in (PolicyCache(model), handle.rows(2, 64)):
            cache.tick()
            cache.make_room()
        rows = handle.rows(2, 64)
        for row in (2, -1, 99):
            with pytest.raises(KVPolicyError, match="row must be between 0 and 1"):
                rows.is_free(row)
        with pytest.raises(KVPolicyError, match=r"new must be at most length, .* got 65 of 64"):
            handle.rows(2, 64, new=65)


def test_rows_are_chosen_and_repeated_by_numbers() -> None:
    model = own()
    ids, _ = make_batch([20, 20, 20])
    mask: Any = [True, False, True]
    choices: list[Any] = [mask, torch.tensor(mask), [0.9], torch.tensor([1.0])]
    numbers: list[Any] = [0, -1, 1.5, "2", True]
    with torch.no_grad(), kvpolicy.attach(model, "window@8"):
        cache = PolicyCache(model)
        model(ids, cache=cache)
        held = cache.nbytes
        for wrong in choices:
            with pytest.raises(KVPolicyError, match="rows must be a list of numbers from 0 to 2"):
                cache.fork(wrong)
        for wrong in numbers:
            with pytest.raises(KVPolicyError, match="repeats must be"):
                cache.batch_repeat_interleave(wrong)
        assert (cache.batch_size, cache.nbytes) == (3, held)
        before = cache.policy_layers[0].positions
        cache.batch_select_indices([2, 0])
        cache.batch_repeat_interleave(2)
        assert torch.equal(cache.policy_layers[0].positions, before[[2, 2, 0, 0]])
        taken_back = PolicyCache(model)
        model(torch.tensor([[3, 4]]), cache=taken_back)
        taken_back.crop(-2)
        for cache in (PolicyCache(model), taken_back):
            for choose in (cache.fork, cache.batch_select_indices):
                with refused("A cache must have seen a prompt for its rows to be chosen"):
                    choose([0])
            assert cache.fork().batch_size == -1


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_rows_of_inference_mode_go_on_without_it(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "h2o@8") as handle:
        rows = handle.rows(2, 64)
        with torch.inference_mode():
            prompt = PolicyCache(model)
            model(torch.arange(3, 23)[None], cache=prompt)
            rows.put(0, prompt)
        with torch.no_grad():
            model(torch.tensor([[5], [0]]), cache=rows)
            rows.put(1, prompt)
            rows.drop(0)
            model(torch.tensor([[0], [5]]), cache=rows)
        assert rows.free_rows() == [0]

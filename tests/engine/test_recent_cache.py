"""`handle.cache`, `handle.plan` and `handle.report()`: of the answer, or of the last forward, however it was made."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, Phi3ForCausalLM

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_names import CACHE, output_cache
from tests.conformance.models import build
from tests.conformance.play import make_batch

HOW: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "return_dict_in_generate": True}
IDS, _ = make_batch([24], [24])


class Between(LogitsProcessor):
    """Runs the model within each step of a generation."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.run()
        return scores


@pytest.fixture
def model() -> Any:
    return build("llama", layers=2)


@pytest.mark.parametrize("given", [None, "window@0.5"])
def test_a_negative_prompt_is_not_the_answer(model: Any, given: str | None) -> None:
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        own = {} if given is None else {CACHE: PolicyCache(model, given)}
        out = model.generate(IDS, guidance_scale=1.5, negative_prompt_ids=IDS[:, :7], **own, **HOW)
        assert handle.cache is not None and handle.cache is output_cache(out)
        assert handle.plan is handle.cache.plan
        assert handle.cache.get_seq_length() == 28 and handle.report().nbytes == handle.cache.nbytes
        assert str(handle.cache.policy) == (given or "h2o@0.5")


def test_an_answer_that_returns_no_cache(model: Any) -> None:
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        how = HOW | {"return_dict_in_generate": False}
        out = model.generate(IDS, guidance_scale=1.5, negative_prompt_ids=IDS[:, :7], **how)
        assert out.shape == (1, 29)
        assert handle.cache is not None and handle.cache.get_seq_length() == 28


@pytest.mark.parametrize("inner", ["a forward", "a forward on a cache", "generate", "generate on a cache"])
def test_what_runs_within_a_generation_is_not_the_answer(model: Any, inner: str) -> None:

    def run() -> None:
        cache = {CACHE: PolicyCache(model)} if inner.endswith("cache") else {}
        if inner.startswith("generate"):
            model.generate(IDS[:, :9], do_sample=False, max_new_tokens=2, **cache)
        else:
            model(IDS[:, :9], **cache)

    with kvpolicy.attach(model, "h2o@0.5") as handle:
        out = model.generate(IDS, logits_processor=LogitsProcessorList([Between(run)]), **HOW)
        assert handle.cache is output_cache(out)
        run()
        assert handle.cache is not output_cache(out), "outside, it counts"


def test_an_assistant_of_the_same_weights_has_its_own() -> None:
    model = build("llama")
    assistant = build("qwen2")
    with kvpolicy.attach(model, "full") as ours, kvpolicy.attach(assistant, "full") as theirs:
        out = model.generate(IDS, assistant_model=assistant, **HOW)
        assert ours.cache is output_cache(out)
        assert theirs.cache is not None and theirs.cache is not ours.cache


def test_a_loop_of_ones_own(model: Any) -> None:
    """`generate(custom_generate=...)` may run on copies of the cache, and returns one of them."""

    def loop(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        out = model(input_ids, **{CACHE: kwargs[CACHE]})
        copied = output_cache(out).fork()
        return model(input_ids[:, :1], **{CACHE: copied})

    with kvpolicy.attach(model, "h2o@0.5") as handle:
        out = model.generate(IDS, custom_generate=loop, do_sample=False, max_new_tokens=3)
        assert handle.cache is not None and handle.cache is output_cache(out) and handle.cache.get_seq_length() == 25


def test_a_cache_of_ones_own_is_reported(model: Any) -> None:
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        with pytest.raises(KVPolicyError, match="nothing to report"):
            handle.report()
        own = PolicyCache(model, "window@0.5")
        with pytest.raises(KVPolicyError, match="nothing to report"):
            handle.report()
        model(IDS, **{CACHE: own})
        assert handle.cache is own and handle.plan is own.plan
        assert str(handle.report().policy) == "window@0.5" and handle.report().nbytes == own.nbytes
        model(IDS[:, :9])
        assert handle.cache is not own and str(handle.report().policy) == "full"
        model(IDS[:, :1], **{CACHE: own})
        assert handle.cache is own
        handle.cache = None
        assert handle.plan is None


def test_a_refused_forward_is_none(model: Any) -> None:
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        with pytest.raises(KVPolicyError, match="attention mask"):
            model(IDS, attention_mask=torch.zeros_like(IDS))
        assert handle.cache is None
        model(IDS)
        before = handle.cache
        with pytest.raises(KVPolicyError, match="attention mask"):
            model(IDS, attention_mask=torch.zeros_like(IDS))
        assert handle.cache is before


def test_after_an_error_the_next_forward_counts(model: Any) -> None:

    def fail() -> None:
        raise RuntimeError("broken off")

    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5") as handle:
        with pytest.raises(RuntimeError, match="broken off"):
            model.generate(IDS, logits_processor=LogitsProcessorList([Between(fail)]), **HOW)
        own = PolicyCache(model)
        model(IDS, **{CACHE: own})
        assert handle.cache is own


def test_threads_have_generations_of_their_own(model: Any) -> None:
    """A forward of another thread within the time of a generation is no part of it, and the later of the two counts."""
    seen: list[bool] = []
    with kvpolicy.attach(model, "h2o@0.5") as handle:

        def run() -> None:
            own = PolicyCache(model)

            def forward() -> None:
                with torch.no_grad():
                    model(IDS[:, :9], **{CACHE: own})

            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()
            seen.append(handle.cache is own)

        out = model.generate(IDS, logits_processor=LogitsProcessorList([Between(run)]), **HOW)
        assert seen == [True] * 5
        assert handle.cache is output_cache(out)


SWITCH = 32
ANSWER: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def phi3() -> Any:
    """A model with other rotary factors behind 32 tokens."""
    config = copy.deepcopy(build("phi3").config)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "factor": 8.0}
    rope |= {"long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": SWITCH}
    config.update({"num_hidden_layers": 2, "eos_token_id": None, "rope_parameters": rope})
    config.update({"max_position_embeddings": 8 * SWITCH, "original_max_position_embeddings": SWITCH})
    torch.manual_seed(0)
    return Phi3ForCausalLM(config).eval()


def text(columns: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 48, (rows, columns), generator=torch.Generator().manual_seed(1))


def kept(cache: PolicyCache) -> list[int]:
    """The most tokens of a head in each row."""
    return (cache.policy_layers[0].head_positions >= 0).sum(-1).amax(-1).tolist()


@pytest.mark.parametrize("columns", [24, 50])
def test_the_cache_stays_the_one_that_was_given(columns: int) -> None:
    """Both if the text passes the switch as it grows, and if it is beyond it at once."""
    model = phi3()
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        mine = PolicyCache(model, "window@0.3")
        out = model.generate(text(columns), **{CACHE: mine}, max_new_tokens=20, **ANSWER)
        assert output_cache(out) is mine and handle.cache is mine
        assert str(handle.report().policy) == "window@0.3"
        begun = max(columns, SWITCH + 1)
        assert kept(mine) == [int(0.3 * begun)] and mine.get_seq_length() == columns + 19
        assert mine.new == columns + 20 - begun, "what is announced is what is still to come"


def test_it_keeps_what_the_whole_text_keeps() -> None:
    """From the switch on, tokens and logits are those of one forward of the whole text under the same policy."""
    model = phi3()
    ids = text(24, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        mine = PolicyCache(model, "snapkv:window=4:kernel=1@0.5")
        out = model.generate(ids, attention_mask=mask, **{CACHE: mine}, max_new_tokens=16, **ANSWER)
        again = PolicyCache(model, "snapkv:window=4:kernel=1@0.5")
        whole = out.sequences[:, : SWITCH + 1]
        seen = torch.cat([mask, mask.new_ones(2, SWITCH + 1 - 24)], 1)
        one = model.generate(
            whole, attention_mask=seen, **{CACHE: again}, max_new_tokens=16 - (SWITCH + 1 - 24), **ANSWER
        )
    assert torch.equal(one.sequences, out.sequences)
    assert torch.allclose(torch.stack(one.logits), torch.stack(out.logits[SWITCH + 1 - 24 :]), atol=1e-5)
    assert kept(again) == kept(mine)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"guidance_scale": 1.5}])
def test_stock_tokens_under_full(how: dict[str, Any]) -> None:
    model = phi3()
    ids = text(24)
    given = ANSWER | how | {"max_new_tokens": 20, "output_logits": False, "return_dict_in_generate": False}
    stock = model.generate(ids, **given)
    with kvpolicy.attach(model, "full") as handle:
        assert torch.equal(model.generate(ids, **given), stock)
        assert handle.cache is not None and handle.cache.get_seq_length() == 43


def test_what_a_file_brought_stays(tmp_path: Path) -> None:
    model = phi3()
    ids = text(24)
    path = tmp_path / "text.safetensors"
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model, "window@0.3")
        model(ids, **{CACHE: cache})
        cache.save(path, tokens=ids)
        loaded = PolicyCache.load(model, path)
        out = model.generate(torch.cat([ids, text(3)], 1), **{CACHE: loaded}, max_new_tokens=12, **ANSWER)
        assert output_cache(out) is loaded and str(loaded.policy) == "window@0.3" and kept(loaded) == [9]
        other = out.sequences.clone()
        other[0, 3] = (other[0, 3] + 1) % 48
        with pytest.raises(KVPolicyError, match="row 0 and column 3"):
            model.generate(torch.cat([other, text(2)], 1), **{CACHE: loaded}, max_new_tokens=2)


@pytest.mark.parametrize("held", ["a shared prefix", "hold_next()", "a mark", "a chunk"])
def test_what_no_forward_brings_back_is_refused(held: str) -> None:
    model = phi3()
    ids = text(24)
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model, "window@0.3")
        model(ids, **{CACHE: cache})
        how: dict[str, Any] = {"max_new_tokens": 20}
        more = text(26)
        if held == "a shared prefix":
            cache = cache.fork([0], shared=True)
        elif held == "hold_next()":
            cache.hold_next()
        elif held == "a chunk":
            more = text(SWITCH + 34)
            how["prefill_chunk_size"] = SWITCH + 2
        elif held == "a mark":
            model(more[:, 24:25], **{CACHE: cache})
            cache.mark(most=30)
        before = cache.get_seq_length(), kept(cache) if held != "a shared prefix" else None
        with pytest.raises(KVPolicyError) as error:
            inputs = dict[str, Any](use_cache=True)
            if held == "a mark":  # which generate refuses before
                model.prepare_inputs_for_generation(text(SWITCH + 1), **{CACHE: cache}, **inputs)
            else:
                model.generate(more, **{CACHE: cache}, **how)
        assert "whole text" in str(error.value) and str(error.value).count(". ") == 0
        if held in ("a mark", "a chunk"):
            assert (cache.get_seq_length(), kept(cache)) == before, "a refusal changes nothing"


def test_without_a_drop_nothing_begins_again() -> None:
    model = phi3()
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = PolicyCache(model, "window@0.3")
        out = model.generate(text(20), **{CACHE: cache}, max_new_tokens=10, **ANSWER)
        assert output_cache(out) is cache and kept(cache) == [6]
        inputs = model.prepare_inputs_for_generation(text(30), **{CACHE: cache}, next_sequence_length=1, use_cache=True)
        assert inputs[CACHE] is cache and cache.get_seq_length() == 29

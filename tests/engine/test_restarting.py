"""A model that drops its cache in the middle of a generation goes on with the same one: its policy and more stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_names import CACHE, output_cache

SWITCH = 32
HOW: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def phi3() -> Any:
    """A model with other rotary factors behind 32 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "factor": 8.0}
    rope |= {"long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": SWITCH}
    torch.manual_seed(0)
    config: Any = Phi3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8 * SWITCH,
        original_max_position_embeddings=SWITCH,
        rope_parameters=rope,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
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
        out = model.generate(text(columns), **{CACHE: mine}, max_new_tokens=20, **HOW)
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
        out = model.generate(ids, attention_mask=mask, **{CACHE: mine}, max_new_tokens=16, **HOW)
        again = PolicyCache(model, "snapkv:window=4:kernel=1@0.5")
        whole = out.sequences[:, : SWITCH + 1]
        seen = torch.cat([mask, mask.new_ones(2, SWITCH + 1 - 24)], 1)
        one = model.generate(whole, attention_mask=seen, **{CACHE: again}, max_new_tokens=16 - (SWITCH + 1 - 24), **HOW)
    assert torch.equal(one.sequences, out.sequences)
    assert torch.allclose(torch.stack(one.logits), torch.stack(out.logits[SWITCH + 1 - 24 :]), atol=1e-5)
    assert kept(again) == kept(mine)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"guidance_scale": 1.5}])
def test_stock_tokens_under_full(how: dict[str, Any]) -> None:
    model = phi3()
    ids = text(24)
    given = HOW | how | {"max_new_tokens": 20, "output_logits": False, "return_dict_in_generate": False}
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
        out = model.generate(torch.cat([ids, text(3)], 1), **{CACHE: loaded}, max_new_tokens=12, **HOW)
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
        out = model.generate(text(20), **{CACHE: cache}, max_new_tokens=10, **HOW)
        assert output_cache(out) is cache and kept(cache) == [6]
        inputs = model.prepare_inputs_for_generation(text(30), **{CACHE: cache}, next_sequence_length=1, use_cache=True)
        assert inputs[CACHE] is cache and cache.get_seq_length() == 29

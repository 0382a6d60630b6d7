"""Each class of the installed transformers under policies: a sample of every commit, and all with `pytest -m full`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from kvpolicy_eval.families import check as checks
from kvpolicy_eval.families import small_model
from kvpolicy_eval.families.check import EVICTING, REFUSED, RIGHT, SEEN_FROM, STOCK, WITHIN, check
from kvpolicy_eval.families.entries import CAUSAL, IMAGE, Entry, installed
from kvpolicy_eval.families.page import bytes_of, faults_of
from kvpolicy_eval.families.prompts import prompt
from kvpolicy_eval.families.sizes import HEADS, HIDDEN, VOCABULARY, WINDOW
from kvpolicy_eval.families.small_config import small_config

SAMPLE = {
    Entry(CAUSAL, "longcat_flash"): RIGHT,  # two attention modules in a layer
    Entry(IMAGE, "deepseek_ocr2"): RIGHT,  # two stacks, of which one looks at pictures
    Entry(CAUSAL, "llama"): RIGHT,  # plain
    Entry(CAUSAL, "qwen3_5_text"): RIGHT,  # states beside attention
    Entry(CAUSAL, "gemma2"): RIGHT,  # sliding windows
    Entry(IMAGE, "blip-2"): RIGHT,  # a picture in the prompt
    Entry(CAUSAL, "mpt"): REFUSED,
    Entry(CAUSAL, "musicgen"): STOCK,
}


@pytest.mark.parametrize("entry", SAMPLE, ids=lambda entry: entry.key)
def test_a_sample(entry: Entry) -> None:
    if entry not in installed():
        pytest.skip("this version of transformers lacks it")
    result = check(entry)
    assert (result["verdict"], [*faults_of(result)]) == (SAMPLE[entry], [])
    if result["verdict"] != RIGHT:
        assert result["sentence"]
        return
    assert [*result["policies"]] == [*EVICTING]
    assert result["full"] <= WITHIN
    # Where all heads share one KV head, one of the policies is refused.
    measured = [one for one in result["policies"].values() if "difference" in one]
    assert measured and all(one["difference"] <= WITHIN and one["unmasked"] >= SEEN_FROM for one in measured)
    if entry.name == "blip-2":
        assert "pixel_values" in prompt(entry) and "padding" not in result
    else:
        assert result["padding"]["stock"] <= WITHIN and result["padding"]["policy"] <= WITHIN
        planned = bytes_of(result)
        assert planned and planned[0] == planned[1] > 0


@pytest.mark.full
@pytest.mark.parametrize("entry", installed(), ids=lambda entry: entry.key)
def test_every_family(entry: Entry) -> None:
    assert [*faults_of(check(entry))] == []


def test_a_stock_model_without_numbers_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that both give NaN are not equal: there is nothing to compare with."""
    build = checks.build

    def broken(entry: Entry) -> object:
        model = build(entry)
        model.get_output_embeddings().weight.data.fill_(float("nan"))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        return model

    monkeypatch.setattr(checks, "build", broken)
    result = check(Entry(CAUSAL, "llama"))
    assert result["verdict"] == STOCK and "no numbers" in result["sentence"]


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_what_stock_needs_is_said_for_a_reader() -> None:
    result = check(Entry(IMAGE, "fast_vlm"))
    assert (result["verdict"], result["sentence"].partition(";")[0]) == (
        STOCK,
        "its picture tower needs the package timm",
    )


def test_small_configs() -> None:
    """Sizes go by the names of fields, also in a part; some layers have full attention, and special tokens differ."""
    config = small_config(transformers.Gemma3Config, {"text_config": {"num_hidden_layers": 2}})
    assert config.text_config.num_hidden_layers == 2
    assert config.text_config.hidden_size == config.vision_config.hidden_size == HIDDEN
    mixed = small_config(transformers.Gemma3TextConfig)
    assert mixed.layer_types == ["sliding_attention", "full_attention"] * 2 and mixed.sliding_window == WINDOW
    assert small_config(transformers.MistralConfig).sliding_window is None
    assert small_config(transformers.GPT2Config).n_inner is None, "None means something"
    assert small_config(transformers.DeepseekV3Config).num_key_value_heads == HEADS
    config = small_config(transformers.Qwen2VLConfig)
    tokens = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    assert len(tokens) == 4 and all(100 < token < VOCABULARY for token in tokens)


def test_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn from a fixed seed and sharpened, and a text class takes the text part of a config."""
    first, second = (dict(small_model.build(Entry(CAUSAL, "llama")).named_parameters()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    queries, keys = (first[f"model.layers.0.self_attn.{name}.weight"].std() for name in ("q_proj", "k_proj"))
    assert 1.8 < queries / keys < 2.2
    assert type(small_model.build(Entry(CAUSAL, "llama4"))).__name__ == "Llama4ForCausalLM"
    monkeypatch.setattr(small_model, "LIMIT", 1000)
    with pytest.raises(ValueError, match=r"at most 1,000 parameters, got [\d,]+, most of them in "):
        small_model.build(Entry(IMAGE, "qwen2_vl"))

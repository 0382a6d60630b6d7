"""Copied, pickled and saved while attached."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import transformers

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.engine.test_attach import trace
from tests.robust.hostile import SOME, answer, own, prompt, refused


@SOME
def test_a_model_and_its_handle_are_not_copied(policy: str) -> None:
    """Their hooks would work for the original; the original works on."""
    model = own()
    with kvpolicy.attach(model, policy) as handle:
        want = answer(model)
        for thing in (model, model.model, handle):
            with refused("detach"):
                copy.deepcopy(thing)
            with refused("detach"):
                torch.save(thing, io.BytesIO())
        with refused("detach"):
            copy.copy(handle)
        with refused("cannot be pickled"):
            torch.save(handle.cache, io.BytesIO())
        assert torch.equal(answer(model), want)
    twin = copy.deepcopy(model)
    with kvpolicy.attach(twin, policy):
        assert torch.equal(answer(twin), want)


@pytest.mark.parametrize("family", ["llama", "gemma3n", "deepseek_v2", "qwen3_5"])
@pytest.mark.parametrize("policy", ["squeeze+kvcrush/snapkv@0.5", "critical/h2o@0.5"])
def test_a_copy_of_a_cache_has_the_weights_in_common(policy: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(parameter: torch.nn.Parameter, memo: object) -> None:
        raise AssertionError(f"A weight of shape {tuple(parameter.shape)} is copied.")

    model = build(family)
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", copied)
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        for other in (cache.fork(), cache.fork([0, 0]), copy.deepcopy(cache)):
            assert torch.isfinite(model(prompt(1).expand(other.batch_size, -1), cache=other).logits).all()


@pytest.mark.parametrize("policy", ["squeeze+snapkv@0.5"])
def test_saved_while_attached(policy: str, tmp_path: Path) -> None:
    """What is saved knows nothing of the policy."""
    model = own()
    ids, mask = make_batch([20, 13], [20])
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path / "before")  # which writes the class's name into the config
    names = [*model.state_dict()]
    before = trace(model)
    with kvpolicy.attach(model, policy):
        answer(model)
        assert [*model.state_dict()] == names
        model.load_state_dict(model.state_dict())
        model.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        assert "kvpolicy" not in model.config.to_json_string()
    assert "kvpolicy" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids, attention_mask=mask).logits, want)
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert trace(model) == before

"""Models that accelerate has spread: slots live where their layer's keys are."""

from __future__ import annotations

import copy
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.engine.test_attach import trace

accelerate = pytest.importorskip("accelerate")

POLICIES = ["squeeze+kvcrush/h2o+kivi:group_size=4:residual_length=4@0.5", "snapkv@0.5", "full"]

LAYERS = [f"model.layers.{index}" for index in range(3)]
PARTS = ["model.embed_tokens", "model.rotary_emb", *LAYERS, "model.norm", "lm_head"]


@pytest.fixture(params=["cpu", "disk"])
def spread(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Any]:
    """A model that is hooked by accelerate: dispatched, or its weights on disk; `test_features.py` has those on CPU."""
    model = copy.deepcopy(build("llama"))
    if request.param == "cpu":
        model = accelerate.dispatch_model(model, dict.fromkeys(PARTS, "cpu"), main_device="cpu", force_hooks=True)
    else:
        model = accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    yield model
    accelerate.hooks.remove_hook_from_submodules(model)


# transformers 5.18 warns of weights that are not where tokens are.
@pytest.mark.filterwarnings("ignore:.*on a device type different than your model:UserWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_like_one_device(spread: Any, policy: str) -> None:
    whole = build("llama")
    ids, mask = make_batch([26, 17])
    with kvpolicy.attach(whole, policy):
        one = PolicyCache(whole)
        want = talk(whole, ids, mask, TURNS, one)
    before = trace(spread)
    with kvpolicy.attach(spread, policy) as handle:
        cache = PolicyCache(spread)
        got = talk(spread, ids, mask, TURNS, cache)
        out = spread.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert handle.cache is not None
    assert torch.allclose(got, want, atol=1e-5)
    assert [kept_positions(a) for a in cache.policy_layers] == [kept_positions(b) for b in one.policy_layers]
    assert out.shape == (2, ids.shape[1] + 5)
    assert trace(spread) == before


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_two_devices(policy: str) -> None:
    """Layers on an accelerator and on the CPU: each layer's slots are where its keys are."""
    places: dict[str, Any] = dict.fromkeys(PARTS, 0)
    places |= dict.fromkeys(["model.norm", "lm_head", "model.layers.2"], "cpu")
    model = accelerate.dispatch_model(copy.deepcopy(build("llama")), places, main_device=0)
    ids, mask = make_batch([26, 17])
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        logits = talk(model, ids.cuda(), mask.cuda(), TURNS, cache)
    assert torch.isfinite(logits).all()
    layers = cache.policy_layers
    assert [layer.positions.device.type for layer in layers] == [layer.keys.device.type for layer in layers]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.filterwarnings("ignore:.*on a device type different than your model:UserWarning")
def test_files_and_drafts_of_weights_that_are_offloaded(spread: Any, tmp_path: Path) -> None:
    """Slots are where layers compute, and not where their weights wait."""
    ids, _ = make_batch([26])
    with torch.no_grad(), kvpolicy.attach(spread, "snapkv+tokenwise:bits=4@0.5"):
        cache = PolicyCache(spread)
        spread(ids, cache=cache)
        cache.save(tmp_path / "prompt.safetensors")
        again = PolicyCache.load(spread, tmp_path / "prompt.safetensors")
        token = torch.tensor([[5]])
        assert torch.equal(spread(token, cache=again).logits, spread(token, cache=cache).logits)
    drafted = kvpolicy.speculate(spread, "snapkv@0.5", ids, max_new_tokens=6)
    assert torch.equal(drafted, kvpolicy.speculate(build("llama"), "snapkv@0.5", ids, max_new_tokens=6))

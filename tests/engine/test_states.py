"""Layers with states, which stay the model's own; `test_layer_kinds.py` has how they follow rows, marks and files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy.hf import model_spec
from kvpolicy.hf import states as hf_states
from kvpolicy.hf.forward_calls import check_step
from tests.conformance.models import build
from tests.engine.filled import prefilled, text
from tests.engine.test_layer_kinds import STATES, states


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", STATES)
def test_a_state_does_not_depend_on_what_is_kept(family: str) -> None:
    """In the first layer, no attention came before, so that its state is that of the stock cache."""
    model = build(family)
    stock = model(text(2, 20)).cache
    first = next(index for index, layer in enumerate(stock.layers) if hasattr(layer, "conv_states"))
    expected = [t for kind in ("conv_states", "recurrent_states") for t in getattr(stock.layers[first], kind).values()]
    with kvpolicy.attach(model, "window@4"):
        cache = prefilled(model)
        layer: Any = cache.layers[first]
        found = layer.copy_states()
    if first == 0:
        assert all(torch.equal(*pair) for pair in zip(found, [t for t in expected if t is not None], strict=True))


def test_a_file_without_its_states_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = build("falcon_h1")
    path = str(tmp_path / "cache.safetensors")
    with kvpolicy.attach(model, "snapkv@0.5"):
        prefilled(model).save(path)
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = file.metadata()
        del held["layers.1.recurrent.0"]
        save_file(held, path, told)
        with pytest.raises(kvpolicy.KVPolicyError):
            kvpolicy.PolicyCache.load(model, path)


@pytest.mark.parametrize("family", STATES)
def test_a_replay_leaves_states_as_they_are(family: str) -> None:
    model = build(family)
    with kvpolicy.attach(model, "full"):
        expected = states(prefilled(model))
    with kvpolicy.attach(model, "kvzip:chunk=8@0.6"):
        found = states(prefilled(model))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("padding", [0, 5])
def test_tiles_keep_what_one_piece_keeps(family: str, padding: int) -> None:
    model = build(family)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :padding] = 0
    found: list[Any] = []
    for tile in (None, 7):
        with kvpolicy.attach(model, "snapkv@0.5", tile=tile) as handle:
            logits = model(text(2, 20), attention_mask=mask).logits[:, -1]
            assert handle.cache is not None
            found.append((logits, [layer.head_positions.sort().values for layer in handle.cache.policy_layers]))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


def test_what_a_state_does_not_allow_is_refused() -> None:
    model = build("qwen3_5")
    with kvpolicy.attach(model, "full"):
        shared = prefilled(model, rows=1).fork([0, 0], shared=True)
        model(text(2, 1), cache=shared)
        with pytest.raises(kvpolicy.KVPolicyError, match="which has moved on"):
            shared.reset()
        cache = prefilled(model)
        with pytest.raises(kvpolicy.KVPolicyError, match="layers with a state"):
            cache.shift(10, -2)
        with pytest.raises(kvpolicy.KVPolicyError, match="the state of layer 0"):
            cache.crop(-1)
        cache.mark(most=2)
        with pytest.raises(kvpolicy.KVPolicyError, match="must not be compiled under a mark"):
            check_step(model.model, (), {"input_ids": torch.full((2, 1), 7), "cache": cache})


def test_drafts_are_refused_before_anything_runs() -> None:
    model = build("falcon_h1")
    with pytest.raises(kvpolicy.KVPolicyError, match="a state in layer 0"):
        kvpolicy.speculate(model, "window@0.5", text(1, 20), max_new_tokens=4)


class _Experts(nn.Module):
    """A layer without a state that takes the cache of its model."""

    layer_idx = 0

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        return x


class _Fails(_Experts):
    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        raise TypeError("more arguments")


def test_a_layer_that_fills_no_state_has_none() -> None:
    """transformers 5.18 lists the experts of Nemotron-H among the layers with a state."""
    cache: Any = SimpleNamespace(layers=[SimpleNamespace()])
    hf_states._fill(_Experts(), cache, 0, 4, torch.float32)
    with pytest.raises(
        kvpolicy.KVPolicyError, match="must be in the layers of transformers' cache, got layer 0 of _Fails"
    ):
        hf_states._fill(_Fails(), cache, 0, 4, torch.float32)


def test_layers_without_bytes_have_no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_states, "state_nbytes", lambda config, dtype: {2: 8})
    assert [*model_spec._states(SimpleNamespace(), {1: 1, 2: 1}, torch.float32)] == [2]

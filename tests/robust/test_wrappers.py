"""Models inside PEFT wrappers, and ways to generate that no policy can follow."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.hf.projection import output_projection
from tests.conformance.models import build
from tests.conformance.play import make_batch

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, which PEFT calls
GENERATE: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}


def adapted(*names: str, **options: Any) -> Any:
    """A model with adapters, which change its output projections a lot."""
    torch.manual_seed(0)
    options = {"target_modules": ["v_proj", "o_proj"], "lora_alpha": 32, "init_lora_weights": False} | options
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options)
    model = peft.get_peft_model(copy.deepcopy(build("llama")), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    return model.eval()


@pytest.mark.parametrize("policy", ["snapkv:decode=grow@0.3", "window@0.5", "snapkv@64KiB"])
def test_a_peft_model_generates_as_the_model_inside(policy: str) -> None:
    """Its caches know the prompt and the new tokens, also where a prompt comes in chunks; new adapters add nothing."""
    ids, mask = make_batch([40, 31], [40])
    found: list[tuple[Any, int, Any]] = []
    for model in (build("llama"), adapted("default", init_lora_weights=True)):
        with kvpolicy.attach(model, policy) as handle:
            for more in ({}, {"prefill_chunk_size": 9}):
                tokens = model.generate(input_ids=ids, attention_mask=mask, **GENERATE, **more)
                assert handle.cache is not None and handle.cache.prompt is not None
                assert handle.cache.prompt.tolist() == [40, 31] and handle.cache.new == 4
                positions = [layer.positions.tolist() for layer in handle.cache.policy_layers]
                found.append((tokens.tolist(), handle.cache.nbytes, positions))
        inner = getattr(model, "base_model", model)
        assert not any("_prepare_cache_for_generation" in vars(module) for module in inner.modules())
    assert found[:2] == found[2:]


class OwnLora(torch.nn.Linear):
    """A projection whose author added two small matrices to it."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False)
        self.load_state_dict(inner.state_dict())
        self.down = torch.nn.Parameter(torch.randn(2, inner.in_features))
        self.up = torch.nn.Parameter(torch.randn(inner.out_features, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input @ self.down.T @ self.up.T


@pytest.mark.parametrize("how", ["peft", "own"])
def test_an_adapter_of_the_output_projection_is_part_of_it(how: str) -> None:
    """Selectors that weigh values behind it keep what they keep with merged weights."""
    ids, mask = make_batch([40, 31], [40])
    if how == "peft":
        model = adapted("default", target_modules=["o_proj"])
        merged = copy.deepcopy(model).merge_and_unload()
    else:
        torch.manual_seed(0)
        model = copy.deepcopy(build("llama"))
        merged = copy.deepcopy(model)
        for layer, other in zip(model.model.layers, merged.model.layers, strict=True):
            layer.self_attn.o_proj = OwnLora(layer.self_attn.o_proj)
            other.self_attn.o_proj.weight.data += layer.self_attn.o_proj.up @ layer.self_attn.o_proj.down
    found = [kept(one, BEHIND_PROJECTION[0], ids, mask) for one in (model, merged)]
    assert all(map(torch.equal, *found))


BEHIND_PROJECTION = ["critical/snapkv:window=4@0.4", "defensive:window=4@0.4", "kvzip:plus=true@0.4"]


def kept(model: Any, policy: str, ids: torch.Tensor, mask: torch.Tensor, how: Any = None, **call: Any) -> list[Any]:
    """Sorted positions of each layer after a prompt and two steps."""
    with torch.no_grad(), kvpolicy.attach(model, policy, **how or {}) as handle:
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=2, min_new_tokens=2, **call)
    assert handle.cache is not None
    return [layer.positions.sort(-1).values for layer in handle.cache.policy_layers]


@pytest.mark.parametrize("how", [{}, {"tile": 7}])
@pytest.mark.parametrize("policy", BEHIND_PROJECTION)
def test_rows_with_adapters_of_their_own_keep_what_they_keep_alone(policy: str, how: dict[str, Any]) -> None:
    """A weight that is read by running its module is read for each row's adapter."""
    ids, mask = make_batch([40, 31, 36], [40])
    model = adapted("default", "other")
    names = ["other", "default", "__base__"]
    together = kept(model, policy, ids, mask, how, adapter_names=names)
    for row, name in enumerate(names):
        if name != "__base__":
            model.set_adapter(name)
        with model.disable_adapter() if name == "__base__" else contextlib.nullcontext():
            alone = kept(model, policy, ids, mask, how)
        assert all(torch.equal(a[row], b[row]) for a, b in zip(together, alone, strict=True)), name


def test_an_adapter_that_depends_on_the_tokens_is_refused() -> None:
    """What a call hands to the projection is known, or it is refused; a selector that reads no weight answers."""
    ids, mask = make_batch([40, 31], [40])
    model = adapted("default", "other")
    call = {"adapter_names": ["other", "default"], "alora_offsets": [3, 4]}
    with pytest.raises(kvpolicy.KVPolicyError, match=r"same for all tokens of a row, .* is given alora_offsets in"):
        kept(model, BEHIND_PROJECTION[0], ids, mask, **call)
    assert kept(model, "snapkv:window=4@0.4", ids, mask, **call)


def test_the_weight_is_read_without_dropout_and_without_hooks_of_others() -> None:
    model = adapted("default")
    attention = model.base_model.model.model.layers[0].self_attn
    still = output_projection(attention)
    seen: list[Any] = []
    hook = attention.o_proj.register_forward_hook(lambda *call: seen.append(call))
    attention.o_proj.lora_dropout["default"] = torch.nn.Dropout(0.5)
    attention.o_proj.train()
    assert torch.equal(output_projection(attention), still) and not seen
    assert all(module.training for module in attention.o_proj.modules())
    hook.remove()


def test_prefix_tuning_is_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(copy.deepcopy(build("llama")), config).eval()
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must not pass its own keys and values .*, got prefix tuning"):
        kvpolicy.attach(model, "window@0.5")
    assert not any("kvpolicy" in str(module.config._attn_implementation) for module in [model.base_model])


def test_continuous_batching_is_refused() -> None:
    model: Any = build("llama")
    stock = model.generate_batch
    with kvpolicy.attach(model, "window@0.5"):
        with pytest.raises(kvpolicy.KVPolicyError, match="Continuous batching"):
            model.generate_batch(inputs=[[1, 2, 3]])
        assert model.generate(torch.tensor([[3, 4, 5]]), **GENERATE).shape == (1, 7)
    assert model.generate_batch == stock

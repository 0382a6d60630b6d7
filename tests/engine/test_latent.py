"""Latent attention: what is held, and that it equals the stock model's expanded attention to the same tokens.

`test_layer_kinds.py` has what such layers do as all others.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy.hf.latent import LatentSlots
from kvpolicy.hf.projection import matrix_of
from tests.conformance.masked import differences
from tests.conformance.models import LATENT, build
from tests.conformance.play import TURNS, make_batch
from tests.engine.filled import prefilled, step, text

FAMILIES = [*LATENT]
"""With projected queries and without, with the rotation of halves, and beside states."""


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def in_pieces(model: Any, sizes: list[int]) -> Tensor:
    """Logits of a text over one cache that keeps all of it."""
    with kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        return torch.cat([model(part, cache=cache).logits for part in text(2, sum(sizes)).split(sizes, 1)], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_equals_stock(family: str) -> None:
    model = build(family)
    expected = model(text(2, 24)).logits
    assert (in_pieces(model, [16, 1, 6, 1]) - expected).abs().max() < 3e-5 * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["snapkv:window=6:kernel=3@0.5", "h2o@8", "squeeze+window@0.4"])
def test_evicting_equals_the_masked_stock_model(family: str, policy: str) -> None:
    ids, mask = make_batch([26, 26] if family == "kimi_linear" else [26, 11])
    found = differences(build(family), policy, ids, mask, TURNS)
    assert found["policy"] < 1e-4 and found["unmasked"] > 0.05, found


def test_values_of_another_size_equal_the_masked_stock_model() -> None:
    ids, mask = make_batch([26, 11])
    for policy in ("snapkv:window=6:kernel=3@0.5", "uniform/adakv+snapkv:window=6:kernel=3@0.5"):
        found = differences(build("mimo_v2_flash"), policy, ids, mask, TURNS)
        assert found["policy"] < 1e-4 and found["unmasked"] > 0.05, (policy, found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_is_held_once(family: str) -> None:
    """As many numbers as in the stock cache: the latent vector and the rotated key."""
    model = build(family)
    stock = model(text(2, 20)).cache
    with kvpolicy.attach(model, "full"):
        cache = prefilled(model, new=0)
    for own, other in zip(cache.layers, stock.layers, strict=True):
        if isinstance(own, LatentSlots):
            assert own.held()["exact"] == other.keys.nbytes + other.values.nbytes
            assert own.keys.shape[1] == 1 and own.values.shape[3] == 0
            assert vars(own).get("_given") is None  # of the prompt


def test_codes_hold_no_values() -> None:
    with kvpolicy.attach(build("deepseek_v3"), "full+tokenwise:bits=8:residual_length=2:block_size=2"):
        layer = prefilled(build("deepseek_v3")).policy_layers[0]
        (codes,) = layer.store.tensors.codes
    assert codes.keys.shape[2] > 0 and not sum(t.numel() for t in (codes.values, codes.value_scale, codes.value_zero))


@pytest.mark.parametrize("policy", ["snapkv@0.5", "h2o@0.5", "kvzip:chunk=9:sinks=2@0.5"])
def test_tiles_keep_the_same_tokens(policy: str) -> None:
    model = build("deepseek_v3")
    kept = []
    for tile in (None, 7):
        with kvpolicy.attach(model, policy, tile=tile):
            cache = prefilled(model)
            kept.append([layer.positions for layer in cache.policy_layers])
            assert torch.isfinite(step(model, cache)).all()
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))


def test_norms_of_values_are_those_behind_both_weights() -> None:
    """What a latent vector adds to the residual stream, against the expanded values of the stock model."""
    model = build("deepseek_v3")
    attention: Any = model.model.layers[0].self_attn
    with kvpolicy.attach(model, "critical/h2o@0.5") as handle:
        prefilled(model)
        assert handle.cache is not None
        projection = handle.cache.attachment.projections[0]()
    latent = torch.randn(1, 1, 5, attention.kv_lora_rank)
    _, values = attention.expand_kv(latent, torch.zeros(1, 1, 5, attention.qk_rope_head_dim))
    weight = attention.o_proj.weight.unflatten(1, (-1, attention.v_head_dim))
    expected = torch.einsum("bhpd,mhd->bhpm", values, weight)
    found = torch.einsum("bpr,mhr->bhpm", latent[:, 0], projection.unflatten(1, (-1, attention.kv_lora_rank)))
    assert torch.allclose(found, expected, atol=1e-4)


def test_bf16_is_within_its_rounding() -> None:
    model = build("deepseek_v3", torch.bfloat16)
    expected = build("deepseek_v3")(text(2, 24)).logits
    stock = (model(text(2, 24)).logits.float() - expected).std()
    assert (in_pieces(model, [16, *[1] * 8]).float() - expected).std() < 1.5 * stock


class _Doubled(nn.Linear):
    """A module whose weight is not its matrix, as where it is quantized."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight * 2)


class _InEightBits(nn.Linear):
    """A module whose weight is in 8 bits and has a scale beside it."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype) * 4)


def test_the_matrix_of_a_weight_in_fp8_is_read_off() -> None:
    part = _InEightBits(3, 5, bias=False)
    part.weight = nn.Parameter(torch.randn(5, 3).to(torch.float8_e4m3fn), requires_grad=False)
    found = matrix_of(part, torch.zeros(1, 3), "a test")
    assert torch.equal(found, part.weight.float() * 4)


def test_a_matrix_is_read_off_where_the_weight_is_another() -> None:
    model = copy.deepcopy(build("deepseek_v3"))
    for layer in model.model.layers:
        own = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = _Doubled(own.in_features, own.out_features, bias=False)
        layer.self_attn.kv_b_proj.weight.copy_(own.weight / 2)
    expected = model(text(2, 20)).logits
    assert (in_pieces(model, [15, 5]) - expected).abs().max() < 3e-5 * expected.std()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("uniform/adakv+snapkv@0.5", "Heads must have no budgets of their own for latent attention"),
        ("expected@0.5", "must not be undone for latent attention .* got the selector of expected"),
        ("h2o+gear@0.5", "must encode keys and values separately for latent attention .* got gear"),
        ("h2o+rotate@0.5", "must encode keys and values separately"),
        ("h2o+blend@0.5", "must merge keys for latent attention .* got blend"),
        ("h2o+regress@0.5", "must merge keys for latent attention .* got regress"),
        ("h2o+merge@0.5", "must merge keys for latent attention .* got merge"),
        ("streaming+shadowkv@0.5", "must not be undone"),
    ],
)
def test_what_is_refused_is_refused_by_plan_too(policy: str, words: str) -> None:
    model = build("deepseek_v3")
    with pytest.raises(kvpolicy.KVPolicyError, match=words):
        kvpolicy.attach(model, policy)
    with pytest.raises(kvpolicy.KVPolicyError, match=words):
        kvpolicy.plan(model.config, policy, prompt=20)
    assert torch.isfinite(model(text(1, 5)).logits).all()


def test_tokens_are_not_moved() -> None:
    model = build("deepseek_v3")
    with kvpolicy.attach(model, "full"):
        cache = prefilled(model)
        with pytest.raises(kvpolicy.KVPolicyError, match="for tokens to be moved"):
            cache.shift(10, -2)


def test_prompts_are_not_held_in_codes() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="Values must have the size of keys for hold='codes'"):
        kvpolicy.attach(build("deepseek_v3"), "h2o+tokenwise@0.5", hold="codes")


def test_layers_are_not_measured_for_a_tuned_policy() -> None:
    from kvpolicy.tuning.tap import tapped

    model = build("deepseek_v3")
    with pytest.raises(kvpolicy.KVPolicyError, match="Values must have the size of keys to be measured"), tapped(model):
        pass
    assert torch.isfinite(model(text(1, 5)).logits).all()


def test_a_saved_cache_has_no_plain_keys_and_values() -> None:
    from kvpolicy.hf.dense_cache import skeleton

    with pytest.raises(kvpolicy.KVPolicyError, match="got deepseek_v3 with latent attention"):
        skeleton(build("deepseek_v3").config)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT itself
def test_adapters_of_the_expansion_count() -> None:
    """LoRA on `kv_b_proj`, one for all rows and one for each row."""
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(build("deepseek_v3"))
    config = peft.LoraConfig(target_modules=["kv_b_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="one").eval()
    adapted.add_adapter("two", config)
    ids = text(2, 20)
    for given in ({}, {"adapter_names": ["two", "one"]}):
        expected = adapted(input_ids=ids, **given).logits
        with kvpolicy.attach(model, "full"):
            cache = kvpolicy.PolicyCache(model)
            parts = (slice(15), slice(15, 16), slice(16, 20))
            found = torch.cat([adapted(input_ids=ids[:, at], cache=cache, **given).logits for at in parts], 1)
        assert (found - expected).abs().max() < 1e-4 * expected.std(), given


def test_offloaded_weights_are_loaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(build("deepseek_v3"))
    expected = model(text(2, 20)).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    assert (in_pieces(model, [15, 5]) - expected).abs().max() < 3e-5 * expected.std()


def test_gradients_flow_through_a_first_prompt() -> None:
    model = copy.deepcopy(build("deepseek_v3"))
    grads: list[Tensor] = []
    for policy in ("", "snapkv@0.5"):
        model.zero_grad()
        with torch.enable_grad():
            if policy:
                with kvpolicy.attach(model, policy):
                    model(text(1, 20)).logits.sum().backward()
            else:
                model(text(1, 20)).logits.sum().backward()
        grads.append(model.model.layers[0].self_attn.kv_b_proj.weight.grad.clone())
    assert torch.allclose(grads[0], grads[1], atol=1e-4 * float(grads[0].abs().max()))

"""What positions do to a model is measured: where they are no rotation of its keys, tokens are not moved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf import key_probe
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.dense_cache import skeleton
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.rotary_lookup import first_not_undone, rope_of, ropes_of
from tests.conformance.models import FAMILIES, LATENT, SHARED, UNNAMED, VOCABULARY, build
from tests.conformance.play import make_batch
from tests.engine.test_attach import trace
from tests.robust.hostile import made, refused


def without_rotation(*rotates: int) -> Any:
    """A model with a rotary embedding in some layers, and with no positions in the others."""
    more: dict[str, Any] = {"no_rope_layers": [*rotates], "num_hidden_layers": len(rotates), "num_key_value_heads": 2}
    return made("SmolLM3ForCausalLM", "SmolLM3Config", layer_types=["full_attention"] * len(rotates), **more)


ADDED = {
    "gpt2": lambda: build("gpt2", layers=2),
    "opt": lambda: build("opt", layers=2),
    "bert": lambda: made("BertLMHeadModel", "BertConfig", is_decoder=True),
    "roberta": lambda: made("RobertaForCausalLM", "RobertaConfig", is_decoder=True),
    "ctrl": lambda: made("CTRLLMHeadModel", "CTRLConfig", "intermediate_size", dff=48),
    "biogpt": lambda: made("BioGptForCausalLM", "BioGptConfig"),
    "gpt_bigcode": lambda: made("GPTBigCodeForCausalLM", "GPTBigCodeConfig", "intermediate_size", n_inner=48),
}
"""Models that add positions to hidden states, which no rotation of keys moves."""


def ids(count: int = 30) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(1))


def logits(model: Any, tokens: Tensor, cache: Any = None) -> Tensor:
    with torch.no_grad():
        return model(tokens, **({} if cache is None else cache_argument(model, cache))).logits[0, -1]


@pytest.mark.parametrize("name", ADDED)
def test_added_positions_do_not_move(name: str) -> None:
    """No rotary embedding is not taken for no positions, and a refused shift changes nothing."""
    model = ADDED[name]()
    with kvpolicy.attach(model, "full"):
        caches = [PolicyCache(model), PolicyCache(model)]
        for cache in caches:
            logits(model, ids(), cache)
        with refused("rotations of its keys alone .* adds them to hidden states"):
            caches[0].shift(20, -10)
        assert torch.equal(*(logits(model, ids(1), cache) for cache in caches))


@pytest.mark.parametrize("rotates", [(0,), (1,)])
def test_a_span_is_removed_exactly_with_and_without_a_rotation(rotates: tuple[int, ...]) -> None:
    """In one layer keys depend on the token and its position alone; without positions, on the token."""
    model = without_rotation(*rotates)
    tokens = ids(40)
    short = torch.cat([tokens[:, :20], tokens[:, 30:]], 1)
    right = logits(model, short)
    with kvpolicy.attach(model, "full"):
        cache = PolicyCache(model)
        logits(model, tokens[:, :-1], cache)
        cache.shift(30, -10)
        got = logits(model, tokens[:, -1:], cache)
    assert (got - right).abs().max() < 1e-4 * right.abs().max()
    assert (got - logits(model, tokens)).abs().max() > 1e-2 * right.abs().max(), "the removed span mattered"


@pytest.mark.parametrize("rotates", [(1, 1, 1, 0), (0, 0), (1, 0)])
def test_distances_alone_count(rotates: tuple[int, ...]) -> None:
    """Moving every token by the same distance changes nothing, however many layers have no positions."""
    model = without_rotation(*rotates)
    with kvpolicy.attach(model, "window@0.5"):
        found: list[Tensor] = []
        for by in (0, 7):
            cache = PolicyCache(model)
            logits(model, ids(), cache)
            cache.shift(0, by)
            found.append(logits(model, ids(1), cache))
    assert (found[1] - found[0]).abs().max() < 1e-4 * found[0].abs().max()


def hunyuan() -> Any:
    """A model that normalizes keys behind their rotation, with a weight for each channel."""
    return made("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", head_dim=8, num_key_value_heads=2)


def find_first(model: Any) -> tuple[nn.Module, Any]:
    sites = find_sites(model)
    return sites.decoder, sites.layers[0]


@pytest.mark.parametrize("policy", ["expected@0.5", "compactor@0.5"])
def test_keys_that_change_behind_their_rotation_are_not_unrotated(policy: str) -> None:
    model = hunyuan()
    with pytest.raises(KVPolicyError, match=r"same at every position .* this selector does, got others in layer 0"):
        kvpolicy.attach(model, policy)
    with refused("as this codec does"):
        rope_of(*find_first(model))
    with kvpolicy.attach(model, "snapkv@0.5"):
        cache = PolicyCache(model)
        logits(model, ids(), cache)
        with pytest.raises(KVPolicyError, match="HunYuanDenseV1Attention, whose keys depend on them in another way"):
            cache.shift(0, 7)
    with refused("got others of HunYuanDenseV1Attention"):
        skeleton(model.config)


def test_offloaded_weights_are_measured_and_stay_offloaded() -> None:
    """Without weights, nothing is measured."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(hunyuan(), execution_device=torch.device("cpu"))
    with pytest.raises(KVPolicyError, match="same at every position"):
        kvpolicy.attach(model, "expected@0.5")
    assert all(weight.is_meta for weight in model.parameters())
    kvpolicy.attach(hunyuan().to("meta"), "expected@0.5").detach()


def test_it_is_measured_and_not_known_by_name() -> None:
    """With the same weight in every channel, a norm behind the rotation is none."""
    model = hunyuan()
    for name, weight in model.named_parameters():
        if name.endswith("key_layernorm.weight"):
            weight.data.fill_(1.3)
    with kvpolicy.attach(model, "expected@0.5"):
        cache = PolicyCache(model)
        logits(model, ids(), cache)
        assert logits(model, ids(1), cache).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *UNNAMED) if name not in (*LATENT, *SHARED)])
def test_keys_of_every_family_are_measured(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is refused, none is passed over unmeasured, and without its embedding each would be refused."""
    model = copy.deepcopy(build(family)).to(dtype)
    sites = find_sites(model)
    ropes = ropes_of(sites.decoder, sites.layers, "")
    found: list[bool | None] = []
    real = key_probe.is_undone
    monkeypatch.setattr(key_probe, "is_undone", lambda *args: found.append(real(*args)) or found[-1])
    assert first_not_undone(sites.decoder, sites.layers, ropes) is None
    assert found == [True] * len(sites.layers)
    rotated = next((index for index, rope in ropes.items() if rope.rotates), None)
    if rotated is not None:
        plain = key_probe.Rope(None, None, None)
        other = first_not_undone(sites.decoder, sites.layers, dict.fromkeys(ropes, plain))
        assert other is not None and other.layer_idx == rotated
    assert key_probe.adds_positions(model, sites) == (family in ADDED)


def test_a_model_is_as_it_was() -> None:
    """In training mode, too: no dropout, no gradient, no hook, no random number."""
    model = copy.deepcopy(build("llama")).train()
    model.model.layers[0].self_attn.k_proj = nn.Sequential(model.model.layers[0].self_attn.k_proj, nn.Dropout(0.5))
    model.model.layers[1].self_attn.eval()
    modes = [module.training for module in model.modules()]
    before = trace(model)
    drawn = torch.get_rng_state()
    rope_of(*find_first(model))
    assert key_probe.adds_positions(model, find_sites(model)) is False
    assert [module.training for module in model.modules()] == modes
    assert trace(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(weight.grad is None for weight in model.parameters())


def test_the_rotary_embedding_of_another_part_is_not_the_decoders() -> None:
    """As of a protein encoder that stands in the decoder before its layers (Evolla)."""
    model = copy.deepcopy(build("llama"))
    other = copy.deepcopy(model.model.rotary_emb)
    other.inv_freq *= 0.3
    model.model._modules = {"encoder": nn.Sequential(other), **model.model._modules}
    sites = find_sites(model)
    assert next(module for module in sites.decoder.modules() if type(module) is type(other)) is other
    keys = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(4)[None, None]
    want = rope_of(*find_first(build("llama"))).unrotate(keys, positions)
    assert torch.equal(rope_of(sites.decoder, sites.layers[0]).unrotate(keys, positions), want)


@pytest.mark.parametrize("saved", [False, True])
def test_a_padded_prompt_without_positions_goes_on_as_it_was_counted(saved: bool, tmp_path: Path) -> None:
    """transformers counts the padding of a prompt that is given none, and then goes on without it in `generate`."""
    model = build("llama")
    ids, mask = make_batch([7, 12], [12, 2])
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    how |= {"return_dict_in_generate": True, "output_logits": True}

    def prompted(**given: Tensor) -> PolicyCache:
        cache = PolicyCache(model)
        model(ids[:, :12], attention_mask=mask[:, :12], cache=cache, **given)
        if not saved:
            return cache
        cache.save(tmp_path / "cache.safetensors")
        return PolicyCache.load(model, tmp_path / "cache.safetensors")

    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        want = model.generate(ids, attention_mask=mask, **how)
        for cache in (prompted(), prompted(position_ids=places[:, :12])):
            got = model.generate(ids, attention_mask=mask, cache=cache, **how)
            assert torch.equal(got.sequences, want.sequences)
            torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=1e-5, rtol=0)
        cache.reset()
        assert not cache.counts_columns

        rows = handle.rows(2, 20)
        with refused("must not count padding, got a cache whose padded prompt was given none"):
            rows.put(0, prompted().fork([0]))
        rows.put(1, prompted().fork([1]))  # it has no padding
        right = prompted(position_ids=places[:, :12])
        rows.put(0, right.fork([0]))
        step = model(ids[:, 12:13], attention_mask=mask[:, :13], position_ids=places[:, 12:13], cache=right).logits
        torch.testing.assert_close(model(ids[:, 12:13], cache=rows).logits, step, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_go_on_as_the_model_counts_them(family: str) -> None:
    """GPT-2 counts columns, and OPT its tokens by the mask."""
    model = build(family)
    ids, mask = make_batch([7, 12], [12, 2])
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        caches = [PolicyCache(model), PolicyCache(model)]
        for cache in caches:
            model(ids[:, :12], attention_mask=mask[:, :12], cache=cache)
        with refused("must not count padding, got a cache whose padded prompt was given none"):
            handle.rows(2, 20).put(0, caches[0].fork([0]))
        how |= {"return_dict_in_generate": True, "output_logits": True}
        got = model.generate(ids, attention_mask=mask, cache=caches[0], **how)
        mask = nn.functional.pad(mask, (0, 2), value=1)
        want = model(got.sequences[:, 12:-1], attention_mask=mask, cache=caches[1]).logits[:, 1:]
    torch.testing.assert_close(torch.stack(got.logits, 1), want, atol=1e-5, rtol=0)

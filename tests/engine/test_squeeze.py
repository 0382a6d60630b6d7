"""SqueezeAttention online and with a profile: what is measured, and what follows from it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.calibration.layer_profile import profile
from tests.conformance.access import kept_positions
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import SELECTORS, words
from tests.reference import allocators
from tests.reference.allocators.squeeze import squeeze
from tests.sampling import product

LENGTHS = [40, 26, 13]
BEHIND = {
    "gemma2": "post_attention_layernorm",
    "gemma3": "post_attention_layernorm",
    "gemma3_pictures": "post_attention_layernorm",
    "gemma4": "post_attention_layernorm",
    "gemma4_shared": "post_attention_layernorm",
    "afmoe": "post_attention_layernorm",
    "exaone4": "post_attention_layernorm",
    "hyperclovax": "post_norm1",
    "olmo2": "post_attention_layernorm",
    "glm4": "post_self_attn_layernorm",
}
"""Norms between attention and the residual stream."""

SCALES = {"granite": 0.3, "falcon_h1": 0.5, "minicpm3": 1.4 / 3**0.5}
"""Factors of attention's output where it is added."""


class Residuals:
    """The residual stream before and after every attention, by hooks that know each family's block by heart."""

    def __init__(self, model: nn.Module, family: str) -> None:
        self.cosines: dict[int, Tensor] = {}
        self._held: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int) and type(module).__name__.endswith("Attention"):
                block = model.get_submodule(name.rpartition(".")[0])
                behind: nn.Module = module
                if family in BEHIND:
                    behind = block.get_submodule(BEHIND[family])
                self._follow(index, block, behind, SCALES.get(family, 1.0))

    def _follow(self, index: int, block: nn.Module, behind: nn.Module, scale: float) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._held[index] = args[0] if args else kwargs["hidden_states"]

        def after(_: nn.Module, args: Any, out: Any) -> None:
            update = (out[0] if isinstance(out, tuple) else out).double() * scale
            x = self._held[index].double()
            self.cosines[index] = F.cosine_similarity(x, x + update, dim=-1)

        self._hooks += [block.register_forward_pre_hook(before, with_kwargs=True), behind.register_forward_hook(after)]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *UNNAMED) if name != "gemma3n"])
def test_cosine_of_the_residual_stream(family: str) -> None:
    """Before the norms and after the add, fp32, mean over the row's own tokens; in parallel blocks, too.

    Gemma 3n has several streams: see `test_hidden_states_of_several_streams`.
    """
    model = build(family)
    ids, mask = make_batch(LENGTHS, [40])
    direct = Residuals(model, family)
    talk(model, ids, mask, [40], None)
    direct.close()
    cache = talked(model, "squeeze+window@0.5", LENGTHS, [40])
    for place, layer in enumerate(cache.policy_layers):
        cosine = direct.cosines[layer.layer_idx]
        want = torch.stack([row[flags].mean() for row, flags in zip(cosine, mask.bool(), strict=True)])
        assert torch.allclose(cache.cosines()[:, place].double(), want, atol=1e-5)


def silence(block: Any) -> None:
    """Let a block of BERT's kind add its attention to the residual stream and nothing else."""
    for part in (block.attention.output, block.output):
        if part.forward.__func__.__code__.co_names.count("LayerNorm"):  # the others have it before attention
            part.LayerNorm = nn.Identity()
    nn.init.zeros_(block.output.dense.weight)
    nn.init.zeros_(block.output.dense.bias)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "RobertaPreLayerNorm", "XLMRobertaXL", "RoCBert"])
def test_the_projection_may_stand_around_the_attention(kind: str) -> None:
    """As in BERT and its kin: the metric is that of blocks whose feed-forward part is silenced."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
    config: Any = getattr(transformers, f"{kind}Config")(num_hidden_layers=3, is_decoder=True, **sizes)
    model = getattr(transformers, "BertLMHeadModel" if kind == "Bert" else f"{kind}ForCausalLM")(config).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window@0.5") as handle:
        model(ids)
    assert handle.cache is not None
    for place in range(3):
        silenced = copy.deepcopy(model)
        (block,) = (module for name, module in silenced.named_modules() if name.endswith(f"encoder.layer.{place}"))
        silence(block)
        seen: list[Tensor] = []
        block.register_forward_hook(
            lambda _, args, out, seen=seen: seen.extend((args[0], out[0] if isinstance(out, tuple) else out))
        )
        with torch.no_grad():
            silenced(ids, use_cache=False)
        want = F.cosine_similarity(seen[0], seen[1], dim=-1).mean()
        assert abs(handle.cache.cosines()[0, place] - want) < 1e-5


def test_hidden_states_of_several_streams() -> None:
    """Gemma-3n's attention reads and changes one of them."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    more: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "sliding_window": 8,
        "num_kv_shared_layers": 0,
    }
    sizes: dict[str, Any] = {"vocab_size": 48, "vocab_size_per_layer_input": 48, "hidden_size": 32, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    streams: dict[str, Any] = {"altup_num_inputs": 3, "laurel_rank": 4, "hidden_size_per_layer_input": 4}
    config = transformers.Gemma3nTextConfig(**more, **sizes, **heads, **streams)
    model: Any = transformers.Gemma3nForCausalLM(config).eval()
    found: dict[int, list[Tensor]] = {}
    for index, block in enumerate(model.model.layers):
        seen = found[index] = []
        block.input_layernorm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        block.pre_feedforward_layernorm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
    ids = torch.randint(3, 48, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window@0.5") as handle:
        model(ids)
    assert handle.cache is not None
    want = [F.cosine_similarity(*found[index], dim=-1).mean(-1) for index in (1, 3)]
    assert torch.allclose(handle.cache.cosines(), torch.stack(want, 1), atol=1e-5)


def test_norms_that_transformers_knows() -> None:
    """A norm between attention and the residual add is one that `attention_output` or `next_norm` finds."""
    blocks = re.compile(r"^class (\w*Layer)\(.*\n((?:(?!class |def |@).*\n)*)", re.MULTILINE)
    found = dict[str, set[str]]()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for name, body in blocks.findall(path.read_text(encoding="utf-8")):
            behind = re.search(r"\.self_attn\(([^+]*?)residual \+", body)
            norms = re.findall(r"hidden_states = self\.(\w*norm\w*)\(hidden_states\)", behind[1] if behind else "")
            for norm in norms:
                found.setdefault(norm, set()).add(name)
    assert found.pop("input_layernorm") == {"Molmo2DecoderLayer", "ChameleonSwinDecoderLayer"}
    names = {"post_attention_layernorm", "post_self_attn_layernorm", "post_norm1", "post_operator_norm"}
    assert found.keys() == names


def deep() -> Any:
    """Eight layers whose attention matters more or less."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=48,
    )
    model: Any = LlamaForCausalLM(config).eval()
    for layer, gain in zip(model.model.layers, [40.0, 1, 20, 1, 0.5, 30, 1, 10], strict=True):
        nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02 * gain)
    return model


def talked(model: Any, policy: str, lengths: list[int], turns: list[int]) -> PolicyCache:
    """A cache after a conversation."""
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        talk(model, *make_batch(lengths, turns), turns, cache)
    return cache


@pytest.mark.parametrize("budget", ["0.25", "0.5", "16"])
def test_budgets_are_each_rows_own_and_conserve_the_sum(budget: str) -> None:
    cache = talked(deep(), f"squeeze+h2o@{budget}", LENGTHS, [40])
    got = torch.stack([layer.budget for layer in cache.policy_layers], 1).tolist()
    for row, cosines, length in zip(got, cache.cosines().tolist(), LENGTHS, strict=True):
        share: Any = float(budget) if "." in budget else int(budget)
        total = 8 * allocators.base_budget(share, length)
        assert row == squeeze(cosines, total, 1, length)
        assert sum(row) == total
    assert len({tuple(row[i] * 100 // sum(row) for i in range(8)) for row in got}) > 1, "rows were given one plan"


def test_each_layer_keeps_its_own_share() -> None:
    cache = talked(deep(), "squeeze:keep_share=0.2+window@0.5", [40], [40])
    budgets = [int(layer.budget) for layer in cache.policy_layers]
    for layer, budget in zip(cache.policy_layers, budgets, strict=True):
        assert kept_positions(layer) == [[list(range(40 - budget, 40))] * 2]
        assert layer.positions.shape[-1] == budget
    assert max(budgets) > 2 * min(budgets)


@product("selector", SELECTORS, sample=[(name,) for name in ("window", "snapkv", "kvzip", "h2o")])
def test_a_profile_gives_the_same_as_measuring(selector: str, tmp_path: Path) -> None:
    model = deep()
    path = tmp_path / "profile.json"
    ids, mask = make_batch([40], [40, 1, 1, 6, 1])
    recorded = profile(model, [ids[:, :40]], path)
    with kvpolicy.attach(model, words("squeeze", selector)):
        online = PolicyCache(model)
        want = talk(model, ids, mask, [40, 1, 1, 6, 1], online)
    assert recorded == pytest.approx(online.cosines()[0].tolist(), abs=1e-6)
    with kvpolicy.attach(model, words("squeeze", selector).replace("squeeze", f"squeeze:profile={path}")):
        stored = PolicyCache(model)
        got = talk(model, ids, mask, [40, 1, 1, 6, 1], stored)
    assert torch.allclose(got, want, atol=1e-5)
    assert [kept_positions(a) for a in stored.policy_layers] == [kept_positions(b) for b in online.policy_layers]


def test_a_profile_compresses_at_once(tmp_path: Path) -> None:
    """A layer is done before the next one begins."""
    model = deep()
    path = tmp_path / "profile.json"
    ids, mask = make_batch([40], [40])
    profile(model, [ids], path)
    with kvpolicy.attach(model, f"squeeze:profile={path}+window@0.5"):
        cache = PolicyCache(model)
        done = list[list[bool]]()
        hooks = [
            layer.register_forward_hook(lambda *_: done.append([bool(s.layout.slots) for s in cache.policy_layers]))
            for layer in model.model.layers
        ]
        talk(model, ids, mask, [40], cache)
        for hook in hooks:
            hook.remove()
    assert done == [[i <= at for i in range(8)] for at in range(8)]


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile(build("llama"), [make_batch([20], [20])[0]], path)
    with (
        pytest.raises(ValueError, match="must be of a model with 8 layers, got 3"),
        kvpolicy.attach(deep(), f"squeeze:profile={path}+window@0.5") as handle,
    ):
        talk(deep(), *make_batch([20], [20]), [20], None)
        model = handle._model
        talk(model, *make_batch([20], [20]), [20], PolicyCache(model))


def test_measured_once_per_conversation() -> None:
    """Budgets of a continuation follow the prompt's measures; a chunked prompt is measured in its first chunk."""
    model = deep()
    ids, mask = make_batch(LENGTHS, [40, 1, 9])
    with kvpolicy.attach(model, "squeeze+h2o@0.5"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 40, cache)
        cosines = cache.cosines().clone()
        forward(model, ids, mask, 40, 41, cache)
        forward(model, ids, mask, 41, 50, cache)
    assert torch.equal(cache.cosines(), cosines)
    totals = torch.stack([layer.budget for layer in cache.policy_layers]).sum(0)
    assert totals.tolist() == [8 * ((length + 10) // 2) for length in LENGTHS]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_too_few_layers_share_evenly(family: str) -> None:
    """Groups need three layers; gemma2's sliding layers are not counted."""
    cache = talked(build(family), "squeeze:groups=4+window@0.5", [20], [20])
    assert [int(layer.budget) for layer in cache.policy_layers] == [10] * 3


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_rows_that_begin_in_a_later_chunk_are_measured_then(family: str) -> None:
    """One row has padding alone in the first chunk, so that measured and held cosines meet in the second."""
    model = build(family)
    turns = [12, 14, 1, 1]
    ids, mask = make_batch([12, 12], turns)
    mask[1, :12] = 0
    with kvpolicy.attach(model, "squeeze+window@0.5"):
        cache = PolicyCache(model, new=4)
        talk(model, ids, mask, turns, cache)
        assert cache.plan is not None and cache.plan.measured
        managed = {layer.layer_idx for layer in cache.policy_layers}
        assert 0 not in managed, "the first layer of these models is a sliding window"

"""The inputs and dtypes that `load` accepts, and those that it rejects before it reads a weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvpolicy_deepspeed
from kvpolicy import KVPolicyError, Policy
from kvpolicy.hf.weights import check_shardable
from kvpolicy.planning.curves import save_curves, save_layers
from kvpolicy_deepspeed import checks
from kvpolicy_deepspeed.checkpoint import INDEX, Checkpoint
from kvpolicy_deepspeed.checks import check_dtype, check_policy
from tests.deepspeed.checkpoints import compare, make, save
from tests.parallel.ranks import run_ranks
from tests.planning.test_tuned import draw_curves

NAME = "acme/tiny"


def _on_the_hub(folder: str, cache: Path) -> None:
    """Copy a checkpoint to where huggingface_hub would download it."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / "0000")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0000")


def _without(folder: str, key: str, to: Path) -> str:
    """A copy of a checkpoint without one tensor."""
    shutil.copytree(folder, to)
    file = to / json.loads((to / INDEX).read_text())["weight_map"][key]
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file)
    return str(to)


def _other_ways(rank: int, world: int, folders: dict[str, str], hub_cache: str) -> dict[str, Any]:
    from kvpolicy.hf.discovery import find_sites, sample_weights
    from kvpolicy.parallel.runtime import sharing_of

    load = kvpolicy_deepspeed.load
    found = dict[str, Any]()
    for name in ("four experts", "tied"):
        found[f"in memory, {name}"] = compare(folders[name], load(make(name)))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", hub_cache)  # the environment is read at import only
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        found["from the hub"] = compare(folders["tied"], load(NAME))[0]
    found["single file"] = compare(folders["tied"], load(folders["single"]))[0]
    tied = load(folders["tied"])
    tied.tie_weights()  # as lm-eval does
    found["tied again"] = compare(folders["tied"], tied)[0]
    for backend in ("deepspeed", "hf"):
        model = load(folders["four experts"], backend=backend, dtype="bfloat16")
        whole = transformers.AutoModelForCausalLM.from_pretrained(folders["four experts"], dtype=torch.bfloat16).eval()
        ids = torch.arange(3, 35)[None]
        found[f"bf16, {backend}"] = float((model(ids).logits - whole(ids).logits).float().abs().mean())
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.model.rotary_emb.inv_freq.equal(whole.model.rotary_emb.inv_freq)
        sharing = sharing_of(model)
        assert sharing and sharing.weights is not None and sharing.replicas == 1
        assert sharing.weights.equal(sample_weights(find_sites(whole).layers[0]))  # pyright: ignore[reportArgumentType]
    sharing = sharing_of(load(folders["one head"], policy="h2o@0.5"))
    assert sharing and sharing.replicas == world
    with pytest.raises(
        ValueError, match=r"every tensor of the model, got one that lacks 1, such as model\.layers\.1\.mlp\.up_proj"
    ):
        load(folders["lacking"])
    with pytest.raises(ValueError, match=r"must be complete and in safetensors, got one without model\.safetensors"):
        load(folders["pickled"])
    return found


def test_other_ways_to_load_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folders = {name: save(name, tmp_path) for name in ("four experts", "tied", "one head")}
    assert any(".block_sparse_moe.experts.3.w2" in key for key, _ in Checkpoint.find(folders["four experts"]).pieces())
    folders["single"] = str(tmp_path / "single")
    make("tied").save_pretrained(folders["single"])
    transformers.GenerationConfig.from_pretrained(folders["tied"]).save_pretrained(folders["single"])
    assert (Path(folders["single"]) / "model.safetensors").exists()
    folders["lacking"] = _without(folders["tied"], "model.layers.1.mlp.up_proj.weight", tmp_path / "lacking")
    folders["pickled"] = str(tmp_path / "pickled")
    make("tied").config.save_pretrained(folders["pickled"])
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    _on_the_hub(folders["tied"], tmp_path / "cache")
    for found in run_ranks(_other_ways, 2, folders, str(tmp_path / "cache")):
        assert all(far <= 5e-6 for name, far in found.items() if "bf16" not in name), found
        assert all(far <= 0.02 for far in found.values()), str(found)  # on average: an expert may be another one


def test_one_rank_loads_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only rank is this process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        folder = save("llama", tmp_path)
        assert compare(folder, kvpolicy_deepspeed.load(folder, backend="hf"))[0] == 0.0
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a launcher; errors are raised before a process group is needed."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "find_spec", lambda name: name)  # as if DeepSpeed were installed


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "megatron"}, 'backend must be "deepspeed" or "hf", got \'megatron\''),
        ({"policy": "snapvk"}, "snapkv"),
        ({"policy": "h2o@0"}, "budget"),
        ({"dtype": torch.float64}, "dtype must be float32, bfloat16 or float16 with DeepSpeed, got torch.float64"),
        ({"dtype": "float12"}, "dtype must be a torch.dtype or its name, got 'float12'"),
    ],
)
def test_arguments_are_checked_before_weights_are_read(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        kvpolicy_deepspeed.load(tmp_path, **options)


@pytest.mark.usefixtures("launched")
def test_a_missing_deepspeed_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "kvpolicy\[deepspeed\]", or use backend="hf"'):
        kvpolicy_deepspeed.load("nowhere")


@pytest.mark.usefixtures("launched")
def test_only_deepspeed_shards_a_model_in_memory() -> None:
    with pytest.raises(ValueError, match='got a model in memory; try its folder, or backend="deepspeed"'):
        kvpolicy_deepspeed.load(make("llama"), backend="hf")
    with torch.device("meta"), pytest.raises(ValueError, match="must have weights, got one on the meta device"):
        kvpolicy_deepspeed.load(make("llama"))


def test_families_that_are_not_tested_are_rejected() -> None:
    llama = transformers.LlamaConfig
    many = [transformers.Gemma2Config(), transformers.GPT2Config(), llama(num_key_value_heads=1, num_attention_heads=1)]
    native = [transformers.GPT2Config(), transformers.OPTConfig(), llama(num_key_value_heads=1)]
    for backend, configs in {"deepspeed": many, "hf": native}.items():
        for config in configs:
            with pytest.raises(ValueError, match=r"try|no other backend|must be at most"):
                check_shardable(config, backend, 2)
    falcon = transformers.FalconConfig(num_attention_heads=71, multi_query=True, alibi=False, hidden_size=71 * 64)
    with pytest.raises(ValueError, match="must divide the 71 query heads"):
        check_shardable(falcon, "deepspeed", 2)
    quantized: Any = llama()
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ValueError, match="must not be quantized"):
        check_shardable(quantized, "deepspeed", 2)
    assert check_dtype("bfloat16", "deepspeed") is torch.bfloat16 and check_dtype("auto", "hf") is None


BY_LAYER = transformers.LlamaConfig(
    num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=9
)


def _check(policy: str | Policy, dtype: torch.dtype | None = None, tp: int = 1) -> None:
    check_policy(BY_LAYER, policy, dtype, tp, follows_plan=False)


def test_a_policy_by_layer_is_checked(tmp_path: Path) -> None:
    save_layers(tmp_path / "layers.json", ["h2o@0.5"] * 3)
    _check(f"tuned:file={tmp_path}/layers.json@0.5")
    _check(Policy.by_layer(["h2o@0.5", "kivi:bits=4+h2o@0.5", "h2o@0.5"], budget=0.5))
    with pytest.raises(KVPolicyError, match="one for each of the model's 3 layers, got 2"):
        _check(Policy.by_layer(["h2o@0.5"] * 2, budget=0.5))
    with pytest.raises(KVPolicyError, match="must be readable"):
        _check(f"tuned:file={tmp_path}/none.json")


def test_a_policy_by_layer_has_the_bytes_of_a_rank(tmp_path: Path) -> None:
    save_curves(tmp_path / "curves.json", draw_curves(1))
    spec = f"tuned:file={tmp_path}/curves.json@2500B"
    _check(spec, torch.float32, 2)
    _check(spec, torch.bfloat16)
    with pytest.raises(KVPolicyError, match="must fit a text of 60 and 8 tokens, got 2500 bytes"):
        _check(spec, torch.float32)

"""A saved cache as plain tensors is what its layers hold, and what no plain tensors can stand for is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_file import CacheFile, read
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.dense_cache import check_dense, dense_layers, moved, skeleton
from tests.conformance.models import build
from tests.conformance.policies import CODECS, words
from tests.sampling import each_once, product
from tests.vllm.models import Saved, held, make_model, make_text, save

POLICIES = [
    "keydiff:decode=grow@0.5",
    "h2o@0.5",
    "snapkv:decode=grow+tokenwise:residual_length=4@0.5",
    words("h2o", "kivi"),
    words("h2o", "turboquant"),
]


def dense(path: Path, model: Any, **options: Any) -> list[Any]:
    return [*dense_layers(read(path), skeleton(model.config), "doc", **options)]


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_hold_what_those_of_a_cache_do(policy: str, tmp_path: Path) -> None:
    model = build("llama")
    ids = torch.randint(3, 48, (1, 45), generator=torch.Generator().manual_seed(0))
    path = save(model, policy, ids[0].tolist(), tmp_path / "doc.safetensors")
    rotations = skeleton(model.config).rotations
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = PolicyCache.load(model, path)
    apart = dense(path, model, move=False)
    ready = dense(path, model)
    assert [each.layer_idx for each in ready] == [*range(len(cache.layers))]
    for layer, one, other in zip(cache.policy_layers, apart, ready, strict=True):
        keys, values, _ = held(layer)
        assert torch.equal(one.keys, keys) and torch.equal(one.values, values) and torch.equal(other.values, values)
        assert torch.equal(other.keys, moved(keys, 45 - keys.shape[1], rotations[one.layer_idx]))


PARTS = [*([codec] for codec in CODECS), ["d2o"], ["regress"], ["regress", "kivi"]]
ROTARY = ["llama", "stablelm"]


@product("family,parts", ROTARY, PARTS, sample=each_once(ROTARY, PARTS))
def test_attention_to_moved_keys_is_that_of_the_cache(family: str, parts: list[str], tmp_path: Path) -> None:
    """Whatever holds the tokens: the first step behind the text sees the same, at the position of an engine."""
    model = build(family)
    policy = words("h2o:decode=grow", *parts)
    path = save(model, policy, make_text(model, 45), tmp_path / "doc.safetensors")
    token = torch.tensor([[7]])
    with torch.no_grad():
        with kvpolicy.attach(model, policy):
            wanted = model(token, cache=PolicyCache.load(model, path)).logits
        plain: Any = transformers.DynamicCache([(each.keys[None], each.values[None]) for each in dense(path, model)])
        at = torch.tensor([[plain.get_seq_length()]])
        assert at < 45
        found = model(token, position_ids=at, **cache_argument(model, plain)).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def header_of(saved: Saved, **fields: Any) -> dict[str, Any]:
    return read(saved.path).header | fields


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks": {"rank": 1, "size": 2}}, "must be of one process, got rank 2 of 2; try saving it without tensor"),
    ({"rows": 3}, "must have one row, got 3; try saving one text"),
    ({"windows": {"0": 5}}, "got layers with a sliding window, which an engine masks by slots; serve it with"),
    ({"held": None}, "must say how many tokens it holds, got one of an earlier version; save it again"),
    ({"held": {"0": [3, 3], "1": [3, 5]}}, "equally many tokens in all layers and heads, got 3 to 5 under keydiff"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_headers_that_are_refused(saved: Saved, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        check_dense(header_of(saved, **fields), "doc")
    assert check_dense(header_of(saved), "doc") == 35


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "uniform/adakv+snapkv:window=6:kernel=3@0.5",
            "equally many tokens in all layers and heads, got .* try uni",
        ),
        ("h2o+quest:read=6:page=2:dense=0:resort=3@0.8", "must be read whole in a step, got the reader quest"),
        (
            words("h2o", "merge", "plain"),
            "must have one token in each slot, got merged ones",
        ),
    ],
)
def test_policies_that_are_refused(policy: str, message: str, tmp_path: Path) -> None:
    model = build("llama")
    ids = torch.randint(3, 48, (45,), generator=torch.Generator().manual_seed(0)).tolist()
    with pytest.raises(KVPolicyError, match=message):
        dense(save(model, policy, ids, tmp_path / "doc.safetensors"), model)


@pytest.mark.parametrize(
    ("rows", "padding", "message"),
    [(1, 7, "must be without padding, got 30 columns of 23 tokens"), (2, 0, "must have one row, got 2")],
)
def test_padding_and_several_rows_are_refused(rows: int, padding: int, message: str, tmp_path: Path) -> None:
    model = build("llama")
    ids = torch.randint(3, 48, (rows, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with torch.no_grad(), kvpolicy.attach(model, "h2o:decode=grow@0.5"):
        cache = PolicyCache(model)
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        model(ids, attention_mask=mask, position_ids=places, cache=cache)
        cache.save(tmp_path / "doc.safetensors", tokens=ids)
    with pytest.raises(KVPolicyError, match=message):
        dense(tmp_path / "doc.safetensors", model)


def test_a_header_that_says_another_number_is_refused(saved: Saved) -> None:
    header, tensors = read(saved.path)
    wrong = header | {"held": {name: [34, 34] for name in header["held"]}}
    with pytest.raises(KVPolicyError, match="must hold the 34 tokens of its header in every head, got others"):
        list(dense_layers(CacheFile(wrong, tensors), saved.engine.skeleton, "doc"))


def test_a_skeleton_has_no_weights() -> None:
    model = make_model("qwen2")
    found = skeleton(model.config)
    assert all(each.is_meta for each in found.sites.decoder.parameters())
    assert found.first_weight == "model.layers.0.self_attn.q_proj.weight"
    assert found.first_weight in dict(model.named_parameters())

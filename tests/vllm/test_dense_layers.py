"""A saved cache as plain tensors is what its layers hold, and what no plain tensors can stand for is refused.

Its keys are moved, so that they meet every later query at the distance of the whole text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.cache_file import CacheFile, read
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.dense_cache import check_dense, dense_layers, moved, skeleton
from tests.conformance.models import build
from tests.conformance.policies import CODECS, words
from tests.sampling import each_once, product
from tests.vllm.models import LLAMA3, ROPE, SIZES, YARN, Saved, make_model, make_text, save


def dense(path: Path, model: Any) -> list[Any]:
    return [*dense_layers(read(path), skeleton(model.config), "doc")]


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
    with pytest.raises(KVPolicyError, match=message):
        dense(save(model, policy, make_text(model, 45), tmp_path / "doc.safetensors"), model)


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


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("LlamaConfig", {"rope_parameters": ROPE}),
    "linear": ("LlamaConfig", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "interleaved": ("CohereConfig", {"rope_parameters": ROPE}),
    "partial": ("StableLmConfig", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "partial, interleaved": ("GlmConfig", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 32}),
}
HEADS = 2
TOKENS = 11
QUERIES = 5
TOTAL = 700


def rope_of(kind: str) -> tuple[Any, int]:
    name, fields = KINDS[kind]
    config = getattr(transformers, name)(**(SIZES | {"hidden_size": 128} | fields))
    return skeleton(config).rotations[1], 32


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@product("kind,kept", [*KINDS], [TOKENS, 350, TOTAL], sample=each_once([*KINDS], [TOKENS, 350, TOTAL]))
def test_scores_are_those_of_the_whole_text(kind: str, kept: int) -> None:
    """Of queries at engine positions, behind as many slots as are kept; some keys then stand in front of zero."""
    rope, dim = rope_of(kind)
    keys = draw(1, HEADS, TOKENS, dim)
    queries = draw(1, HEADS, QUERIES, dim)
    at = torch.randint(0, TOTAL, (1, HEADS, TOKENS), generator=torch.Generator().manual_seed(0))
    at[..., 0] = 0
    stored = rope.rotate(keys, at)
    steps = torch.arange(QUERIES).expand(1, HEADS, -1)
    wanted = rope.rotate(queries, TOTAL + steps) @ stored.mT
    found = rope.rotate(queries, kept + steps) @ moved(stored[0], TOTAL - kept, rope)[None].mT
    torch.testing.assert_close(found, wanted, atol=3e-3, rtol=1e-4)
    torch.testing.assert_close(moved(stored[0], TOTAL - kept, rope).norm(dim=-1), stored[0].norm(dim=-1))


def test_half_precision_is_rounded_once() -> None:
    rope, dim = rope_of("llama3")
    keys = draw(HEADS, TOKENS, dim).bfloat16()
    found = moved(keys, 33, rope)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, moved(keys.float(), 33, rope).bfloat16())

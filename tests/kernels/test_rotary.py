"""Rule 9: rotary embeddings are undone exactly, with the model's own functions."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.rotary_lookup import _ROTATES, _of_text, rope_of
from kvpolicy.kernels.products import rotate_halves
from kvpolicy.kernels.rotary import Rope, SlotRotary, rope_offset
from tests.conformance.models import FAMILIES, LATENT, UNNAMED, VOCABULARY, build
from tests.conformance.play import make_batch

LENGTH = 17


def scaled(kind: str) -> Any:
    """A Llama whose rotary embedding is of another kind."""
    torch.manual_seed(0)
    more = {"yarn": {"original_max_position_embeddings": 64}, "linear": {}, "dynamic": {}}[kind]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=48,
        max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more},
    )
    return LlamaForCausalLM(config).eval()


def keys_before_and_after(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Rope]]:
    """Of each layer: its keys before the rotary embedding, in the cache, and the embedding."""
    sites = find_sites(model)
    before = dict[int, Tensor]()
    running = list[int]()
    module = sys.modules[type(sites.layers[0].attention).__module__]
    real = getattr(module, "apply_rotary_pos_emb", None)
    if real is not None:

        def spy(*args: Any, **kwargs: Any) -> Any:
            own = args[0].transpose(1, 2) if "unsqueeze_dim" in kwargs else args[1]  # Gemma-4 rotates keys alone
            before[running[-1]] = own.detach().clone()
            return real(*args, **kwargs)

        monkeypatch.setattr(module, "apply_rotary_pos_emb", spy)
    note: Any = lambda attention, _: running.append(attention.layer_idx)  # noqa: E731
    hooks = [site.attention.register_forward_pre_hook(note) for site in sites.layers]
    cache = DynamicCache(config=model.config)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, **cache_argument(model, cache))
    monkeypatch.undo()
    for hook in hooks:
        hook.remove()
    layers: Any = cache.layers
    # Layers that read the keys of others have none; caches of transformers 5.18 have no place for the last ones.
    own = [site for site in sites.layers if site.layer_idx < len(layers) and layers[site.layer_idx].keys is not None]
    ropes = [rope_of(sites.decoder, site) for site in own]
    after: dict[int, Tensor] = {site.layer_idx: layers[site.layer_idx].keys for site in own}
    pairs = [(before.get(index, keys), keys) for index, keys in after.items()]
    return [(b[:, :, -a.shape[2] :], a, rope) for (b, a), rope in zip(pairs, ropes, strict=True)]


def places(keys: Tensor) -> Tensor:
    """Positions of cached keys: a sliding layer has the newest alone."""
    batch, heads, count, _ = keys.shape
    return torch.arange(LENGTH - count, LENGTH).expand(batch, heads, -1)


def check_one_pass(before: Tensor, after: Tensor, rope: Rope) -> bool:
    """One pass over keys rotates as the model, where frequencies are constant; whether there are such."""
    frequencies = rope.frequencies(after.shape[-1])
    if frequencies is not None:
        rotated = rotate_halves(before, places(after), frequencies) * rope.scaling
        assert torch.allclose(rotated, after, atol=2e-6)
    return frequencies is not None


def check_lengths(before: Tensor, after: Tensor, rope: Rope, family: str) -> None:
    """Lengths in planes are the same at every position."""
    wide = torch.nn.functional.pad(before, (0, after.shape[-1] - before.shape[-1]))
    lengths = rope.pair_lengths(after)
    assert torch.allclose(lengths, rope.pair_lengths(wide) * rope.scaling, atol=2e-6)
    planes = rope._planes(after.shape[-1], after.device)
    assert planes.numel() == planes.unique().numel() and (planes.numel() > 0) == rope.rotates
    assert lengths.shape[-1] == rope._angles or "gemma4" in family or not rope.rotates  # of frequency 0
    alone = [channel for channel in range(before.shape[-1]) if channel not in planes]
    assert torch.allclose(before[..., alone], after[..., alone]), "what is in no plane is not rotated"


ROTATED = [name for name in (*FAMILIES, *UNNAMED) if name not in LATENT]


@pytest.mark.parametrize("family", [*ROTATED, "yarn", "linear"])
def test_keys_are_rotated_and_undone_as_the_model_rotates(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full and partial, by halves and by pairs, scaled and not; and none where there is none."""
    model = scaled(family) if family in ("yarn", "linear") else build(family)
    found: list[bool] = []
    for before, after, rope in keys_before_and_after(model, monkeypatch):
        undone = rope.unrotate(after, places(after))
        assert torch.allclose(undone[..., : before.shape[-1]], before, atol=2e-6)
        assert torch.allclose(rope.rotate(undone, places(after)), after, atol=2e-6)
        check_lengths(before, after, rope, family)
        found.append(check_one_pass(before, after, rope))
        assert rope.scaling > 1.1 or family != "yarn", "else nothing would show that it is divided by"
    expected = {"llama": True, "qwen3": True, "yarn": True, "linear": True, "opt": False, "gpt_neox": False}
    assert all(each == expected.get(family, each) for each in found)


@pytest.mark.parametrize("kind", ["exaone_moe", "cohere2_moe", "kolibri1", "beam"])
def test_layers_without_an_embedding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are as the projection made them, and nothing is undone; each family has a condition of its own."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    make: Any = CONFIG_MAPPING[kind]
    kinds = ["sliding_attention", "full_attention"] * 2
    rope = {"rope_type": "default", "rope_theta": 1e4}
    more = {"beam": {"rope_parameters": {"sliding_attention": rope, "full_attention": None}}}
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=12,
        layer_types=kinds,
        moe_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        pad_token_id=0,
        mlp_layer_types=["dense", "sparse"] * 2,
        **more.get(kind, {}),
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, (before, after, rope) in zip(kinds, keys_before_and_after(model, monkeypatch), strict=True):
        assert torch.equal(before, after) == (name == "full_attention")
        assert torch.allclose(rope.unrotate(after, places(after)), before, atol=2e-6)


def test_conditions_that_transformers_knows() -> None:
    pattern = re.compile(r"^class (\w+)|^ +if (self\..*):\n(?:.*\n)? +.*= apply_rotary_pos_emb\(", re.MULTILINE)
    found = dict[str, str]()
    name = ""
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            name = match[1] or name
            if match[2] and match[2] != "self.use_rope":
                found[name] = match[2]
    assert len(found) > 5
    other = {"Zamba2Attention"}  # refused for its state
    # Of speech and of proteins:
    other |= {"MoshiAttention", "KyutaiSpeechToTextAttention", "EvollaSaProtSelfAttention", "EsmSelfAttention"}
    assert found.keys() <= _ROTATES.keys() | other, found


def test_changing_frequencies_are_refused() -> None:
    model = scaled("dynamic")
    sites = find_sites(model)
    with pytest.raises(ValueError, match=r"layer 0 must be undone .*, got LlamaRotaryEmbedding of type dynamic"):
        rope_of(sites.decoder, sites.layers[0])


def test_queries_at_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query moved to a fixed distance scores unrotated keys as it would score keys that far behind."""
    before, after, rope = keys_before_and_after(build("llama"), monkeypatch)[1]
    newest = torch.full((2,), LENGTH - 1)
    turn = SlotRotary(rope, places(after), newest, torch.zeros(2, dtype=torch.int64))
    query = after[:, :, -1:]  # as good a query as any
    far = rope.rotate(before, torch.full_like(places(after), LENGTH - 1 - 5))
    want = (query * far).sum(-1)
    got = (turn.queries(query, 5) * before).sum(-1)
    assert torch.allclose(got, want, atol=1e-5)
    index = torch.tensor([3, 0, 9]).expand(2, after.shape[1], -1)
    some = turn.keys(before.gather(2, index[..., None].expand(-1, -1, -1, before.shape[-1])), index)
    assert torch.allclose(some, after[:, :, [3, 0, 9]], atol=2e-6)
    assert torch.allclose(turn.keys(before[:, :, 2:6], slice(2, 6)), after[:, :, 2:6], atol=2e-6)


def test_offsets_of_rows_with_padding() -> None:
    """What a model adds to the positions of a row is known from its first token on, which may come in any chunk."""
    nothing = torch.zeros(3, dtype=torch.int64)
    first = torch.tensor([[True, True], [False, True], [False, False]])
    known = rope_offset(None, first, 0, nothing, 2, None)
    assert known[:2].tolist() == [0, 1]
    second = torch.tensor([[False, True, True], [True, False, True], [False, True, True]])
    seen = torch.tensor([2, 1, 0])
    at = torch.tensor([[9, 2, 3], [2, 9, 3], [9, 7, 8]])  # of padding, any
    assert rope_offset(at, second, 2, seen, 3, known).tolist() == [0, 1, 7]
    assert rope_offset(None, None, 5, torch.tensor([5, 4, 3]), 1, torch.tensor([0, 1, 2])).tolist() == [0, 1, 2]
    for wrong in (
        [[9, 3, 4], [2, 9, 3], [9, 7, 8]],
        [[9, 2, 3], [3, 9, 4], [9, 7, 8]],  # also of a row with a single token before
        [[9, 2, 3], [2, 9, 3], [9, 7, 9]],
    ):
        with pytest.raises(ValueError, match="positions must go on by one"):
            rope_offset(torch.tensor(wrong), second, 2, seen, 3, known)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("policy", ["kvzip:chunk=9:sinks=2@512", "snapkv+regress:queries=replay@512"])
def test_angles_that_depend_on_the_length_stay_those_of_the_prompt(kind: str, policy: str) -> None:
    """A replay reaches behind the prompt, and its length is neither that of its queries nor of later steps."""
    model: Any = copy.deepcopy(build("llama", layers=2))
    pairs = model.config.head_dim // 2
    scaled = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs, "original_max_position_embeddings": 24}
    more = scaled if kind == "longrope" else {}
    model.config.max_position_embeddings = 24
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    ids = make_batch([20], [20], seed=3)[0]
    settings: Any = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    seen: list[Tensor] = []
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: seen.append(module.inv_freq.clone()))
    stock = copy.deepcopy(model).generate(ids, **settings)
    seen.clear()
    with kvpolicy.attach(model, policy):
        assert torch.equal(model.generate(ids, **settings), stock)
    replayed = len(seen) - 8  # one forward of the prompt, and seven steps
    assert replayed > 0
    assert all(torch.equal(each, seen[0]) for each in seen[: 1 + replayed])
    assert model.model.rotary_emb.rope_type == kind


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("expected@0.5", "for a selector that .*M-RoPE.; try another selector"),
        ("full+rotate", "for a codec that .*M-RoPE.; try a codec that stores rotated keys"),
    ],
)
def test_positions_of_parts_that_differ_are_refused_by_the_part_that_undoes_them(policy: str, message: str) -> None:
    model = build("llama")
    ids, _ = make_batch([9], [9])
    with torch.no_grad(), kvpolicy.attach(model, policy), pytest.raises(kvpolicy.KVPolicyError, match=message):
        model(ids, position_ids=torch.arange(9).expand(3, 1, -1) + torch.arange(3)[:, None, None])


class ThreeParts(nn.Module):
    """The angles of a model for pictures, which takes three parts of each position or, if it `expands` them, one.

    They may depend on the type of a layer (Command A Compass).
    """

    inv_freq: Tensor
    mrope_section = (1, 1, 1)
    attention_scaling = 2.0

    def __init__(self, expands: bool, layer_type: str | None) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01]))
        self.expands = expands
        self.layer_type = layer_type

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        assert layer_type == self.layer_type, "angles of no type of layer are asked for"
        parts = position_ids.expand(3, -1, -1) if self.expands else position_ids[:, :, :]
        angles = torch.stack([parts[part] * self.inv_freq[part] for part in range(3)], -1)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("layer_type", [None, "full_attention"])
@pytest.mark.parametrize("expands", [True, False])
def test_texts_have_the_same_position_in_every_part(expands: bool, layer_type: str | None) -> None:
    tables: Any = _of_text(ThreeParts(expands, layer_type), layer_type)
    given = {"layer_type": layer_type} if layer_type else {}
    cos, _ = tables(torch.zeros(1), torch.tensor([[0, 1, 7]]), **given)
    assert torch.equal(cos, (torch.tensor([[0, 1, 7]])[..., None] * torch.tensor([1.0, 0.1, 0.01])).cos())
    assert tables.attention_scaling == 2.0 and tables.inv_freq.numel() == 3
    assert len([*tables.buffers()]) == 1

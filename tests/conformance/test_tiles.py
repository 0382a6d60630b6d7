"""A prompt in tiles: the same kept tokens as in one piece, for every method and every family, and the same logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import CTRLConfig, CTRLLMHeadModel

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.registry import names
from kvpolicy.testing import check_cache
from tests.conformance.models import FAMILIES, UNNAMED, VOCABULARY, build
from tests.conformance.play import ROWS, TURNS, make_batch, talk
from tests.conformance.policies import ALLOCATORS, CODECS, MERGERS, SELECTORS, words
from tests.sampling import each_once, product

SIZES = [25, 9, 4]
"""Of a prompt of 26 tokens: the first leaves one token over, and so does the second of the turn of 6 behind it."""

TOLERANCE = 2e-4
CODE_TOLERANCE = 0.3
"""Where a number that is rounded to another code changes logits."""

POLICIES = [
    *(words(allocator, "snapkv") for allocator in ALLOCATORS),
    *(words("uniform", selector) for selector in SELECTORS),
    *(words("snapkv", merger) for merger in MERGERS),
    *(words("h2o", codec) for codec in CODECS),
    *(words("snapkv", reader) for reader in names("reader")),
    "uniform/adakv+snapkv:window=4:kernel=3@0.5",
    "squeeze/adakv+h2o+tokenwise:group_size=4:residual_length=4:block_size=4@0.5",
    "uniform/adakv+kvzip:chunk=12@0.5",
    "uniform/adakv+h2o+compensate@0.5",
    "snapkv:window=4:kernel=3+regress:queries=replay:window=5:sinks=1:recent=3@0.5",
    "kvzip:chunk=9:sinks=2+regress:queries=replay:window=5:sinks=1:recent=3@0.5",
    "kvcrush/h2o@0.5",
    "full",
    "tokenwise:group_size=4:residual_length=4:block_size=4",
]


class Outcome(NamedTuple):
    """What a conversation leaves: logits of tokens that are not padding, positions of each layer's heads, in order."""

    logits: Tensor
    positions: list[Tensor]
    nbytes: int
    digest: Tensor | None


def converse(model: Any, policy: str, lengths: list[int], tile: int | None, turns: list[int] = TURNS) -> Outcome:
    ids, mask = make_batch(lengths, turns)
    with kvpolicy.attach(model, policy, tile=tile):
        cache = PolicyCache(model, new=sum(turns[1:]))
        logits = talk(model, ids, mask, turns, cache)
    check_cache(cache)
    positions = [layer.head_positions.sort(-1).values for layer in cache.policy_layers]
    return Outcome(logits[mask.bool()], positions, cache.nbytes, cache.mask_digest)


def compare(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    assert all(torch.equal(*pair) for pair in zip(found.positions, expected.positions, strict=True))
    torch.testing.assert_close(found.logits, expected.logits, atol=tolerance, rtol=tolerance)
    assert found.nbytes == expected.nbytes
    assert found.digest is not None and expected.digest is not None and torch.equal(found.digest, expected.digest)


METHODS = sorted(set(POLICIES))


@product("policy,tile", METHODS, SIZES, sample=each_once(METHODS, SIZES))
def test_every_method_keeps_what_it_keeps_in_one_piece(policy: str, tile: int) -> None:
    layers = None if "squeeze" in policy or "pyramid" in policy else 2
    model = build("llama", layers=layers)
    coded = kvpolicy.Policy.parse(policy).codec.stages
    whole = converse(model, policy, ROWS["padded"], None)
    compare(converse(model, policy, ROWS["padded"], tile), whole, CODE_TOLERANCE if coded else TOLERANCE)


TILED = [*FAMILIES, *UNNAMED]


@product("family,rows,tile", TILED, ["one", "padded"], [9, 25], sample=each_once(TILED, ["one", "padded"], [9, 25]))
def test_every_family(family: str, rows: str, tile: int) -> None:
    model = build(family)
    policy = words("snapkv")
    compare(converse(model, policy, ROWS[rows], tile), converse(model, policy, ROWS[rows], None))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma3n", "gemma4_shared"])
def test_replays_of_models_with_windows(family: str) -> None:
    model = build(family)
    policy = "kvzip:chunk=20@0.5"
    whole = converse(model, policy, ROWS["padded"], None)
    compare(converse(model, policy, ROWS["padded"], 7), whole)


def test_a_tile_that_is_not_shorter_than_the_prompt_is_one_piece() -> None:
    model = build("llama", layers=2)
    whole = converse(model, "h2o@0.5", [26], None)
    found = converse(model, "h2o@0.5", [26], 26)
    assert torch.equal(found.logits, whole.logits)


def test_layers_that_name_their_input_otherwise_are_refused() -> None:
    """As those of CTRL; `auto` takes their prompts in one piece."""
    config = CTRLConfig(vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, dff=32, n_positions=64)
    model = CTRLLMHeadModel(config).eval()
    with pytest.raises(KVPolicyError, match="tile must be None for EncoderLayer, which has no argument hidden_states"):
        kvpolicy.attach(model, "window@0.5", tile=5)
    with kvpolicy.attach(model, "window@0.5", tile="auto") as handle, torch.no_grad():
        model(torch.arange(9)[None])
    assert handle.cache is not None and handle.cache.tile_size is None


def test_routers_that_pass_on_what_they_found_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of ZAYA1: it has an entry for each token."""
    model = build("llama", layers=2)
    kind = type(model.model.layers[0])
    forward = kind.forward

    def routed(self: Any, hidden_states: Any, prev_router_hidden_states: Any = None, **more: Any) -> Any:
        return forward(self, hidden_states, **more)

    monkeypatch.setattr(kind, "forward", routed)
    with pytest.raises(KVPolicyError, match="tile must be None for LlamaDecoderLayer, since routers pass hidden"):
        kvpolicy.attach(model, "window@0.5", tile=8)


def test_layers_that_pass_keys_on_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by kinds of layers, as Gemma 3n and Gemma 4 do."""
    model = build("gemma4")
    monkeypatch.delattr(model.model.layers[0].self_attn, "is_kv_shared_layer")
    with pytest.raises(KVPolicyError, match="tile must be None for Gemma4TextDecoderLayer, since layers pass keys"):
        kvpolicy.attach(model, "window@0.5", tile=8)
    assert not any("forward" in vars(module) for module in model.modules())

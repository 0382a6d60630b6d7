"""Rule 10: what cannot be kept under a policy is refused in one sentence, before anything is changed."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    XGLMConfig,
)

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.hf.forward_calls import check_step
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import make_batch
from tests.conformance.strangers import REFUSED
from tests.engine.test_attach import trace


def small(**fields: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    return LlamaConfig(**(sizes | fields))


def one_sentence(error: BaseException) -> str:
    said = str(error)
    assert said.endswith(".") and ". " not in said and "\n" not in said, said
    return said


WHY = {"mistral_window": "sliding-window", "falcon_alibi": "ALiBi"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*REFUSED])
def test_models(name: str) -> None:
    """A plan says the same, from the config alone: what it counted would be of a cache that nobody can make."""
    model = REFUSED[name]()
    before = trace(model)
    said: list[str] = []
    for call, given in ((kvpolicy.attach, model), (kvpolicy.plan, model), (kvpolicy.plan, model.config)):
        with pytest.raises(ValueError) as error:
            call(given, "window@0.5")
        said.append(one_sentence(error.value))
    assert re.search(r" must (be|have|use|cache|not|take) .*, got ", said[0]) and WHY.get(name, "") in said[0]
    assert said == said[:1] * 3
    assert trace(model) == before


def test_layers_that_read_the_keys_of_earlier_ones() -> None:
    """All of them, as in a drafter that reads another model's; or a layer whose kind has none."""
    config = copy.deepcopy(build("gemma4").config)
    config.num_kv_shared_layers = config.num_hidden_layers
    for call, given in ((kvpolicy.attach, type(build("gemma4"))(config)), (kvpolicy.plan, config)):
        with pytest.raises(kvpolicy.KVPolicyError, match=r"keys of its own, .* got others in gemma4_") as error:
            call(given, "window@0.5")
        one_sentence(error.value)


def test_a_plan_refuses_what_cannot_be_built_small() -> None:
    for config in (GPTNeoConfig(), XGLMConfig(), GPT2Config(add_cross_attention=True)):
        with pytest.raises(ValueError, match=r"stack|interface|not causal self-attention"):
            kvpolicy.plan(config, "window@0.5")


def test_a_plan_refuses_nothing_else() -> None:
    """Nothing is known of a config whose class is none of transformers' own, until a model is attached to."""

    class Own(LlamaConfig):
        model_type = "own"

    for known in (FAMILIES | UNNAMED).values():
        kvpolicy.plan(known(), "window@0.5")
    config = Own(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=9)
    assert kvpolicy.plan(config, "window@0.5", prompt=10).layers[0].tokens == 5


def test_what_is_no_transformers_model() -> None:
    with pytest.raises(ValueError, match="must be a causal language model of transformers, got Linear"):
        kvpolicy.attach(torch.nn.Linear(3, 3), "window")


def test_head_dimension_that_a_codec_cannot_pack() -> None:
    config: Any = small(hidden_size=12, head_dim=6)
    model: Any = LlamaForCausalLM(config)
    before = trace(model)
    for call, given in ((kvpolicy.attach, model), (kvpolicy.plan, config)):
        with pytest.raises(ValueError, match=r"head dimension must be a multiple of 4 .*, got 6"):
            call(given, "window+kivi:bits=2@0.5")
    assert trace(model) == before


def test_full_layers_of_different_sizes() -> None:
    """A config may give each layer its own head dimension."""
    model: Any = LlamaForCausalLM(small(num_hidden_layers=2))
    model.config.per_layer_config = {0: {"head_dim": 4}}
    for call, given in ((kvpolicy.plan, model.config), (kvpolicy.attach, model)):
        with pytest.raises(ValueError, match=r"the same head dimension, .* got \[\(2, 4\), \(2, 8\)\]") as error:
            call(given, "window@0.5")
        one_sentence(error.value)


def test_a_model_that_continuous_batching_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manager sets the attention back when it stops, and detaching would bring back what the manager had set."""
    model = build("llama")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "paged|eager")
    with pytest.raises(kvpolicy.KVPolicyError, match="must not be in use by continuous batching") as error:
        kvpolicy.attach(model, "window")
    one_sentence(error.value)


@pytest.mark.parametrize("how", ["compile", "torch.compile", "one layer", "forward"])
def test_a_compiled_model(how: str) -> None:
    """Hooks registered after compiling would be ignored, silently."""
    model: Any = LlamaForCausalLM(small())
    if how == "compile":
        model.compile(backend="eager")
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif how == "one layer":
        model.model.layers[0].compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="must not be compiled before attaching") as error:
        kvpolicy.attach(model, "window")
    one_sentence(error.value)


@pytest.mark.parametrize(
    ("family", "new", "columns", "said"),
    [
        ("llama", 4, 3, "20 columns for all tokens so far, or 4 for the new ones, got 3"),
        ("llama", 4, 19, "20 columns for all tokens so far, or 4 for the new ones, got 19"),
        ("llama", 1, 16, "17 columns for all tokens so far, or 1 for the new ones, got 16"),
        ("gemma3", 4, 4, "20 columns for all tokens so far where layers have sliding windows, .* got 4 for the new"),
        ("gemma3", 1, 1, "17 columns for all tokens so far where layers have sliding windows, .* got 1 for the new"),
    ],
)
def test_masks_of_other_columns(family: str, new: int, columns: int, said: str) -> None:
    """The layers have not begun, so that the cache goes on."""
    model = build(family)
    ids = torch.arange(3, 3 + 16 + new)[None]
    mask = torch.ones(1, columns, dtype=torch.int64)
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        expected = model(ids, use_cache=False).logits[:, 16:]
        cache = kvpolicy.PolicyCache(model)
        model(ids[:, :16], cache=cache)
        with pytest.raises(kvpolicy.KVPolicyError, match=said) as error:
            model(ids[:, 16:], attention_mask=mask, cache=cache)
        found = model(ids[:, 16:], attention_mask=torch.ones_like(ids), cache=cache).logits
    one_sentence(error.value)
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(("family", "refused"), [("gemma3", True), ("llama", False)])
def test_a_compiled_step_with_a_mask_of_its_own_column(family: str, refused: bool) -> None:
    """Windows would take the column for the first one."""
    model = build(family)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        cache = kvpolicy.PolicyCache(model)
        model(ids[:, :16], cache=cache)
        given = {"input_ids": ids[:, 16:], "attention_mask": torch.ones(1, 1), "cache": cache}
        with pytest.raises(kvpolicy.KVPolicyError) if refused else nullcontext() as error:
            check_step(model.model, (), given)
        check_step(model.model, (), given | {"attention_mask": torch.ones(1, 17)})
    if error is not None:
        assert "sliding windows, whose mask counts columns, got 1" in one_sentence(error.value)


def padded(family: str) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, two rows of 19 columns of which one has padding in front, and their positions."""
    ids = torch.arange(3, 41).view(2, 19)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return build(family), ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "opt"])
def test_no_mask_behind_a_padded_prompt(family: str, new: int) -> None:
    """Where windows or positions are counted by it; with it, the cache goes on."""
    model, ids, mask, places = padded(family)
    end = 16 + new
    given = {} if family == "opt" else {"position_ids": places[:, 16:end]}
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        expected = model(ids[1:, 5:end]).logits[0, -new:]
        cache = kvpolicy.PolicyCache(model)
        model(ids[:, :16], attention_mask=mask[:, :16], position_ids=places[:, :16], cache=cache)
        with pytest.raises(RuntimeError if new == 1 else kvpolicy.KVPolicyError, match="be given behind a padded pr"):
            model(ids[:, 16:end], cache=cache, **given)
        found = model(ids[:, 16:end], attention_mask=mask[:, :end], cache=cache, **given).logits[1]
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_mask_of_new_columns_where_the_model_numbers_tokens_by_it(new: int) -> None:
    model, ids, _, places = padded("opt")
    ids, places = ids[:1], places[:1]
    with torch.no_grad(), kvpolicy.attach(model, "full"):
        expected = model(ids[:, : 1 + new]).logits[:, 1:]
        cache = kvpolicy.PolicyCache(model)
        model(ids[:, :1], cache=cache)
        columns = torch.ones(1, new, dtype=torch.int64)
        with pytest.raises(kvpolicy.KVPolicyError, match=f"{new + 1} columns for .* where it numbers the tokens, got"):
            model(ids[:, 1 : 1 + new], attention_mask=columns, cache=cache)
        found = model(ids[:, 1 : 1 + new], attention_mask=columns, position_ids=places[:, 1 : 1 + new], cache=cache)
    assert torch.allclose(found.logits, expected, atol=1e-4)


def filled() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    return cache


@pytest.mark.parametrize("kind", ["static", "filled"])
def test_foreign_caches(kind: str) -> None:
    model = build("llama")
    ids, _ = make_batch([10], [10])
    cache = filled() if kind == "filled" else StaticCache(config=model.config, max_cache_len=20)
    with kvpolicy.attach(model, "window@0.5"):
        with pytest.raises(ValueError) as error, torch.no_grad():
            model(ids, cache=cache)
        one_sentence(error.value)
        with pytest.raises(ValueError):
            model.generate(ids, cache=cache, max_new_tokens=2)


class Duck:
    """A cache of one's own that transformers would take, for its methods alone."""

    def __init__(self) -> None:
        self._cache = DynamicCache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (Duck(), "Duck"),
        ((), "tuple"),
        (((torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)),), "tuple"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
    ],
    ids=["duck", "empty", "tuples", "both"],
)
def test_what_is_no_ordinary_cache(cache: Any, name: str) -> None:
    """Layers would attend to the first token alone, if a cache took its place beside the policy."""
    model = build("llama")
    ids, _ = make_batch([10], [10])
    with kvpolicy.attach(model, "window@0.5"), torch.no_grad():
        with pytest.raises(kvpolicy.KVPolicyError, match=f"got the {name};") as error:
            model(ids, cache=cache)
        one_sentence(error.value)


@pytest.mark.parametrize("policy", ["full", "window@0.5", "squeeze+snapkv+kivi:group_size=2:residual_length=2@0.5"])
def test_a_stock_cache_that_is_passed_in_each_turn(policy: str) -> None:
    """Becomes the cache under the policy, in `generate` and in forwards: a loop may read its length, and copy it."""
    model = build("llama")
    ids, _ = make_batch([20, 20], [30])
    for run in (generate_turn, forward_turn):
        with torch.no_grad(), kvpolicy.attach(model, policy):
            ours = PolicyCache(model)
            given: Any = DynamicCache(config=model.config)
            assert torch.equal(run(model, ids[:, :20], given), run(model, ids[:, :20], ours))
            assert given.get_seq_length() == ours.get_seq_length() >= 20
            other = copy.deepcopy(given)
            for cache in (given, other):
                assert torch.equal(run(model, ids, cache), run(model, ids, copy.deepcopy(ours)))
            assert isinstance(given, PolicyCache) and given.nbytes == other.nbytes
        with pytest.raises(ValueError, match="must be attached to its model, got a detached one"):
            model(ids, cache=given)


def generate_turn(model: Any, text: Tensor, cache: Any) -> Tensor:
    return model.generate(text, cache=cache, max_new_tokens=4, do_sample=False)


def forward_turn(model: Any, text: Tensor, cache: Any) -> Tensor:
    return model(text[:, cache.get_seq_length() :], cache=cache).logits


def test_a_stock_cache_of_a_refused_call_stays_one() -> None:
    model = build("llama")
    ids, mask = make_batch([20, 12], [20])
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5"):
        for wrong, message in ((mask.flip(1), "must end with a token"), (mask[:, :9], "attention mask must have")):
            for call in (partial(model.generate, max_new_tokens=2), model):
                if call is not model or wrong.shape != mask.shape:
                    with pytest.raises(ValueError, match=message):
                        call(ids, attention_mask=wrong, cache=cache)
                assert type(cache) is DynamicCache
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == 21 and out.shape == (2, 22)


def test_a_stock_cache_of_a_refused_call_is_as_new() -> None:
    model = build("llama")
    ids, _ = make_batch([20], [20])
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5") as handle:
        with pytest.raises(ValueError, match="must be a 2-D tensor, got list"):
            model(ids, attention_mask=[[1] * 20], cache=cache)
        assert model(ids, cache=cache).cache is handle.cache


def test_pictures_whose_tokens_see_ahead_take_no_tiles() -> None:
    """The mask of such a model is no causal one, and says so where it would be used."""
    model = build("gemma3_pictures")
    ids, _ = make_batch([10], [10])
    with kvpolicy.attach(model, "window@0.5", tile=4), torch.no_grad():
        with pytest.raises(ValueError, match="token_type_ids") as error:
            model(ids, token_type_ids=torch.ones_like(ids), use_cache=True)
        one_sentence(error.value)
        want = model(ids, use_cache=True).logits
        assert torch.equal(model(ids, token_type_ids=torch.zeros_like(ids), use_cache=True).logits, want)


def test_attention_sinks_that_ranks_did_not_divide() -> None:
    model = copy.deepcopy(build("gpt_oss"))
    attention = model.model.layers[1].self_attn
    attention.sinks = torch.nn.Parameter(attention.sinks.detach().repeat(2))
    with kvpolicy.attach(model, "window@0.5"), pytest.raises(ValueError, match="got 8 sinks for 4 heads") as error:
        model(torch.ones(1, 9, dtype=torch.int64))
    one_sentence(error.value)

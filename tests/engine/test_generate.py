"""`model.generate` inside `attach`, in all its modes."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.conformance.policies import CODECS, SELECTORS, words
from tests.engine.filled import attached
from tests.sampling import each_once, product

NEW = 12
LAYERS = 2
"""The first, and one behind it."""
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": GREEDY | {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": GREEDY | {"num_beams": 3},
    "sampled beams": GREEDY | {"num_beams": 3, "do_sample": True},
    "several": GREEDY | {"do_sample": True, "num_return_sequences": 3},
    "several beams": GREEDY | {"num_beams": 3, "num_return_sequences": 2},
    "chunks": GREEDY | {"prefill_chunk_size": 7},
    "no cache": GREEDY | {"use_cache": False},
}
KIVI = "kivi:group_size=4:residual_length=4"


def generate(model: Any, ids: Tensor, mask: Tensor, **how: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **how)


@pytest.mark.parametrize("mode", [*MODES])
def test_full_budget_gives_the_stock_tokens(mode: str) -> None:
    model = build("llama", layers=LAYERS)
    ids, mask = make_batch([24, 15, 9], [24])
    stock = generate(model, ids, mask, **MODES[mode])
    for policy in ("full", "h2o@64", "squeeze+snapkv@64"):
        with kvpolicy.attach(model, policy) as handle:
            ours = generate(model, ids, mask, **MODES[mode])
            assert (handle.cache is None) == (mode == "no cache")
        assert torch.equal(ours, stock), policy


RANKINGS = [*SELECTORS, "h2o:decode=grow"]
SOME = ["h2o", "kvzip", "expected", "kvcrush", "tova", "h2o:decode=grow"]
"""Rows are selected of whatever tensors a selector has."""
REPEATED = ["greedy", "beams", "several", "several beams"]


@product("selector,codec,mode", RANKINGS, CODECS, REPEATED, sample=each_once(SOME, CODECS, REPEATED))
def test_small_budgets(selector: str, codec: str, mode: str) -> None:
    """Rows are repeated and reordered with all that belongs to them; budgets hold; nothing is lost."""
    model = build("llama", layers=LAYERS)
    ids, mask = make_batch([24, 15], [24])
    with kvpolicy.attach(model, words(selector, codec)) as handle:
        out = generate(model, ids, mask, **MODES[mode])
        again = generate(model, ids, mask, **MODES[mode])
    assert torch.equal(out, again)
    assert handle.cache is not None
    for layer in handle.cache.policy_layers:
        assert ((layer.positions >= 0).sum(-1) <= layer.budget[:, None]).all()
        for row, length in zip(kept_positions(layer), layer.length.tolist(), strict=True):
            assert all(head[-1] == length - 1 and len(set(head)) == len(head) for head in row)


def test_beams_carry_their_own_slots() -> None:
    """A beam's continuation is what the same tokens give alone."""
    with attached("h2o@0.5", [24], [24], layers=LAYERS) as (model, ids, mask):
        out = model.generate(
            ids, attention_mask=mask, **MODES["several beams"], return_dict_in_generate=True, output_scores=True
        )
        for beam, score in zip(out.sequences, out.sequences_scores, strict=True):
            cache = PolicyCache(model, new=NEW)
            logits = []
            with torch.no_grad():
                logits.append(model(ids, cache=cache).logits[:, -1])
                for token in beam[24:-1]:
                    logits.append(model(token.view(1, 1), cache=cache).logits[:, -1])
            chances = torch.cat(logits).log_softmax(-1)
            alone = chances.gather(-1, beam[24:, None]).sum() / NEW
            assert torch.allclose(alone, score, atol=1e-4)


@pytest.mark.parametrize("selector", ["snapkv:window=6", "streaming:sinks=2", "h2o", "squeeze+window"])
def test_all_chunks_are_compressed(selector: str) -> None:
    """Not only the first, as elsewhere."""
    model = build("llama", layers=LAYERS)
    ids, mask = make_batch([60, 41], [60])
    with kvpolicy.attach(model, f"{selector}@0.5") as handle:
        generate(model, ids, mask, do_sample=False, max_new_tokens=1, prefill_chunk_size=16)
    assert handle.cache is not None
    slots = handle.cache.policy_layers
    total = torch.stack([(layer.positions >= 0).sum(-1)[:, 0] for layer in slots]).sum(0)
    assert total.tolist() == [30 * LAYERS, 20 * LAYERS]
    assert all(layer.length.tolist() == [60, 41] for layer in slots)


@pytest.mark.parametrize("policy", ["window@20", f"h2o+{KIVI}@0.5", "full"])
def test_second_turn(policy: str) -> None:
    """The conversation goes on over the same cache; with room for all of it, as if it had never stopped."""
    model = build("llama", layers=LAYERS)
    ids, mask = make_batch([24], [24])
    more = torch.full((1, 5), 7)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        first = generate(model, ids, mask, cache=cache, **GREEDY)
        whole = torch.cat([first, more], 1)
        second = generate(model, whole, torch.ones_like(whole), cache=cache, **GREEDY)
        length = 24 + NEW + 5 + NEW - 1
        assert cache.policy_layers[0].length.tolist() == [length]
        if policy == "full":
            fresh = generate(model, whole, torch.ones_like(whole), cache=PolicyCache(model), **GREEDY)
            assert torch.equal(second, fresh)
            assert kept_positions(cache.policy_layers[0])[0][0] == list(range(length))


def test_padded_second_turn() -> None:
    with attached("full", [24, 15], [24], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model)
        first = generate(model, ids, mask, cache=cache, **GREEDY)
        longer = torch.cat([first, torch.full((2, 4), 9)], 1)
        wide = torch.cat([mask, torch.ones(2, NEW + 4, dtype=mask.dtype)], 1)
        second = generate(model, longer, wide, cache=cache, **GREEDY)
    assert torch.equal(second, generate(model, longer, wide, **GREEDY))


def test_embeddings_in_place_of_tokens() -> None:
    model = build("llama", layers=LAYERS)
    ids, mask = make_batch([24, 15], [24])
    given: Any = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    stock = model.generate(**given, **GREEDY)
    with kvpolicy.attach(model, "squeeze+snapkv@64"):
        assert torch.equal(model.generate(**given, **GREEDY), stock)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("assistant_model", "argument"),
        *itertools.product(["prompt_lookup_num_tokens", "assistant_early_exit"], ["argument", "config", "model"]),
    ],
)
def test_assisted_decoding_is_refused_before_it_begins(how: str, where: str) -> None:
    """A token that was evicted for a rejected draft cannot come back, and an early exit takes the model's layers."""
    model = copy.deepcopy(build("llama"))
    ids, mask = make_batch([24], [24])
    layers = model.config.num_hidden_layers
    given = dict[str, Any]()
    if how == "assistant_model" or where == "argument":
        given = {how: build("qwen2") if how == "assistant_model" else 2}
    elif where == "config":
        given = {"generation_config": GenerationConfig(**{how: 2})}
    else:
        setattr(model.generation_config, how, 2)
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        with pytest.raises(ValueError, match="Assisted decoding must") as error:
            generate(model, ids, mask, **GREEDY, **given)
        assert str(error.value).endswith(".") and ". " not in str(error.value)
        assert handle.cache is None
        assert how == "assistant_early_exit" or "h2o@0.5" in str(error.value)
    assert model.config.num_hidden_layers == layers


@pytest.mark.parametrize(("sides", "family"), [("model", "llama"), ("assistant", "llama"), ("both", "gemma2")])
def test_assisted_decoding_with_every_token_kept(sides: str, family: str) -> None:
    """Rejected drafts are cropped, and the tokens are those of the stock caches."""
    model = build(family)
    assistant = copy.deepcopy(build("qwen2"))
    ids, mask = make_batch([24], [24])
    how = GREEDY | {"assistant_model": assistant}
    stock = generate(model, ids, mask, **how)
    assert torch.equal(stock, generate(model, ids, mask, **GREEDY))
    attached = [model] * (sides != "assistant") + [assistant] * (sides != "model")
    with contextlib.ExitStack() as stack:
        for each in attached:
            stack.enter_context(kvpolicy.attach(each, "full"))
        assert torch.equal(generate(model, ids, mask, **how), stock)


def test_prompt_lookup_with_every_token_kept() -> None:
    model = build("llama")
    ids, mask = make_batch([12], [12])
    ids = torch.cat([ids, ids], 1)
    mask = torch.cat([mask, mask], 1)
    stock = generate(model, ids, mask, **GREEDY)
    with kvpolicy.attach(model, "full"):
        assert torch.equal(generate(model, ids, mask, **GREEDY, prompt_lookup_num_tokens=3), stock)


def test_an_assistant_that_evicts_is_refused_by_name() -> None:
    model = build("llama")
    assistant = build("qwen2")
    ids, mask = make_batch([24], [24])
    with kvpolicy.attach(assistant, "h2o@0.5"):
        with pytest.raises(ValueError, match=r"a policy of the assistant model .*, got h2o@0\.5"):
            generate(model, ids, mask, **GREEDY, assistant_model=assistant)
        assert generate(assistant, ids, mask, **GREEDY).shape == (1, 24 + NEW)


def test_a_refused_generation_announces_nothing() -> None:
    """Else the next prompt would wait for the tokens of the refused one."""
    model = build("opt")
    too_long = torch.randint(3, 40, (1, model.config.max_position_embeddings + 1))
    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5", chunks="hold"):
        cache = PolicyCache(model, new=3)
        with pytest.raises(KVPolicyError, match="Positions must be below 512"):
            model.generate(too_long, cache=cache, **GREEDY)
        assert cache.prompt is None and cache.new == 3
        model(too_long[:, :20], cache=cache)
    assert cache.plan is not None and [*kept_positions(cache.policy_layers[0])[0][0]] != [*range(20)]

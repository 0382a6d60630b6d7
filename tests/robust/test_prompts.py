"""Prompts of odd lengths, odd budgets, odd models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvpolicy
from kvpolicy import PolicyCache
from tests.conformance.models import build
from tests.conformance.play import TURNS, make_batch, talk
from tests.robust.hostile import FEW, GREEDY, NEW, POLICIES, SOME, converse, each, exact, prompt, refused, roomy
from tests.sampling import product

TINY = {"vocab_size": 48, "intermediate_size": 8, "max_position_embeddings": 4096, "pad_token_id": 0}


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TINY | sizes))).eval()  # pyright: ignore
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def gpt2(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()


ODD = {
    "one layer, one head, two words": lambda: llama(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=8, vocab_size=2
    ),
    "head_dim 2": lambda: llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=8),
    "head_dim 1": lambda: gpt2(n_embd=4, n_layer=2, n_head=4, vocab_size=48),
    "head_dim 5": lambda: gpt2(n_embd=10, n_layer=1, n_head=2, vocab_size=48),
}


@each("length", [1, 2, 3])
def test_short_prompts(policy: str, length: int) -> None:
    """One token; fewer than the sinks or the window: alone as in a batch, and everything is kept."""
    model = build("llama")
    turns = [length, 1]
    ids, mask = make_batch([length], turns)
    stock = talk(model, ids, mask, turns, DynamicCache())
    with kvpolicy.attach(model, roomy(policy, "1.0")):
        assert (talk(model, ids, mask, [length], PolicyCache(model)) - stock[:, :length]).abs().max() < 1e-5
    with kvpolicy.attach(model, policy):
        both = talk(model, *make_batch([26, length], TURNS), TURNS, PolicyCache(model, new=NEW))
        ids, mask = (t[1:, 26 - length :] for t in make_batch([26, length], TURNS))
        alone = talk(model, ids, mask, [length, *TURNS[1:]], PolicyCache(model, new=NEW))
    assert (both[1:, 26 - length :] - alone).abs().max() < (5e-5 if exact(policy) else 0.1)


@pytest.mark.parametrize("words", ["snapkv:window=13@13", "window@1", "streaming:sinks=4@5", "h2o:recent=1@13"])
def test_a_budget_that_is_the_window(words: str) -> None:
    model = build("llama")
    with kvpolicy.attach(model, words):
        logits, cache = converse(model, [26, 5])
    assert torch.isfinite(logits[0]).all()
    assert [layer.budget.tolist() for layer in cache.policy_layers] == [[int(words.rpartition("@")[2])] * 2] * 3


@product("policy", [*POLICIES.values()], sample=[(POLICIES[name],) for name in ("squeeze", "mikv")])
def test_many_rows_of_one_to_a_thousand_tokens(policy: str) -> None:
    model = llama(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=16)
    lengths = [1 + 999 * row // 31 for row in range(32)]
    ids, mask = make_batch(lengths, [1000, 1, 1])
    with kvpolicy.attach(model, policy):
        together = talk(model, ids, mask, [1000, 1, 1], PolicyCache(model, new=2))[:, -3:]
        for row in (0, 1, 5, 15):
            skip = 1000 - lengths[row]
            turns = [lengths[row], 1, 1]
            alone = talk(model, ids[row:, skip:][:1], mask[row:, skip:][:1], turns, PolicyCache(model, new=2))
            assert (alone[0, -3:] - together[row]).abs().max() < (5e-5 if exact(policy) else 5e-3)


@each("name", [*ODD], often=FEW)
def test_odd_models(name: str, policy: str) -> None:
    """The stock tokens at a full budget, or one sentence where a codec cannot pack such heads."""
    model = ODD[name]()
    ids, mask = make_batch([20, 11], [20])
    given: Any = {"input_ids": ids % model.config.vocab_size, "attention_mask": mask}
    stock = model.generate(**given, **GREEDY)
    try:
        for words in (policy, roomy(policy)):
            with kvpolicy.attach(model, words):
                ours = model.generate(**given, **GREEDY)
    except ValueError as error:
        assert "head dimension" in str(error) and not exact(policy) and str(error).endswith(".")
    else:
        assert ours.shape == stock.shape
        assert not exact(policy) or torch.equal(ours, stock)


@SOME
def test_behind_the_last_position(policy: str) -> None:
    """Rotary models go on as the stock model does, and warn once."""
    model = llama(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, max_position_embeddings=24)
    stock = model.generate(prompt(20), **GREEDY)
    with kvpolicy.attach(model, roomy(policy)):
        model.generate(prompt(18), **GREEDY)
        with pytest.warns(kvpolicy.KVPolicyWarning, match="exceeds the 24 positions"):
            ours = model.generate(prompt(20), **GREEDY)
        assert torch.equal(model.generate(prompt(20), **GREEDY), ours)
    assert ours.shape == stock.shape and (not exact(policy) or torch.equal(ours, stock))


@each("budget", [str(10**6), str(10**12), str(10**18 - 1), "999999TiB"], often=FEW)
def test_huge_budgets(policy: str, budget: str) -> None:
    """Whatever will never come gets no slots."""
    if policy == "full":
        with refused("must have a selector"):
            kvpolicy.attach(build("llama"), f"full@{budget}")
        return
    model = build("llama")
    stock = talk(model, *make_batch([26, 11]), TURNS, DynamicCache())
    with kvpolicy.attach(model, roomy(policy, budget)):
        for cache in (PolicyCache(model), PolicyCache(model, new=NEW)):
            ours = talk(model, *make_batch([26, 11]), TURNS, cache)
            assert cache.nbytes < 2**23
            assert not exact(policy) or (ours - stock)[make_batch([26, 11])[1].bool()].abs().max() < 3e-5


@SOME
def test_nothing_to_read(policy: str) -> None:
    model = build("llama")
    with kvpolicy.attach(model, policy), torch.no_grad():
        for ids in (prompt()[:, :0], prompt()[:0]):
            with refused("at least one token"):
                model(ids, use_cache=True)
        with refused("must show at least one token, got only padding in all 2"):
            converse(model, [0, 0])
        with refused("at least one token"):
            model.generate(prompt()[:, :0], **GREEDY)
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model(use_cache=True)
        cache = PolicyCache(model)
        model(prompt(), cache=cache)
        with refused("at least one token"):
            model(prompt()[:, :0], cache=cache)
        model(prompt(1), cache=cache)  # which the refusal did not harm

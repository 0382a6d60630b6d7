"""`model.generate` inside `attach`, in all its modes, and conversations over one cache, which do not mix."""

from __future__ import annotations

import contextlib
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.registry import names
from tests.conformance.access import kept_positions
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import CODECS, GROUPING, SELECTORS, words
from tests.engine.filled import attached, prompted, steps
from tests.engine.live import tensors_of
from tests.sampling import each_once, product
from tests.walks.life import changes, state_of

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
        scored = MODES["several beams"] | {"return_dict_in_generate": True, "output_scores": True}
        out = model.generate(ids, attention_mask=mask, **scored)
        turns = [24] + [1] * (NEW - 1)
        for beam, score in zip(out.sequences[:, None], out.sequences_scores, strict=True):
            logits = talk(model, beam, torch.ones_like(beam), turns, PolicyCache(model, new=NEW))[0, 23:]
            alone = logits.log_softmax(-1).gather(-1, beam[0, 24:, None]).sum() / NEW
            assert torch.allclose(alone, score, atol=1e-4)


@pytest.mark.parametrize("selector", ["snapkv:window=6", "streaming:sinks=2", "h2o", "squeeze+window"])
def test_all_chunks_are_compressed(selector: str) -> None:
    """Not only the first, as elsewhere."""
    with attached(f"{selector}@0.5", [60, 41], [60], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model)
        generate(model, ids, mask, cache=cache, do_sample=False, max_new_tokens=1, prefill_chunk_size=16)
    slots = cache.policy_layers
    total = torch.stack([(layer.positions >= 0).sum(-1)[:, 0] for layer in slots]).sum(0)
    assert total.tolist() == [30 * LAYERS, 20 * LAYERS]
    assert all(layer.length.tolist() == [60, 41] for layer in slots)


@pytest.mark.parametrize("lengths", [[24], [24, 15]])
def test_second_turn(lengths: list[int]) -> None:
    """The conversation goes on over the same cache; with room for all of it, as if it had never stopped."""
    with attached("full", lengths, [24], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model)
        first = generate(model, ids, mask, cache=cache, **GREEDY)
        longer = torch.cat([first, torch.full((len(lengths), 5), 7)], 1)
        wide = torch.nn.functional.pad(mask, (0, NEW + 5), value=1)
        second = generate(model, longer, wide, cache=cache, **GREEDY)
    assert torch.equal(second, generate(model, longer, wide, **GREEDY))
    more = NEW + 5 + NEW - 1
    assert cache.policy_layers[0].length.tolist() == [length + more for length in lengths]
    assert kept_positions(cache.policy_layers[0])[0][0] == list(range(24 + more))


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


@pytest.mark.parametrize(
    ("sides", "family"), [("model", "llama"), ("assistant", "llama"), ("both", "gemma2"), ("lookup", "llama")]
)
def test_drafts_with_every_token_kept(sides: str, family: str) -> None:
    """Rejected drafts are cropped, and the tokens are those of the stock caches."""
    model = build(family)
    assistant = copy.deepcopy(build("qwen2"))
    ids, mask = make_batch([12], [12])
    ids, mask = (torch.cat([each, each], 1) for each in (ids, mask))
    how = GREEDY | ({"prompt_lookup_num_tokens": 3} if sides == "lookup" else {"assistant_model": assistant})
    stock = generate(model, ids, mask, **how)
    assert torch.equal(stock, generate(model, ids, mask, **GREEDY))
    with contextlib.ExitStack() as stack:
        for each in [model] * (sides != "assistant") + [assistant] * (sides in ("assistant", "both")):
            stack.enter_context(kvpolicy.attach(each, "full"))
        assert torch.equal(generate(model, ids, mask, **how), stock)


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


TURNS = [24, *[1] * 8, 5, 1, 1]
INTERLEAVED = [*SELECTORS, "h2o:decode=grow", "kvcrush:pick=random:buckets=distance/h2o"]
PARTS = (["uniform", "squeeze"], INTERLEAVED, CODECS)


@product("allocator,selector,codec", *PARTS, sample=each_once(*PARTS))
def test_interleaved(allocator: str, selector: str, codec: str) -> None:
    model = build("llama", layers=LAYERS)
    policy = words(allocator, selector, codec)
    one = make_batch([24, 11], TURNS, seed=1)
    two = make_batch([19], TURNS, seed=2)
    with kvpolicy.attach(model, policy):
        world = torch.get_rng_state()
        apart = [talk(model, *batch, TURNS, PolicyCache(model)) for batch in (one, two)]
        assert torch.equal(torch.get_rng_state(), world), "what is random has a seed of its own"
        torch.rand(7)
        caches = [PolicyCache(model), PolicyCache(model)]
        together: list[list[torch.Tensor]] = [[], []]
        for size, stop in zip(TURNS, itertools.accumulate(TURNS), strict=True):
            for logits, batch, cache in zip(together, (one, two), caches, strict=True):
                logits.append(forward(model, *batch, stop - size, stop, cache))
    for whole, pieces in zip(apart, together, strict=True):
        assert torch.equal(whole, torch.cat(pieces, 1))


@pytest.mark.parametrize("spec", ["h2o:decode=grow@9000B", "uniform/even+h2o:decode=grow@9000B", "h2o:decode=grow@9"])
def test_a_growing_cache_stays_within_its_budget_in_later_turns(spec: str) -> None:
    """Slots for generated tokens are those that the budget of the turn contains, also if a turn is one token."""
    with attached(spec, [60], [60], layers=LAYERS) as (model, ids, _):
        cache = PolicyCache(model)
        for columns in (20, 33, 60):
            model.generate(ids[:, :columns], cache=cache, do_sample=False, max_new_tokens=12, min_new_tokens=12)
            assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        seen = cache.get_seq_length()
        longer = torch.cat([ids, ids], 1)[:, : seen + 1]
        model.generate(longer, cache=cache, do_sample=False, max_new_tokens=30, min_new_tokens=30)
        store = cache.policy_layers[0].store
        assert cache.get_seq_length() == seen + 30 and max(store.contents.expected_len) >= int(store.tensors.budget)


APART = [name for name in CODECS if name not in GROUPING]


@pytest.mark.parametrize("codec", APART)
def test_no_token_is_lost_where_a_turn_has_a_smaller_budget(codec: str) -> None:
    """The end is announced late: stages hold more than their share then, and give way to as many tokens as come."""
    with attached(words("h2o", codec, budget="1.0"), [30], [30], layers=1) as (model, ids, mask), torch.no_grad():
        cache = PolicyCache(model)
        layer = cache.policy_layers[0]
        forward(model, ids, mask, 0, 26, cache)
        cache.expect(None, 4)
        forward(model, ids, mask, 26, 30, cache)
        assert kept_positions(layer)[0][0] == [*range(30)]
        for end in range(31, 40):
            longer = torch.cat([ids, ids], 1)[:, :end]
            forward(model, longer, torch.ones_like(longer), end - 1, end, cache)
            check_invariants(layer.store)
            assert len(kept_positions(layer)[0][0]) == min(end, int(layer.budget))


SPECS = [
    "snapkv:window=4:decode=grow@2048",
    "h2o:decode=grow+merge@60",
    "h2o:decode=grow+kivi:group_size=4:residual_length=4@60",
    "squeeze+snapkv:window=4:decode=grow@1MiB",
    "uniform/even+h2o:decode=grow@60",
    "h2o:decode=grow@12",
]
SIZES = [[10] + [1] * 40, [10, 8] + [1] * 40, [20] + [1] * 6 + [5] + [1] * 40]


@product("spec,sizes", SPECS, SIZES, sample=each_once(SPECS, SIZES))
def test_a_growing_cache_grows_behind_its_announcement(spec: str, sizes: list[int]) -> None:
    """Also where the budget exceeds all that was announced, so that slots run out before it does."""
    with attached(spec, [90], [90], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model, new=4)
        held = 0
        for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True):
            forward(model, ids, mask, stop - size, stop, cache)
            layer = cache.policy_layers[0]
            held = int(layer.store.geometry.tokens_by_head().amax())
            assert held <= int(layer.budget)
        assert cache.get_seq_length() == sum(sizes)
        assert "@12" in spec or "squeeze" in spec or held == sum(sizes), "the budgets of the others hold all tokens"


@pytest.mark.parametrize("codec", ["plain", "tokenwise"])
def test_pages_return_behind_an_announced_end(codec: str, tmp_path: Path) -> None:
    """A turn of a known end gets fewer pages than the budget has, and what follows behind it gets the others."""
    policy = words("uniform/adakv+h2o", codec, budget="80")
    with attached(policy, [64], [64], layers=LAYERS) as (model, ids, mask):
        cache = prompted(model, ids, mask, 21)
        cache.expect(24, 1)
        forward(model, ids, mask, 21, 24, cache)
        cache.save(tmp_path / "turn.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "turn.safetensors")
        assert torch.equal(*(steps(model, ids, mask, 24, 64, each) for each in (cache, loaded)))
        for layer in cache.policy_layers:
            check_invariants(layer.store)
            assert layer.store.geometry.tokens_by_head().tolist() == [[64, 64]]


@pytest.mark.parametrize("given", [9, 28])
def test_generate_wants_the_whole_conversation(given: int) -> None:
    """Of fewer tokens than the cache has seen, transformers would run none, or those behind some offset."""
    with attached("h2o@0.5", [24], [24, 10], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model)
        model.generate(ids[:, :24], cache=cache, do_sample=False, max_new_tokens=5, min_new_tokens=5)
        before = cache.nbytes, cache.get_seq_length()
        with pytest.raises(kvpolicy.KVPolicyError, match=rf"the cache has seen 28 tokens, got .* of {given}; try"):
            model.generate(ids[:, :given], attention_mask=mask[:, :given], cache=cache, max_new_tokens=5)
        assert (cache.nbytes, cache.get_seq_length()) == before
        assert model.generate(ids, cache=cache, max_new_tokens=5, min_new_tokens=5).shape == (1, 39)


@pytest.mark.parametrize("part", [*CODECS, *names("reader"), "global", "cake"])
def test_a_reset_cache_is_a_new_one(part: str) -> None:
    with attached(words(part, "h2o"), [24, 11], TURNS, layers=4) as (model, ids, mask):
        cache = PolicyCache(model, prompt=[24, 11], new=50)
        talk(model, ids, mask, TURNS, cache)
        assert sum(tensor.nbytes for _, tensor in tensors_of(cache))
        cache.reset()
        left = changes(state_of(PolicyCache(model)), state_of(cache))
    stock = ("is_shared", ".device:", ".tile_size:")  # what transformers keeps, and the size of tiles
    assert [change for change in left if not any(name in change for name in stock)] == []
    assert cache.nbytes == 0


def test_every_chunk_of_a_second_turn_knows_the_whole_of_it() -> None:
    chunked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2, "min_new_tokens": 2, "prefill_chunk_size": 5}
    with attached("window@0.5", [44], [44], layers=LAYERS) as (model, ids, _):
        cache = PolicyCache(model)
        budgets = list[int]()
        model.generate(ids[:, :20], cache=cache, **chunked)
        finish = cache.finish
        cache.finish = lambda decoder: (finish(decoder), budgets.append(int(cache.policy_layers[0].budget)))[0]
        model.generate(ids, cache=cache, **chunked)
    assert budgets and set(budgets) == {22}


def test_beams_of_a_cache_that_was_told_its_rows() -> None:
    with attached("window@0.5", [24, 17], [24], layers=LAYERS) as (model, ids, mask):
        cache = PolicyCache(model, prompt=[24, 17])
        beams: dict[str, Any] = {"num_beams": 2, "do_sample": False, "max_new_tokens": 3}
        told = model.generate(ids, attention_mask=mask, cache=cache, **beams)
        assert torch.equal(told, model.generate(ids, attention_mask=mask, **beams))

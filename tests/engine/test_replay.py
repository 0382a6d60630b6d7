"""Contexts that are run again: what is scored, what is held until then, and what is refused."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, DynamicCache

import kvpolicy
from kvpolicy import KVPolicyError, KVPolicyTypeError, Policy, PolicyCache
from kvpolicy.engine.attention import attend
from kvpolicy.engine.replay import attend_context
from kvpolicy.hf.forward_calls import check_step
from kvpolicy.statistics import Replay
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import Past, ScoreTransform
from kvpolicy_lm_eval.data import prompts
from tests.conformance.access import kept_positions
from tests.conformance.calibration import DIM
from tests.conformance.models import VOCABULARY, build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import spec_of
from tests.conformance.replay import Twin, recording, reference_codec, reference_selector, replay
from tests.conformance.turning import turns
from tests.engine.filled import attached, prompted
from tests.reference.selectors import complete, kvzip, top
from tests.sampling import each_once, product

SMALL = "kvzip:chunk=9:sinks=2"
ASKED = "kvzip:chunk=9:sinks=2:instruction=5-6-8:later=7-7:overlap=4:reply=3"
LENGTHS = [26, 17, 11]


def kept(cache: PolicyCache) -> list[Any]:
    return [kept_positions(layer) for layer in cache.policy_layers]


def prefilled(
    policy: str, ids: Tensor, pieces: list[int], *, family: str = "llama", mask: Any = None, **how: Any
) -> Any:
    """A cache after a prompt in pieces."""
    model = build(family)
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model, **how)
        talk(model, ids, torch.ones_like(ids) if mask is None else mask, pieces, cache)
    return cache


def expected(family: str, policy: str, ids: Tensor, budget: int) -> list[list[list[int]]]:
    """The kept positions by the attention matrices of the stock model, which is given each text behind the context.

    The softmax over some columns is the attention matrix over the sum of these columns.
    """
    model: Any = copy.deepcopy(build(family))
    model.set_attn_implementation("eager")
    config = complete(reference_selector(Policy.parse(policy).selector))
    heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    count = ids.shape[1]
    groups = model.config.num_attention_heads // heads
    scores = [torch.zeros(heads, count) for _ in range(model.config.num_hidden_layers)]
    with torch.no_grad():
        context = DynamicCache(config=model.config)
        model(ids, cache=context)
        for number, text in enumerate(kvzip.texts(config, ids[0].tolist())):
            start = number * config["chunk"]
            stop = min((number + 1) * config["chunk"], count)
            out = model(torch.tensor([text]), cache=copy.deepcopy(context), output_attentions=True)
            for layer, matrix in enumerate(out.attentions):
                if matrix.shape[-1] < count + len(text):  # a sliding layer
                    continue
                shown = [*range(min(config["sinks"], start)), *range(start, stop)]
                part = torch.cat([matrix[0][..., shown], matrix[0][..., count:]], -1)
                part = part / part.sum(-1, keepdim=True)
                largest = part[..., len(shown) - (stop - start) : len(shown)].amax(1).unflatten(0, (-1, groups)).amax(1)
                scores[layer][:, start:stop] = largest
    worth = [
        [[kvzip.priority(config, p, complex(s, 1), count, budget) for p, s in enumerate(row)] for row in layer.tolist()]
        for layer in scores
    ]
    return [[top(row, budget) for row in layer] for layer in worth]


SCORED = (["llama", "qwen3", "gpt2", "gemma2"], [SMALL, ASKED, "kvzip"])


@product("family,policy", *SCORED, sample=each_once(*SCORED))
def test_scores_are_those_of_the_stock_model(family: str, policy: str) -> None:
    ids, _ = make_batch([40], [40])
    cache = prefilled(f"{policy}@16", ids, [40], family=family)
    want = expected(family, policy, ids, 16)
    assert [[kept_positions(layer)[0], layer.layer_idx] for layer in cache.policy_layers] == [
        [want[layer.layer_idx], layer.layer_idx] for layer in cache.policy_layers
    ]


CODECS = [f"{SMALL}+{spec_of(codec)}" for codec in ("kvquant", "mikv", "csr")]
"""What they learn from a prompt (pins, offsets of positions, sizes of queries) is that of the whole prompt."""
ANNOUNCED = [SMALL, ASKED, f"{SMALL}:plus=true", f"squeeze+{SMALL}", f"kvcrush/{SMALL}", *CODECS]
PIECES = [[10, 1, 15], [25, 1], [1, 25]]


@product("policy,pieces", ANNOUNCED, PIECES, sample=each_once(ANNOUNCED, PIECES))
def test_announced_chunks_are_one_prompt(policy: str, pieces: list[int]) -> None:
    ids, mask = make_batch(LENGTHS, [26])
    policy += "@0.5"
    whole = prefilled(policy, ids, [26], mask=mask)
    model = build("llama")
    with kvpolicy.attach(model, policy), recording() as recorder:
        cache = PolicyCache(model, prompt=LENGTHS)
        talk(model, ids, mask, pieces, cache, recorder)
    if "squeeze" not in policy:  # it measures a row's first chunk
        assert kept(cache) == kept(whole)
    parsed = Policy.parse(policy)
    twin = Twin(reference_codec(parsed.codec), turns(model, DIM))
    assert replay(parsed, recorder.tape, twin=twin).alike > 0
    assert cache.plan is not None and cache.nbytes == cache.plan.nbytes


def test_a_prompt_is_held_until_it_is_complete() -> None:
    ids, mask = make_batch(LENGTHS, [26])
    model = build("llama")
    with kvpolicy.attach(model, f"{SMALL}@0.5") as handle:
        cache = prompted(model, ids, mask, 20, prompt=LENGTHS)
        first = cache.policy_layers[0]
        assert cache.plan is None and first.positions.shape[-1] == 0
        assert first.length.tolist() == [20, 11, 5] and cache.full_nbytes > 0
        bytes_held = sum(layer.held()["waiting prompt"] for layer in cache.policy_layers)
        assert first.pending is not None and first.transcript is not None
        assert first.held()["waiting prompt"] == first.pending.nbytes + first.transcript.nbytes
        assert bytes_held < cache.nbytes
        forward(model, ids, mask, 20, 26, cache)
        assert cache.plan is not None and "waiting prompt" not in first.held()
        assert bytes_held < cache.plan.peak_nbytes
        assert "until it is replayed" in cache.plan.note and "the prefill: up to" in str(cache.plan)
        assert first_of(Replay, handle.policy.selector.statistics) is not None
    planned = kvpolicy.plan(model.config, f"{SMALL}@0.5", batch=3, prompt=LENGTHS, dtype=torch.float32)
    assert planned.peak_nbytes == cache.plan.peak_nbytes


def test_a_shorter_row_waits_for_the_longest() -> None:
    """Padded on the right, it is complete before the other one; all rows are replayed at once."""
    ids, _ = make_batch([26, 26], [26])
    mask = (torch.arange(26) < torch.tensor([[26], [8]])).long()
    model = build("llama", layers=2)
    with kvpolicy.attach(model, f"{SMALL}@0.5"):
        cache = prompted(model, ids, mask, 13, prompt=[26, 8])
        assert cache.policy_layers[0].length.tolist() == [13, 8] and cache.plan is None
        forward(model, ids, mask, 13, 26, cache)
        assert cache.policy_layers[0].budget.tolist() == [13, 4]


@pytest.mark.parametrize("number", [26, LENGTHS])
def test_one_number_announces_the_longest_row(number: Any) -> None:
    ids, mask = make_batch(LENGTHS, [26])
    cache = prefilled(f"{SMALL}@8", ids, [20, 6], mask=mask, prompt=number)
    assert kept(cache) == kept(prefilled(f"{SMALL}@8", ids, [26], mask=mask))


ALONE = (["llama", "gemma3", "opt", "gpt_oss"], [SMALL, ASKED, f"{SMALL}:plus=true:decode=grow"])


@product("family,policy", *ALONE, sample=each_once(*ALONE))
def test_rows_are_as_alone(family: str, policy: str) -> None:
    ids, mask = make_batch(LENGTHS, [26, 1, 6, 1])
    turns = [26, 1, 6, 1]
    together = kept(prefilled(f"{policy}@0.5", ids, turns, family=family, mask=mask, new=8))
    for row, length in enumerate(LENGTHS):
        own = ids[row : row + 1, 26 - length :]
        alone = kept(prefilled(f"{policy}@0.5", own, [length, *turns[1:]], family=family, new=8))
        assert [layer[0] for layer in alone] == [layer[row] for layer in together]


@pytest.mark.parametrize(("family", "right"), [("llama", False), ("llama", True), ("opt", False), ("gemma3", False)])
def test_a_row_that_begins_in_a_later_chunk(family: str, right: bool) -> None:
    """Its context is replayed when it comes, without the columns before it, which windows and positions may count.

    That of the other row is not replayed again.
    """
    policy = "kvzip:chunk=3:sinks=1@4"
    ids, mask = make_batch([20, 20], [20, 8])
    mask[1, :20] = 0
    if right:
        mask[1, 26:] = 0
    cache = prefilled(policy, ids, [20, 8], family=family, mask=mask)
    alone = prefilled(policy, ids[1:, 20 : 26 if right else 28], [6 if right else 8], family=family)
    first = prefilled(policy, ids[:1], [20, 8], family=family)
    for row, own in ((0, first), (1, alone)):
        assert [layer[row] for layer in kept(cache)] == [layer[0] for layer in kept(own)]
        for both, one in zip(cache.policy_layers, own.policy_layers, strict=True):
            torch.testing.assert_close(both.keys[row], one.keys[0], atol=1e-4, rtol=1e-4)


def test_generate_in_chunks_and_in_turns() -> None:
    model = build("llama")
    ids, mask = make_batch(LENGTHS, [26, 3, 4])
    how: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    with torch.no_grad(), kvpolicy.attach(model, f"{SMALL}@0.5"):
        one = PolicyCache(model)
        other = PolicyCache(model)
        first = model.generate(ids[:, :26], attention_mask=mask[:, :26], cache=one, **how)
        chunked = {"prefill_chunk_size": 10, **how}
        assert torch.equal(first, model.generate(ids[:, :26], attention_mask=mask[:, :26], cache=other, **chunked))
        assert kept(one) == kept(other)
        whole = torch.cat([first, ids[:, 29:]], 1)
        longer = torch.cat([mask[:, :29], mask[:, 29:]], 1)
        model.generate(whole, attention_mask=longer, cache=one, **how)
    # The last generated token of a turn is read with the next turn.
    assert all(head[-7:] == list(range(28, 35)) for layer in kept(one) for head in layer[0][:1])


def test_an_interrupted_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that could not score its prompt is refused until it is reset."""
    with torch.no_grad(), attached(f"{SMALL}@0.5", [26], [26]) as (model, ids, _):
        cache = PolicyCache(model)
        with monkeypatch.context() as patch:
            patch.setattr("kvpolicy.hf.replay.received", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids, cache=cache)
        with pytest.raises(KVPolicyError, match="interrupted"):
            model(ids, cache=cache)
        cache.reset()
        model(ids, cache=cache)
        other = PolicyCache(model)
        model(ids, cache=other)
    assert kept(cache) == kept(other)


@pytest.mark.parametrize("move", ["select", "repeat", "copy", "inference", "reset"])
def test_moves_of_a_held_prompt(move: str) -> None:
    model = build("llama")
    ids, mask = make_batch(LENGTHS, [26])
    order = torch.tensor([2, 0])
    with kvpolicy.attach(model, f"{SMALL}@0.5"):
        cache = PolicyCache(model, prompt=LENGTHS)
        with torch.inference_mode(move == "inference"):
            forward(model, ids, mask, 0, 20, cache)
        if move == "select":
            cache.batch_select_indices(order)
            ids = ids[order]
            mask = mask[order]
        elif move == "repeat":
            cache.batch_repeat_interleave(2)
            ids = ids.repeat_interleave(2, 0)
            mask = mask.repeat_interleave(2, 0)
        elif move == "copy":
            other = copy.deepcopy(cache)
            forward(model, (ids + 1) % VOCABULARY, mask, 20, 26, other)
        elif move == "reset":
            cache.reset()
            forward(model, ids, mask, 0, 20, cache)
            assert cache.plan is not None  # the announcement is forgotten, too
            return
        forward(model, ids, mask, 20, 26, cache)
        whole = prompted(model, ids, mask, 26)
    assert kept(cache) == kept(whole)


def test_embeddings_are_replayed_as_ids_are() -> None:
    with torch.no_grad(), attached(f"{ASKED}@8", [26], [26], family="gemma2") as (model, ids, _):
        one = PolicyCache(model)
        other = PolicyCache(model, prompt=26)
        model(ids, cache=one)
        model(inputs_embeds=model.get_input_embeddings()(ids[:, :20]), cache=other)
        model(ids[:, 20:], cache=other)
    assert kept(one) == kept(other)


@pytest.mark.parametrize(("padded", "rows"), [(False, 3), (True, 3), (True, 1 << 24)])
def test_fused_attention_is_the_tiled_one(padded: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.engine.replay.MASK_ELEMENTS", rows)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 21, 8) for heads in (4, 2, 2))
    occupied = torch.ones(2, 2, 30, dtype=torch.bool)
    valid = None
    if padded:
        occupied[1, :, :25] = False
        valid = torch.arange(21) < torch.tensor([[21], [0]])
    past = Past(torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8), occupied)
    want, _ = attend(q, k, v, ScoreTransform(0.5), past, valid, False)
    torch.testing.assert_close(attend_context(q, k, v, ScoreTransform(0.5), past, valid), want)


def test_refused() -> None:
    model = build("opt")
    ids = torch.randint(3, VOCABULARY, (1, 300))
    with torch.no_grad(), kvpolicy.attach(model, "kvzip@0.5"):
        with pytest.raises(KVPolicyError, match=r"within the 512 positions that the model has learned, got .* 599"):
            model(ids)
        model(ids[:, :200])
        held = PolicyCache(model, prompt=100)
        model(ids[:, :50], cache=held)
        with pytest.raises(KVPolicyError, match="before the announced prompt is complete"):
            check_step(model.model.decoder, (), {"input_ids": ids[:, :1], "cache": held})
    rotary = build("llama")
    with torch.no_grad(), kvpolicy.attach(rotary, "kvzip@0.5"), pytest.raises(KVPolicyError, match="M-RoPE"):
        rotary(ids[:, :9], position_ids=torch.arange(9).expand(3, 1, -1) + torch.arange(3)[:, None, None])


def test_layers_without_the_embedding_are_not_replayed() -> None:
    """The layers of a BERT that is a decoder are given embeddings, to which positions are added already."""
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, is_decoder=True, **sizes)).eval()
    refused = pytest.raises(KVPolicyError, match=r"must embed tokens by itself .*, got BertEncoder")
    with kvpolicy.attach(model, f"{SMALL}@0.5"), torch.no_grad(), refused:
        model(torch.arange(3, 15)[None])


@pytest.mark.parametrize("option", ["instruction", "later", "reply"])
def test_ids_that_the_model_does_not_have_are_refused(option: str) -> None:
    """Not by a lookup in the middle of a prompt, which breaks a CUDA device."""
    model = build("llama")
    refused = f"must be below {VOCABULARY}, .* got {VOCABULARY}; try"
    wrong = f"kvzip:{option}=3-{VOCABULARY}@0.5"
    with pytest.raises(KVPolicyError, match=refused):
        kvpolicy.attach(model, wrong)
    right = f"kvzip:{option}=3-{VOCABULARY - 1}@0.5"
    with kvpolicy.attach(model, right), pytest.raises(KVPolicyError, match=refused):
        kvpolicy.PolicyCache(model, wrong)


def test_ids_in_a_spec() -> None:
    policy = Policy.parse("kvzip:instruction=1-20-3:reply=4@0.5")
    plan = first_of(Replay, policy.selector.statistics)
    assert plan == Replay(2048, 4, (1, 20, 3), (1, 20, 3), (4,), 8)
    assert str(policy) == "kvzip:instruction=1-20-3:reply=4@0.5" and Policy.parse(str(policy)) == policy
    with pytest.raises(KVPolicyError, match=r"KVzip.later must be token ids with dashes .* got '1--2'; try 128000-882"):
        kvpolicy.KVzip(later="1--2")
    with pytest.raises(KVPolicyTypeError, match=r"KVzip\.reply must be a string"):
        kvpolicy.KVzip(reply=(1, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(KVPolicyError, match="chunk must be at least 1"):
        kvpolicy.KVzip(chunk=0)


def answers(policy: str, count: int) -> float:
    """The share of records that the embedded model recalls, asked after the records were compressed."""
    model, tokenizer = kvpolicy.tiny()
    right = 0
    draw = Random(1)
    for _ in range(count):
        document, question = prompts.split((prompt := prompts.recall(draw, 30))[0])
        context, asked = (
            tokenizer(text, return_tensors="pt", add_special_tokens=first).input_ids
            for text, first in ((document, True), (question, False))
        )
        with torch.no_grad(), kvpolicy.attach(model, policy):
            cache = PolicyCache(model)
            model(context, cache=cache)
            logits = model(asked, cache=cache).logits
            found = ""
            for _ in prompt[1]:
                token = logits[:, -1:].argmax(-1)
                found += tokenizer.decode(token[0])
                logits = model(token, cache=cache).logits
        right += found == prompt[1]
    return right / count


def test_a_question_after_the_context() -> None:
    """Four of a record's seven tokens answer questions, so that 60 % of the tokens are enough for the whole context."""
    assert answers("kvzip@0.6", 8) >= answers("snapkv@0.6", 8) + 0.4

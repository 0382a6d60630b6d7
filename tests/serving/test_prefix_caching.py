"""Prefix caching: what prompts have in common is computed once, and each keeps what it keeps alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import JambaConfig, LlamaConfig, LlamaForCausalLM

import kvpolicy
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.interruptible import BrokenOff
from kvpolicy.serving.prefix_caching import LEAST_PREFIX, PrefixCaching
from kvpolicy.text.common_prefix import common_length
from tests.sampling import product
from tests.serving.servers import client_of, metric, running

SYSTEM = "".join(f"{word}={number}\n" for number, word in enumerate(["tiger", "lion", "wolf", "otter"] * 4, 1000))
QUESTIONS = ["?tiger=", "sheep=7764\n?sheep=", "falcon=1937\notter=5523\n?falcon=", "?lion="]


class Reads:
    """Prompts that are read one by one on the embedded model, and the tokens that each of them ran."""

    def __init__(self, model: Any, memory: int) -> None:
        self.model = model
        self.ran: list[int] = []
        self.caching = PrefixCaching(model, memory, self.run)

    def run(self, cache: PolicyCache, ids: list[int]) -> None:
        self.ran[-1] += len(ids)
        self.model(torch.tensor([ids]), cache=cache)

    def read(self, prompt: list[int]) -> tuple[PolicyCache, int]:
        self.ran.append(0)
        cache, cached = self.caching.start(prompt)
        cache = cache or PolicyCache(self.model, prompt=len(prompt))
        self.run(cache, prompt[cache.get_seq_length() :])
        return cache, cached


@pytest.fixture
def reads() -> Iterator[Reads]:
    """With memory for everything."""
    model, _ = kvpolicy.tiny()
    with torch.inference_mode(), kvpolicy.attach(model, "snapkv@0.3", chunks="hold"):
        yield Reads(model, 1 << 30)


def held(cache: PolicyCache) -> list[list[Any]]:
    """The positions of each head of each layer, ascending."""
    return [layer.positions.sort(-1).values.tolist() for layer in cache.policy_layers]


def ids_of(text: str) -> list[int]:
    return kvpolicy.tiny()[1](text).input_ids


OFTEN = ["squeeze+kvcrush/snapkv@0.3", "uniform/adakv+kvzip+tokenwise:bits=4@0.3", "h2o+merge@48", "random@0.3"]
POLICIES = [
    *(*OFTEN, "snapkv@0.3", "h2o@48", "full", "uniform/adakv+snapkv@0.3", "cake+snapkv@0.3", "snapkv+kivi:bits=4@0.5"),
    *("expected@0.3", "full+quest:read=32:dense=0", "tokenwise:bits=4", "keydiff@0.3"),
]


@product("policy", POLICIES, sample=[(policy,) for policy in OFTEN])
def test_a_prompt_keeps_what_it_keeps_alone(policy: str) -> None:
    model, _ = kvpolicy.tiny()
    prompts = [ids_of(SYSTEM + question) for question in QUESTIONS]
    with torch.inference_mode(), kvpolicy.attach(model, policy, chunks="hold"):
        reads = Reads(model, 1 << 30)
        for prompt in prompts:
            cache, _ = reads.read(prompt)
            alone = PolicyCache(model, prompt=len(prompt))
            logits = model(torch.tensor([prompt]), cache=alone).logits[:, -1:]
            assert held(cache) == held(alone)
            newest = logits.argmax(-1)
            # A rounding error may move an element to the next code.
            far = 0.02 if "bits" in policy else 1e-4
            ours, theirs = (model(newest, cache=each).logits for each in (cache, alone))
            torch.testing.assert_close(ours, theirs, atol=far, rtol=0)
    system = len(ids_of(SYSTEM))
    assert reads.ran[:2] == [len(prompt) for prompt in prompts[:2]], "nobody knows what the next prompt begins with"
    assert reads.ran[2] == len(prompts[2]) - system
    assert reads.caching.nbytes > 0


LONGER = SYSTEM + "?tiger=1000\n" * 8
FIRST, SECOND = (len(ids_of(text + "?")) for text in (SYSTEM, LONGER))
ENDS = [*((SYSTEM, "lion"), (SYSTEM, "wolf"), (LONGER, "lion"), (LONGER, "wolf"), (LONGER, "otter"), (SYSTEM, "cat"))]


@pytest.mark.parametrize(
    ("prompts", "cached"),
    [
        ([ids_of(f"{text}?{word}=") for text, word in ENDS], [0, 0, FIRST, FIRST, SECOND, FIRST]),
        ([ids_of(SYSTEM)] * 3, [0, 0, len(ids_of(SYSTEM)) - 1]),
        ([[5] * (LEAST_PREFIX - 1) + end for end in ([6, 7] * 40, [7, 6] * 40, [8, 9] * 80)], [0, 0, 0]),
    ],
    ids=["a longer beginning beside a shorter one", "the same prompt again", "short beginnings"],
)
def test_the_longest_beginning_is_used(prompts: list[list[int]], cached: list[int], reads: Reads) -> None:
    assert [reads.read(prompt)[1] for prompt in prompts] == cached
    assert reads.ran == [len(prompt) - number for prompt, number in zip(prompts, cached, strict=True)]
    assert (reads.caching.nbytes > 0) is any(cached)


def test_beginnings_fit_into_the_memory_and_the_one_used_last_stays() -> None:
    model, _ = kvpolicy.tiny()
    starts = [[number, 5] * 50 for number in (6, 7, 8)]

    def ask(reads: Reads, start: list[int], end: int) -> int:
        return reads.read([*start, end, 9, 9])[1]

    with torch.inference_mode(), kvpolicy.attach(model, "snapkv@0.3", chunks="hold"):
        one = Reads(model, 1 << 30)
        for end in (10, 11):
            ask(one, starts[0], end)
        memory = 2 * one.caching.nbytes
        reads = Reads(model, memory)
        for start in starts[:2]:
            assert [ask(reads, start, end) for end in (10, 11, 12)] == [0, 0, 100]
        assert ask(reads, starts[0], 13) == 100
        assert [ask(reads, starts[2], end) for end in (10, 11, 12)] == [0, 0, 100]
        assert ask(reads, starts[0], 14) == 100, "it was used after the second one"
        assert ask(reads, starts[1], 14) == 0
        assert reads.caching.nbytes <= memory
        none = Reads(model, 1)
        assert [ask(none, starts[0], end) for end in (10, 11, 12)] == [0, 0, 0] and none.caching.nbytes == 0


def test_keys_with_other_angles_are_not_reused() -> None:
    rope: Any = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        vocab_size=40,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).eval()
    start = [5, 6] * 50
    with torch.inference_mode(), kvpolicy.attach(model, "snapkv@0.3", chunks="hold"):
        reads = Reads(model, 1 << 30)
        short = [reads.read([*start, end])[1] for end in (7, 8, 9)]
        long = [reads.read([*start, end] * 2)[1] for end in (7, 8, 9)]
    assert short == [0, 0, 100]
    assert long == [0, 0, 0]


def test_common_length() -> None:
    draw = random.Random(0)
    for _ in range(300):
        one, other = ([draw.randrange(2) for _ in range(draw.randrange(9))] for _ in range(2))
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        assert common_length(one, other) == same


def test_a_beginning_that_was_broken_off_is_not_held(reads: Reads) -> None:
    prompts = [ids_of(SYSTEM + question) for question in QUESTIONS]

    def stop(module: Any, args: Any) -> None:
        raise BrokenOff

    reads.read(prompts[0])
    hook = reads.model.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(BrokenOff):
        reads.read(prompts[1])
    hook.remove()
    assert reads.caching.nbytes == 0
    cache, cached = reads.read(prompts[2])
    alone = PolicyCache(reads.model, prompt=len(prompts[2]))
    reads.model(torch.tensor([prompts[2]]), cache=alone)
    assert cached == 0 and held(cache) == held(alone)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_server_says_how_many_tokens_it_did_not_compute(rows: int) -> None:
    capacity = Capacity(rows=rows, length=512)

    def ask(port: int) -> list[Any]:
        with client_of(port) as client:
            return [
                client.completions.create(model="tiny", prompt=SYSTEM + question, max_tokens=5, temperature=0)
                for question in QUESTIONS
            ]

    with running(kvpolicy.tiny(), policy="snapkv@0.4", capacity=capacity) as port:
        alone = ask(port)
        assert metric(port, "cached_tokens_total") == metric(port, "prefix_nbytes") == 0
    with running(kvpolicy.tiny(), policy="snapkv@0.4", capacity=capacity, prefix_memory=1 << 24) as port:
        together = ask(port)
        cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in together]
        assert metric(port, "cached_tokens_total") == sum(cached)
        assert 0 < metric(port, "prefix_nbytes") <= 1 << 24
    assert [answer.choices[0].text for answer in together] == [answer.choices[0].text for answer in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        assert ours.usage.kvpolicy["kept_tokens"] == theirs.usage.kvpolicy["kept_tokens"]
    assert cached[:2] == [0, 0] and all(number >= len(ids_of(SYSTEM)) for number in cached[2:])


def test_a_model_that_does_not_go_on_is_refused() -> None:
    model = type("JambaForCausalLM", (), {"config": JambaConfig(num_hidden_layers=2)})()
    with pytest.raises(kvpolicy.KVPolicyError, match="whose states transformers does not continue"):
        PrefixCaching(model, 1 << 20, lambda cache, ids: None)

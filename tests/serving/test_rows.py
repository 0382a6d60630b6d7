"""Several requests in one batch: every answer is the one that its request has alone, and memory stays."""

from __future__ import annotations

import gc
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import kvpolicy
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.forwards import ManyRows
from kvpolicy.serving.prefix import PrefixFile
from tests.sampling import product
from tests.serving.servers import client_of, metric, running, wait_for
from tests.serving.test_formats import FORMAT
from tests.vllm.models import save_text

PAIRS = [("tiger", 4821), ("lion", 1234), ("wolf", 9310), ("sheep", 7764), ("falcon", 1937), ("otter", 5523)]


def prompt_of(number: int) -> str:
    draw = random.Random(number)
    pairs = draw.sample(PAIRS, 4)
    text = "".join(f"{word}={value}\n" for word, value in pairs * draw.randrange(1, 4))
    return f"{text}?{pairs[1][0]}={pairs[1][1]}\n?{pairs[0][0]}="


def request_of(number: int) -> dict[str, Any]:
    draw = random.Random(-number)
    sampled = {"temperature": 2.0, "seed": number} if number % 3 == 0 else {"temperature": 0}
    fields = {"model": "tiny", "prompt": prompt_of(number % 8), "max_tokens": draw.randrange(1, 24), **sampled}
    if number % 5 == 1:
        return {**fields, "extra_body": {"response_format": FORMAT}}
    if number % 4 == 3:
        return {**fields, "logprobs": 2, "presence_penalty": 1.0, "extra_body": {"top_k": 3}}
    return fields


def answers(port: int, numbers: range, threads: int) -> list[tuple[str, Any]]:
    with (
        client_of(port) as client,
        ThreadPoolExecutor(threads) as pool,
    ):
        made = list(pool.map(lambda number: client.completions.create(**request_of(number)), numbers))
    return [(answer.choices[0].text, answer.usage) for answer in made]


def caches() -> int:
    """Caches that are alive in this process."""
    gc.collect()
    return sum(isinstance(each, PolicyCache) for each in gc.get_objects())


@product("policy", ["snapkv@0.5", "h2o@24", "full", "snapkv+tokenwise:bits=4@0.5", "window@32"])
def test_answers_are_those_that_requests_have_alone(policy: str) -> None:
    """Greedy ones and sampled ones, some with a format, with prompts and answers of many lengths.

    Some have the same prompt, which is sampled as each of them asks.
    """
    numbers = range(1, 13)
    before = caches()
    with running(kvpolicy.tiny(), policy=policy) as port:
        alone = answers(port, numbers, 1)
    with running(kvpolicy.tiny(), policy=policy, capacity=Capacity(rows=4, length=256)) as port:
        together = answers(port, numbers, 6)
        assert metric(port, "rows") == 4 and metric(port, "requests_running") == 0
        assert caches() == before + 1, "that of the rows"
    assert [text for text, _ in together] == [text for text, _ in alone]
    for (_, ours), (_, theirs) in zip(together, alone, strict=True):
        assert (ours.completion_tokens, ours.prompt_tokens) == (theirs.completion_tokens, theirs.prompt_tokens)
        for name in ("kept_tokens", "full_nbytes"):
            assert ours.kvpolicy[name] == theirs.kvpolicy[name]
        assert ours.kvpolicy["cache_nbytes"] > 0


def test_an_error_in_a_step_ends_the_rows_in_flight_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = True
    step = ManyRows.step

    def fail(self: ManyRows, tokens: list[int]) -> Any:
        nonlocal broken
        if broken:
            broken = False
            raise ValueError("a defect of the model")
        return step(self, tokens)

    monkeypatch.setattr(ManyRows, "step", fail)
    with running(kvpolicy.tiny(), policy="snapkv@0.5", capacity=Capacity(rows=2, length=256)) as port:
        with pytest.raises(openai.InternalServerError, match=r"failed to answer \(ValueError\)"):
            answers(port, range(7, 8), 1)
        assert answers(port, range(7, 8), 1)[0][0]


def test_a_prompt_at_which_the_model_fails_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a defect of the model")

    # Pytest keeps records of errors, which have caches in their frames.
    monkeypatch.setattr(logging.getLogger("kvpolicy.serving"), "propagate", False)
    model, tokenizer = kvpolicy.tiny()
    before = caches()
    with running((model, tokenizer), policy="snapkv@0.5", capacity=Capacity(rows=2, length=256)) as port:
        hook = model.lm_head.register_forward_hook(fail)  # behind layers, whose keys the cache has
        with client_of(port) as client, pytest.raises(openai.InternalServerError):
            client.completions.create(**request_of(1))
        hook.remove()
        wait_for(lambda: caches() == before + 1)  # that of the rows


def test_rows_start_from_a_saved_cache(tmp_path: Path) -> None:
    model, tokenizer = kvpolicy.tiny()
    text = "".join(f"{word}={value}\n" for word, value in PAIRS)
    policy = "kvzip@0.5"
    save_text((model, tokenizer), text, policy, tmp_path / "text.safetensors")
    file = PrefixFile(tmp_path / "text.safetensors", kvpolicy.Policy.parse(policy))

    def ask(number: int) -> str:
        with client_of(port) as client:
            prompt = f"{text}?{PAIRS[number][0]}="
            made = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)
        return made.choices[0].text

    with running((model, tokenizer), file.load, policy=policy) as port:
        alone = [ask(number) for number in range(6)]
    with (
        running((model, tokenizer), file.load, policy=policy, capacity=Capacity(rows=3, length=256)) as port,
        ThreadPoolExecutor(6) as pool,
    ):
        assert list(pool.map(ask, range(6))) == alone
    shared = PrefixFile(tmp_path / "text.safetensors", kvpolicy.Policy.parse(policy), shared=True)
    with (
        pytest.raises(kvpolicy.KVPolicyError, match="--share-prefix must be without --rows, got 3 rows"),
        running((model, tokenizer), shared.load, policy=policy, capacity=Capacity(rows=3, length=256)),
    ):
        pass


def test_rows_that_fit_into_a_memory() -> None:
    model, _ = kvpolicy.tiny()
    policy = kvpolicy.Policy.parse("snapkv@0.2:least=32")
    assert Capacity().sizes(model, policy) == (1, None)
    assert Capacity(rows=1, length=100).sizes(model, policy) == (1, 100)
    assert Capacity(rows=8).sizes(model, policy) == (8, 2048)
    each = kvpolicy.plan(model, policy, prompt=512).nbytes
    assert Capacity(memory=f"{5 * each}B", length=512).sizes(model, policy) == (5, 512)
    assert Capacity(memory=f"{5 * each}B", length=512, rows=5).sizes(model, policy) == (5, 512)
    for rows in (3, 40):  # of the memory that the plan of so many rows says
        planned = kvpolicy.plan(model, policy, batch=rows, prompt=512).nbytes
        assert Capacity(memory=f"{planned}B", length=512).sizes(model, policy) == (rows, 512)
        assert Capacity(memory=f"{planned - 1}B", length=512).sizes(model, policy) == (rows - 1, 512)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"enough for the cache of 6 rows of 512 tokens, .* got 1KiB"):
        Capacity(memory="1KiB", length=512, rows=6).sizes(model, policy)
    with pytest.raises(kvpolicy.KVPolicyError, match="enough for the cache of 1 row of 512"):
        Capacity(memory="1KiB", length=512).sizes(model, policy)
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(kvpolicy.KVPolicyError, match="--prefill-share must be above 0 and at most 1"):
            Capacity(share=wrong)
    with pytest.raises(kvpolicy.KVPolicyError, match="must be"):
        Capacity(memory="many")

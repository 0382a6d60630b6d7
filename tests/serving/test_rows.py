"""Several requests in one batch: every answer is the one that its request has alone, and memory stays."""

from __future__ import annotations

import gc
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import kvpolicy
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.forwards import ManyRows
from kvpolicy.serving.metrics import OUTCOMES
from kvpolicy.serving.prefix import PrefixFile
from tests.sampling import product
from tests.serving.servers import metric, running, wait_for

PAIRS = [("tiger", 4821), ("lion", 1234), ("wolf", 9310), ("sheep", 7764), ("falcon", 1937), ("otter", 5523)]


def prompt_of(number: int) -> str:
    draw = random.Random(number)
    pairs = draw.sample(PAIRS, 4)
    text = "".join(f"{word}={value}\n" for word, value in pairs * draw.randrange(1, 4))
    return f"{text}?{pairs[1][0]}={pairs[1][1]}\n?{pairs[0][0]}="


def request_of(number: int) -> dict[str, Any]:
    draw = random.Random(-number)
    sampled = {"temperature": 2.0, "seed": number} if number % 3 == 0 else {"temperature": 0}
    return {"model": "tiny", "prompt": prompt_of(number), "max_tokens": draw.randrange(1, 24), **sampled}


def answers(port: int, numbers: range, threads: int) -> list[tuple[str, Any]]:
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(threads) as pool,
    ):
        made = list(pool.map(lambda number: client.completions.create(**request_of(number)), numbers))
    return [(answer.choices[0].text, answer.usage) for answer in made]


@product("policy", ["snapkv@0.5", "h2o@24", "full", "snapkv+tokenwise:bits=4@0.5", "window@32"])
def test_answers_are_those_that_requests_have_alone(policy: str) -> None:
    """Greedy ones and sampled ones, with prompts and answers of many lengths."""
    numbers = range(1, 13)
    with running(kvpolicy.tiny(), policy=policy) as port:
        alone = answers(port, numbers, 1)
    with running(kvpolicy.tiny(), policy=policy, capacity=Capacity(rows=4, length=256)) as port:
        together = answers(port, numbers, 6)
        assert metric(port, "rows") == 4 and metric(port, "requests_running") == 0
    assert [text for text, _ in together] == [text for text, _ in alone]
    for (_, ours), (_, theirs) in zip(together, alone, strict=True):
        assert (ours.completion_tokens, ours.prompt_tokens) == (theirs.completion_tokens, theirs.prompt_tokens)
        for name in ("kept_tokens", "full_nbytes"):
            assert ours.kvpolicy[name] == theirs.kvpolicy[name]
        assert ours.kvpolicy["cache_nbytes"] > 0


def caches() -> int:
    """Caches that are alive in this process."""
    gc.collect()
    return sum(isinstance(each, PolicyCache) for each in gc.get_objects())


def trouble(port: int, number: int) -> str:
    """One request of a mixed lot: what became of it."""
    kind = ("whole", "stream", "leaves", "gives up", "too long", "unlucky", "hangs up", "choices")[number % 8]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        fields = request_of(number)
        api: Any = client.completions
        if kind == "whole":
            api.create(**fields)
        elif kind == "stream":
            list(api.create(**fields, stream=True))
        elif kind == "leaves":
            stream = api.create(**{**fields, "max_tokens": 150}, stream=True)
            next(iter(stream))
            stream.close()
        elif kind == "gives up":
            with suppress(openai.APITimeoutError):
                api.create(**{**fields, "max_tokens": 150}, timeout=0.05)
        elif kind == "too long":
            with pytest.raises(openai.BadRequestError, match="must fit into 256 tokens"):
                api.create(**{**fields, "max_tokens": 250})
        elif kind == "unlucky":
            with pytest.raises(openai.InternalServerError, match="failed to answer"):
                api.create(**{**fields, "prompt": UNLUCKY})
        elif kind == "hangs up":
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                body = json.dumps(fields).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        else:
            api.create(**fields, n=2)
    return kind


class Silent:
    """A log that keeps nothing."""

    def info(self, *args: Any, **kwargs: Any) -> None:
        pass

    error = info


UNLUCKY = "unlucky=1\n" * 3


def test_it_survives_what_clients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that leave, wait no longer or hang up, prompts that are too long, and a model that fails for a prompt.

    `test_storm.py` has a thousand requests, of more kinds.
    """
    # Records of errors, which pytest keeps, have the caches in their frames.
    monkeypatch.setattr("kvpolicy.serving.generation.log", Silent())
    model, tokenizer = kvpolicy.tiny()
    unlucky = tokenizer(UNLUCKY).input_ids
    embed = model.get_input_embeddings()

    def fail(module: Any, args: Any) -> None:
        if args[0].shape[1] == len(unlucky) and args[0][0].tolist() == unlucky:
            raise ValueError("a defect of the model")

    hook = embed.register_forward_pre_hook(fail)
    policy = "snapkv@0.5"
    try:
        with running((model, tokenizer), policy=policy, capacity=Capacity(rows=3, length=256)) as port:
            before = answers(port, range(1, 5), 4)
            alive, held = caches(), metric(port, "cache_nbytes")
            with ThreadPoolExecutor(8) as pool:
                kinds = list(pool.map(lambda number: trouble(port, number), range(40)))
            wait_for(lambda: metric(port, "requests_running") == metric(port, "requests_waiting") == 0)
            assert answers(port, range(1, 5), 4) == before
            assert (caches(), metric(port, "cache_nbytes")) == (alive, held)
            outcomes = {name: metric(port, f'requests_total{{outcome="{name}"}}') for name in OUTCOMES}
            assert outcomes["failed"] == kinds.count("unlucky") and outcomes["refused"] == kinds.count("too long")
            assert outcomes["cancelled"] > 0
            assert outcomes["answered"] >= 8 + kinds.count("whole") + kinds.count("stream") + 2 * kinds.count("choices")
    finally:
        hook.remove()


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


def test_rows_start_from_a_saved_cache(tmp_path: Path) -> None:
    model, tokenizer = kvpolicy.tiny()
    text = "".join(f"{word}={value}\n" for word, value in PAIRS)
    policy = "kvzip@0.5"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        model(ids, cache=cache)
        cache.save(tmp_path / "text.safetensors", tokens=ids)
    file = PrefixFile(tmp_path / "text.safetensors", kvpolicy.Policy.parse(policy))

    def ask(number: int) -> str:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
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

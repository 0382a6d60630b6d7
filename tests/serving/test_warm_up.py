"""The warm-up of a server: it compiles one graph for requests of all kinds, and leaves nothing behind."""

from __future__ import annotations

import logging
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.prefix import Prefix
from kvpolicy.serving.warm_up import warm_up
from kvpolicy_eval.bench.models import llama
from tests.engine.graphs import Counter
from tests.serving.servers import client_of, get, metric, running


def ask(port: int) -> str:
    with client_of(port) as client:
        answer = client.completions.create(model="tiny", prompt="?lion=" * 20, max_tokens=8, temperature=0)
    return answer.choices[0].text


@pytest.mark.parametrize("options", [{}, {"capacity": Capacity(rows=2, length=400)}, {"prefix_memory": 1 << 28}])
def test_nothing_is_counted(options: dict[str, Any]) -> None:
    both: list[str] = []
    for warm in (False, True):
        with running(kvpolicy.tiny(), policy="h2o+kivi:bits=4@0.5", warm=warm, **options) as port:
            # But for the bytes of rows, which stay once there are any.
            both.append(re.sub("\nkvpolicy_cache_nbytes .*", "", get(port, "/metrics")))
            assert ask(port)
            assert metric(port, "prompt_tokens_total") == len(kvpolicy.tiny()[1]("?lion=" * 20).input_ids)
    assert both[0] == both[1]


def test_a_failure_does_not_keep_the_server_from_beginning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = kvpolicy.tiny()
    monkeypatch.setattr("kvpolicy.serving.warm_up.STEPS", -500)  # it leaves so much room that the prompt is too long
    monkeypatch.setattr("kvpolicy.serving.warm_up.LONGEST", 10**6)
    with caplog.at_level(logging.WARNING, "kvpolicy.serving"), running((model, tokenizer), warm=True) as port:
        assert "The warm-up failed." in caplog.text
        assert ask(port)


class Scheduler:
    """Takes each answer until its end."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, int]] = []

    def submit(self, answers: list[Any]) -> None:
        (answer,) = answers
        given = len(answer.text)
        while not answer.take(torch.zeros(3), 1):
            pass
        self.texts.append((given, len(answer.text)))
        answer.end(None, None)


@pytest.mark.parametrize(
    ("prefix", "length", "texts"),
    [
        (0, None, [(512, 516)]),
        (0, 700, [(512, 516)]),
        (0, 100, [(95, 99)]),
        (0, 6, [(1, 5)]),
        (0, 5, []),
        (400, None, [(912, 916)]),
        (1019, None, []),
        (1018, None, [(1019, 1023)]),
    ],
)
def test_texts_fit_behind_a_prefix_and_into_rows(prefix: int, length: int | None, texts: list[tuple[int, int]]) -> None:
    """Of a model with 1,024 positions."""
    model = llama(2, 64, 4, kv_heads=2, positions=1024)
    scheduler: Any = Scheduler()
    held = Prefix(ids=(1,) * prefix, cache=None) if prefix else None
    warm_up(model, scheduler, held, length)
    assert scheduler.texts == texts


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2, "frequency_penalty": 1.0},
    {"temperature": 0.7, "n": 2, "extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3}},
    {"temperature": 0, "stop": ["7", "no\n"]},
]
"""What requests ask for besides their lengths."""


def model_and_tokenizer() -> tuple[Any, Any]:
    """A Llama of two layers with random weights."""
    _, tokenizer = kvpolicy.tiny()
    return llama(2, 64, 4, kv_heads=2, vocabulary=len(tokenizer), positions=512), tokenizer


def request(port: int, number: int) -> list[str]:
    """The answers to one of many requests, no two of the same length; every fourth client leaves."""
    draw = random.Random(number)
    prompt = "".join(draw.choice("abcdefghij0123456789=\n") for _ in range(20 + 7 * number))
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 2 + number, "seed": number} | KINDS[number % len(KINDS)]
    with client_of(port) as client:
        api: Any = client.completions
        if number % 4 == 3:
            stream = api.create(**fields | {"max_tokens": 60}, stream=True)
            next(iter(stream))
            stream.close()
            return []
        return [choice.text for choice in api.create(**fields).choices]


def serve(policy: str, compile: bool) -> tuple[list[list[str]], Counter]:
    """The answers to 14 requests in three rows, and what their steps were compiled to, all of it by the warm-up."""
    model, tokenizer = model_and_tokenizer()
    counter = Counter()
    model.generation_config.compile_config = counter.config if compile else None
    how: Any = {"capacity": Capacity(rows=3, length=256), "compile": compile, "warm": compile}
    with running((model, tokenizer), policy=policy, **how) as port, ThreadPoolExecutor(5) as pool:
        assert counter.graphs == int(compile)
        return list(pool.map(lambda number: request(port, number), range(14))), counter


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "policy", ["snapkv@0.5", "h2o+kivi:group_size=4:residual_length=8@0.5", "uniform/adakv+h2o@0.5", "full"]
)
def test_requests_share_one_graph(policy: str) -> None:
    """Whatever their lengths and parameters are, and whichever rows are free; sizes are constants of the graph."""
    expected, _ = serve(policy, compile=False)
    answers, counted = serve(policy, compile=True)
    assert answers == expected
    assert (counted.graphs, counted.sizes) == (1, 0)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_request_to_one_row_compiles_nothing() -> None:
    model, tokenizer = model_and_tokenizer()
    how: dict[str, Any] = {"policy": "snapkv@0.5", "capacity": Capacity(rows=1, length=400)}
    with running((model, tokenizer), **how) as port:
        expected = ask(port)
    counter = Counter()
    model.generation_config.compile_config = counter.config
    with running((model, tokenizer), **how, compile=True, warm=True) as port:
        assert counter.graphs == 1
        assert ask(port) == expected
    assert counter.graphs == 1

"""Compiled steps of the server: one graph for requests of all kinds, and the answers of uncompiled ones."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvpolicy
from kvpolicy.serving.capacity import Capacity
from kvpolicy_eval.bench.models import llama
from tests.engine.graphs import Counter
from tests.serving.servers import client_of, running

pytestmark = pytest.mark.usefixtures("fresh_compiler")

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


def ask(port: int, number: int) -> list[str]:
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
    """The answers to 14 requests in three rows, and what their steps were compiled to."""
    model, tokenizer = model_and_tokenizer()
    counter = Counter()
    model.generation_config.compile_config = counter.config if compile else None
    with (
        running((model, tokenizer), policy=policy, capacity=Capacity(rows=3, length=256), compile=compile) as port,
        ThreadPoolExecutor(5) as pool,
    ):
        return list(pool.map(lambda number: ask(port, number), range(14))), counter


@pytest.mark.parametrize(
    "policy", ["snapkv@0.5", "h2o+kivi:group_size=4:residual_length=8@0.5", "uniform/adakv+h2o@0.5", "full"]
)
def test_requests_share_one_graph(policy: str) -> None:
    """Whatever their lengths and parameters are, and whichever rows are free; sizes are constants of the graph."""
    expected, none = serve(policy, compile=False)
    assert none.graphs == 0
    answers, counted = serve(policy, compile=True)
    assert answers == expected
    assert (counted.graphs, counted.sizes) == (1, 0)

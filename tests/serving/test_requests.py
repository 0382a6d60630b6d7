"""The bodies of requests, without a server."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("openai")

from kvpolicy.serving.requests import RequestError, parse_chat, parse_completion
from kvpolicy.spec.errors import KVPolicyError

TEXT = {"prompt": "?"}
CHAT = {"messages": [{"role": "user", "content": "?"}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"stream_options": []}, "stream_options must be a JSON object, got a list"),
        ({"max_tokens": True}, "max_tokens must be an integer from 1 to 2147483647, got true"),
        ({"max_tokens": 2**40}, "max_tokens must be an integer"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be an integer from 1 to 2147483647, got 0"),
        ({"max_tokens": 2**31}, "max_tokens must be an integer from 1 to 2147483647, got 2147483648"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to 100, got NaN"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": "one"}, "seed must be an integer"),
        ({"temperature": float("inf")}, "temperature must be a number from 0 to 100, got Infinity"),
        ({"temperature": 10**400}, "temperature must be a number from 0 to 100, got 1000"),
        ({"temperature": 100.1}, "temperature must be a number from 0 to 100"),
        ({"top_p": float("nan")}, "top_p must be a number from 0 to 1, got NaN"),
        ({"presence_penalty": float("nan")}, "got presence_penalty=NaN"),
        ({"frequency_penalty": 1e308}, "got frequency_penalty=1e+308"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop": ["a"] * 17}, "at most 16 strings of at most 256 characters, got 17 of up to 1; try"),
        ({"stop": "a" * 257}, "at most 16 strings of at most 256 characters, got 1 of up to 257; try"),
        ({"logprobs": 0}, "got logprobs=0; try it without logprobs"),
        ({"logit_bias": {"5": 1}}, 'got logit_bias={"5": 1}'),
        ({"generation_config": "{}"}, "got generation_config="),
        ({"model": 3}, "model must be 'tiny', the one that this server has, got 3"),
        ({"suffix": "x" * 99}, '"xxxxx'),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    for parse, body in ((parse_chat, CHAT), (parse_completion, TEXT)):
        with pytest.raises(KVPolicyError, match=re.escape(message)):
            parse({**body, **fields}, "tiny")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": "?"}, "messages must be a list"),
        ({"messages": ["?"]}, "A message must be an object with a role"),
        ({"tools": {}, "prompt": "?"}, "got prompt="),
        ({"tools": [1]}, "tools must be a list of objects"),
        ({"tools": "f"}, "tools must be a list, got a string"),
        ({"chat_template_kwargs": {"tokenize": False, "a": 1}}, "got tokenize; try"),
    ],
)
def test_wrong_fields_of_a_chat(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        parse_chat({**CHAT, **fields}, "tiny")


@pytest.mark.parametrize("body", [[], "text", None, 3])
def test_a_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(KVPolicyError, match="must be a JSON object"):
        parse_completion(body, "tiny")


def test_another_model_has_its_own_status() -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion({**TEXT, "model": "gpt"}, "tiny")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_fields_without_effect_are_left_out() -> None:
    """The seed too, since transformers would set it before the request has its turn."""
    given = {"user": "me", "n": 1, "logit_bias": {}, "seed": 3, "temperature": 0.5, "top_p": None, "max_tokens": 4}
    call = parse_completion({**TEXT, **given}, "tiny")
    assert call.body == {"prompt": "?", "model": "tiny", "max_tokens": 4, "stream": False, "temperature": 0.5}
    assert (call.seed, call.sample, call.max_tokens) == (3, True, 4)
    assert parse_completion({**TEXT, "temperature": 0, "stop": "."}, "tiny").sample is False
    assert parse_completion({**TEXT, "stop": ["a" * 256] * 16}, "tiny").stop == ("a" * 256,) * 16
    assert parse_completion(TEXT, "tiny").sample is None


@pytest.mark.parametrize(("temperature", "sample"), [(1e-320, False), (9e-6, False), (1e-5, True), (100, True)])
def test_a_temperature_near_zero_is_greedy(temperature: float, sample: bool) -> None:
    call = parse_completion({**TEXT, "temperature": temperature}, "tiny")
    assert call.sample is sample and ("temperature" in call.body) is sample
    assert parse_completion({**TEXT, "top_p": 0.5}, "tiny").sample is True


def test_parts_of_text_and_tool_calls_are_passed_on() -> None:
    """Parts are joined without a space, as they were written; transformers would put one between them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    parsed = parse_chat({"messages": messages}, "tiny").body["messages"]
    assert parsed[0] == {"role": "user", "content": "ab"}
    assert parsed[1] == {"role": "assistant", "tool_calls": [call]}
    assert parsed[2] == messages[2]

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
        ({"max_tokens": True}, "max_tokens must be an integer of at least 1, got true"),
        ({"max_tokens": 2**40}, "max_tokens must be an integer"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be an integer of at least 1, got 0"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to 100, got NaN"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": "one"}, "seed must be an integer"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"logprobs": 0}, "got logprobs=0; try it without logprobs"),
        ({"logit_bias": {"5": 1}}, 'got logit_bias={"5": 1}'),
        ({"generation_config": "{}"}, "got generation_config="),
        ({"model": 3}, "model must be 'tiny', the one that this server has, got 3"),
        ({"suffix": "x" * 99}, '"xxxxx'),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_wrong_fields(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        parse_chat({**CHAT, **fields}, "tiny") if kind == "chat" else parse_completion({**TEXT, **fields}, "tiny")


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
    assert parse_completion(TEXT, "tiny").sample is None


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

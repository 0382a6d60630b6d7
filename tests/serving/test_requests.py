"""The bodies of requests, without a server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat

from kvpolicy.serving.requests import IGNORED, NEUTRAL, Call, RequestError, parse_chat, parse_completion
from kvpolicy.serving.templates import IGNORED_IN_PARTS
from kvpolicy.text.errors import KVPolicyError

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
        ({"presence_penalty": float("nan")}, "presence_penalty must be a number from -2 to 2, got NaN"),
        ({"frequency_penalty": 1e308}, "frequency_penalty must be a number from -2 to 2, got 1e+308"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": -1}, "repetition_penalty must be a number from 0 to 100, got -1"),
        ({"top_k": -2}, "top_k must be an integer from -1"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"),
        ({"n": 0}, "n must be an integer from 1 to 16, got 0; try 2"),
        ({"n": 17}, "n must be an integer from 1 to 16, got 17; try 2"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop": [""]}, "stop must be a string or a list of strings"),
        ({"stop": ["a"] * 17}, "at most 16 strings of at most 256 characters, got 17 of up to 1; try"),
        ({"stop": "a" * 257}, "at most 16 strings of at most 256 characters, got 1 of up to 257; try"),
        ({"logprobs": "yes"}, "logprobs must be"),
        ({"logit_bias": {"5": 1}}, 'got logit_bias={"5": 1}'),
        ({"generation_config": "{}"}, "got generation_config="),
        ({"model": 3}, "model must be 'tiny', the one that this server has, got 3"),
        ({"model": "x" * 9999}, 'got "' + "x" * 59 + "..."),
        ({"suffix": "x" * 99}, '"xxxxx'),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    for parse, body in ((parse_chat, CHAT), (parse_completion, TEXT)):
        with pytest.raises(KVPolicyError, match=re.escape(message)):
            parse({**body, **fields}, "tiny")


NO_TOOLS = "tools must be a list of objects with a named function each"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": "?"}, "messages must be a list"),
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": ["?"]}, "A message must be an object with a role"),
        ({"messages": [{"content": "?"}]}, "A message must be an object with a role"),
        (
            {"messages": [{"role": f"role {number}", "content": "?"} for number in range(17)]},
            "messages must have at most 16 different roles, got 17; try user",  # each costs a look at the template
        ),
        ({"tools": {}, "prompt": "?"}, "got prompt="),
        ({"tools": [1]}, "tools must be a list of objects"),
        ({"tools": "f"}, "tools must be a list, got a string"),
        ({"tools": [{"function": {}}]}, NO_TOOLS),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, NO_TOOLS),
        ({"tools": [{"function": 1}]}, NO_TOOLS),
        ({"chat_template_kwargs": {"tokenize": False, "a": 1}}, "got tokenize; try"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "must be equal, got 4 and 5; try one of them"),
        ({"stream_options": {"include_usage": 1}}, "include_usage of stream_options must be true or false, got 1"),
        ({"stream_options": {"include_obfuscation": True}}, "only include_usage, got include_obfuscation=true; try"),
        ({"stream_options": {"continuous_usage_stats": True}}, "only include_usage, got continuous_usage_stats=true"),
        ({"parallel_tool_calls": False}, "got false; try it without parallel_tool_calls"),
        ({"top_logprobs": 2}, "logprobs must be true with top_logprobs, got top_logprobs=2 alone"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20, got 21; try 5"),
        ({"logprobs": 2}, "logprobs must be true or false, got 2"),
    ],
)
def test_wrong_fields_of_a_chat(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        parse_chat({**CHAT, **fields}, "tiny")


def test_unusual_fields_of_a_chat() -> None:
    usual = {"max_tokens": 4, "max_completion_tokens": 4, "stream_options": {"include_obfuscation": False}}
    assert parse_chat({**CHAT, **usual}, "tiny").max_tokens == 4
    messages = [{"role": f"role {number}", "content": "?"} for number in range(16)]
    assert len(parse_chat({"messages": messages * 2}, "tiny").body["messages"]) == 32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *((body, "must be a JSON object") for body in ([], "text", None, 3)),
        ({"prompt": []}, "must have at least one token"),
        ({"prompt": ["a", ""]}, "must have at least one token"),
        ({"prompt": [1, 2]}, "must be a string or a list of strings, got"),
        ({"prompt": ["a"] * 257}, "must be at most 256 prompts, got 257"),
    ],
)
def test_wrong_bodies_and_prompts(body: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
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
    assert (call.sampling.seed, call.sample, call.max_tokens) == (3, True, 4)
    assert parse_completion({**TEXT, "temperature": 0, "stop": "."}, "tiny").sample is False
    assert parse_completion({**TEXT, "stop": ["a" * 256] * 16}, "tiny").stop == ("a" * 256,) * 16
    assert parse_completion(TEXT, "tiny").sample is None


@pytest.mark.parametrize(("temperature", "sample"), [(1e-320, False), (9e-6, False), (1e-5, True), (100, True)])
def test_a_temperature_near_zero_is_greedy(temperature: float, sample: bool) -> None:
    call = parse_completion({**TEXT, "temperature": temperature}, "tiny")
    assert call.sample is sample and ("temperature" in call.body) is sample
    assert (call == parse_completion({**TEXT, "temperature": 0}, "tiny")) is not sample
    assert parse_completion({**TEXT, "top_p": 0.5}, "tiny").sample is True


HONORED: dict[str, tuple[Any, Callable[[Call], bool]]] = {
    "model": ("tiny", lambda call: call.body["model"] == "tiny"),
    "messages": ([{"role": "user", "content": "!"}], lambda call: call.body["messages"][0]["content"] == "!"),
    "prompt": ("!", lambda call: call.body["prompt"] == "!" and call.prompts == ("!",)),
    "tools": ([{"type": "function", "function": {"name": "f"}}], lambda call: len(call.body["tools"]) == 1),
    "chat_template_kwargs": ({"a": 1}, lambda call: call.body["chat_template_kwargs"] == {"a": 1}),
    "max_tokens": (4, lambda call: call.max_tokens == 4),
    "max_completion_tokens": (4, lambda call: call.max_tokens == 4),
    "temperature": (0.5, lambda call: call.body["temperature"] == 0.5),
    "top_p": (0.5, lambda call: call.body["top_p"] == 0.5),
    "seed": (3, lambda call: call.sampling.seed == 3),
    "stop": (["."], lambda call: call.stop == (".",)),
    "n": (2, lambda call: call.choices == 2),
    "top_k": (5, lambda call: call.sampling.top_k == 5 and call.sample is True),
    "min_p": (0.5, lambda call: call.sampling.min_p == 0.5 and call.sample is True),
    "repetition_penalty": (1.5, lambda call: call.sampling.repetition_penalty == 1.5 and call.sample is None),
    "frequency_penalty": (1.5, lambda call: call.sampling.frequency_penalty == 1.5),
    "presence_penalty": (-1, lambda call: call.sampling.presence_penalty == -1),
    "response_format": ({"type": "json_object"}, lambda call: call.format is not None),
    "tool_choice": ("required", lambda call: call.format is not None and call.format.calls),
    "parallel_tool_calls": (False, lambda call: call.format is not None and ", call" not in call.format.grammar),
    "stream": (True, lambda call: call.stream),
    "stream_options": ({"include_usage": True}, lambda call: call.include_usage),
}
"""Fields with an effect: a value, and how to see that it was taken."""

TOOLS = [{"type": "function", "function": {"name": "f"}}]
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "tool_choice": {"tools": TOOLS},
    "parallel_tool_calls": {"tools": TOOLS, "tool_choice": "required"},
}
"""What some of them are given with."""

TAKEN = {"top_k", "min_p", "repetition_penalty"}
"""Fields of other servers, which this one has too."""

OTHERS = {"guided_json", "ignore_eos", "continue_final_message", "typo"} | TAKEN
"""Fields of other servers."""

LOGPROBS = {"logprobs", "top_logprobs"}
"""Fields whose values depend on the kind of request: see `test_log_probabilities`."""


def fields_of(kind: str) -> set[str]:
    params = chat if kind == "chat" else text
    return set(params.CompletionCreateParamsBase.__annotations__) | OTHERS | {"stream"}


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_every_field_of_the_api_is_honored_or_refused_or_listed_as_ignored(kind: str) -> None:
    """Of the OpenAI types that are installed, so that a new field is covered too."""
    parse, body = (parse_chat, CHAT) if kind == "chat" else (parse_completion, TEXT)
    taken = {
        name for name in HONORED if name in fields_of(kind) | ({"chat_template_kwargs"} if kind == "chat" else set())
    }
    assert len(taken) > 8
    for name in taken:
        value, is_taken = HONORED[name]
        assert is_taken(parse({**body, **BESIDE.get(name, {}), name: value}, "tiny")), name
    plain = parse(body, "tiny")
    for name in IGNORED:
        assert parse({**body, name: "x"}, "tiny") == plain
    for name, values in NEUTRAL.items():
        assert all(parse({**body, name: value}, "tiny") == plain for value in values)
    rest = fields_of(kind) - HONORED.keys() - IGNORED - LOGPROBS
    assert {"logit_bias", "typo"} < rest
    for name in rest:
        with pytest.raises(KVPolicyError, match=f"got {name}=.*try it without {name}\\.$"):
            parse({**body, name: "x"}, "tiny")


def test_log_probabilities() -> None:
    asked = [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)]
    for fields, most in [*asked, ({"logprobs": True, "top_logprobs": 5}, 5)]:
        assert parse_chat({**CHAT, **fields}, "tiny").sampling.logprobs == most
    for fields, most in ({}, None), ({"logprobs": 0}, 0), ({"logprobs": 5}, 5), ({"logprobs": False}, None):
        assert parse_completion({**TEXT, **fields}, "tiny").sampling.logprobs == most
    with pytest.raises(KVPolicyError, match="logprobs must be an integer from 0 to 20, got true"):
        parse_completion({**TEXT, "logprobs": True}, "tiny")


def test_every_answer_has_a_request_of_its_own() -> None:
    call = parse_completion({"prompt": ["a", "b"], "n": 2, "seed": 2**63 - 1, "temperature": 1}, "tiny")
    each = call.each()
    assert [one.body["prompt"] for one in each] == ["a", "a", "b", "b"]
    assert [one.sampling.seed for one in each] == [2**63 - 1, -(2**63)] * 2
    assert all((one.choices, one.prompts, one.sample) == (1, (), True) for one in each)
    chat_call = parse_chat({**CHAT, "n": 3}, "tiny")
    assert [one.body for one in chat_call.each()] == [chat_call.body] * 3


def test_ignored_fields_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "serving.md"
    if not page.exists():
        pytest.skip("the tests stand alone, without the documentation")
    listed = page.read_text(encoding="utf-8")
    assert not [name for name in IGNORED | IGNORED_IN_PARTS if f"`{name}`" not in listed]

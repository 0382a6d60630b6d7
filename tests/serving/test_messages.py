"""Each field of a message reaches the chat template as it was sent, or is refused by its name."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from openai.types import chat

from kvpolicy.serving.templates import parse_message
from kvpolicy.text.errors import KVPolicyError

CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
DECODED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
SAMPLES: dict[str, Any] = {
    "audio": {"id": "x"},
    "content": "text",
    "function_call": {"name": "f", "arguments": "{}"},
    "name": "Ann",
    "refusal": "no",
    "tool_calls": [CALL],
    "tool_call_id": "1",
    "reasoning_content": "hm",
    "reasoning": "hm",
    "annotations": [{"type": "url_citation"}],
    "prefix": True,
    "weight": 0,
    "typo": "x",
}
"""A value of each field that clients send."""

PASSED = {
    "assistant": {"content", "name", "tool_calls", "reasoning_content"},
    "tool": {"content", "name", "tool_call_id"},
}
"""Fields that reach the template, by role; of other roles, `content` and `name`."""

ROLES = ["user", "system", "developer", "assistant", "tool", "function"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_field_is_passed_or_refused(role: str, name: str) -> None:
    message = {"role": role, "content": "said", name: SAMPLES[name]}
    if name in PASSED.get(role, {"content", "name"}):
        wanted = {**message, "tool_calls": [DECODED]} if name == "tool_calls" else message
        assert parse_message(message) == wanted
        return
    with pytest.raises(KVPolicyError, match=rf'got {name}=.* and role="{role}"; try '):
        parse_message(message)


def test_the_fields_of_openai_are_in_the_table() -> None:
    """And their nulls and empty values, which its clients send back with an answer, are as good as none."""
    params = get_args(chat.ChatCompletionMessageParam)
    fields = {name for param in params for name in param.__annotations__}
    assert "tool_call_id" in fields and fields - {"role"} <= SAMPLES.keys()
    answer = {name: None for name in chat.ChatCompletionMessage.model_fields}
    assert parse_message({**answer, "role": "assistant", "content": "Hi"}) == {"role": "assistant", "content": "Hi"}
    empty = {"tool_calls": [], "annotations": [], "refusal": "", "reasoning_content": ""}
    assert parse_message({**empty, "role": "assistant", "content": ""}) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "said", ["I will look.", [{"type": "text", "text": "I will "}, {"type": "text", "text": "look."}]]
)
def test_a_message_with_tool_calls_has_its_text(said: Any) -> None:
    """With arguments as an object, over which templates iterate, and parts joined without a space."""
    parsed = parse_message({"role": "assistant", "content": said, "tool_calls": [CALL]})
    assert parsed == {"role": "assistant", "content": "I will look.", "tool_calls": [DECODED]}
    assert CALL["function"]["arguments"] == '{"a": 1}'
    assert parse_message(parsed) == parsed


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_message_may_have_only_tool_calls_or_reasoning(empty: dict[str, Any]) -> None:
    assert parse_message({"role": "assistant", **empty, "tool_calls": [CALL]})["content"] == ""
    assert parse_message({"role": "assistant", **empty, "reasoning_content": "hm"})["content"] == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"content": None}, "The content of a message must be a string, got nothing"),
        ({"content": 3}, "The content of a message must be a string, got a number"),
        ({"content": [TEXT, IMAGE]}, 'must be text, got a part "image_url"; try text alone'),
        ({"content": [AUDIO]}, 'got a part "input_audio"'),
        ({"content": [{"type": "file", "file": {}}]}, 'got a part "file"'),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, 'got a part "refusal"'),
        ({"content": [{"type": "text", "text": 1}]}, 'got a part "text"'),
        ({"content": ["a"]}, 'got a part "a"'),
        ({"content": [{**TEXT, "cache_control": {}}]}, "only type and text, got cache_control; try it without"),
        ({"name": 3}, "name of a message must be a string, got a number"),
        ({"reasoning_content": {}}, "reasoning_content of a message must be a string, got an object"),
        ({"tool_calls": "f"}, "tool_calls must be a list, got a string"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "A tool call must have a function"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}, "A tool call must have a function"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "A tool call must have a function"),
        ({"tool_calls": [{**CALL, "type": "custom"}]}, "A tool call must have a function"),
        ({"function_call": {"name": "f"}}, "try tool_calls instead"),
        ({"refusal": "no"}, "try content instead"),
        ({"reasoning": "hm"}, "try reasoning_content instead"),
    ],
)
def test_wrong_parts_get_a_sentence(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        parse_message({"role": "assistant", "content": "said", **fields})


def test_a_hint_for_a_prompt_cache_is_ignored() -> None:
    part = {**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert parse_message({"role": "user", "content": [part]})["content"] == "a"

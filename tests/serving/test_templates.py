"""Each field of a message reaches the chat template, or is refused; so is what a template leaves out."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from openai.types import chat

import kvpolicy
from kvpolicy.serving.templates import MOST_REMEMBERED, TemplateUse, adapt_tokenizer, parse_message
from kvpolicy.text.errors import KVPolicyError

CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
USER = {"role": "user", "content": "Weather?"}
ASSISTANT = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "1"}
WHOLE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ m.name or '' }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}"
)
"""A template that uses everything."""

SIMPLE = "{% for m in messages if m.role in ['user', 'assistant', 'system'] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
"""A template without tools, which leaves out messages of other roles, as several published ones do."""


def prompt(template: str, *messages: dict[str, Any], **options: Any) -> str:
    _, tokenizer = kvpolicy.tiny()
    tokenizer.chat_template = template
    assert adapt_tokenizer(tokenizer)
    parsed = [parse_message(message) for message in messages]
    ids = tokenizer.apply_chat_template(parsed, return_dict=True, tokenize=True, **options)["input_ids"]
    assert tokenizer.apply_chat_template(parsed, return_dict=True, tokenize=True, **options)["input_ids"] == ids
    return tokenizer.decode(ids)


def test_every_part_is_in_the_prompt() -> None:
    named = {**USER, "name": "Ann"}
    thinking = {**ASSISTANT, "reasoning_content": "Hm. "}
    text = prompt(WHOLE, {"role": "developer", "content": "Be brief."}, named, thinking, RESULT, tools=TOOLS)
    assert text == "[f]<developer>Be brief.<userAnn>Weather?<assistant>Hm. I look.[f 1]<tool>71"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([USER], {"tools": TOOLS}, "must use tools of a request, got one that leaves out tools; try it without tools"),
        ([USER, ASSISTANT], {}, "got one that leaves out tool_calls; try it without tool_calls"),
        ([USER, RESULT], {}, "got one that leaves out the role tool; try the role system or user"),
        ([{"role": "developer", "content": "?"}, USER], {}, "leaves out the role developer; try the role system"),
        ([USER, {"role": "wizard", "content": ""}], {}, "leaves out the role wizard"),
    ],
)
def test_a_part_that_the_template_leaves_out(messages: Any, options: dict[str, Any], message: str) -> None:
    assert prompt(SIMPLE, {"role": "system", "content": "Be brief."}, USER) == "<system>Be brief.<user>Weather?"
    with pytest.raises(KVPolicyError, match=message):
        prompt(SIMPLE, *messages, **options)


def test_a_template_that_fails_without_a_part_uses_it() -> None:
    needs = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    assert prompt(needs, USER, tools=TOOLS) == "Weather?"
    counts = "{{ tools | length }}"  # a TypeError of Python without tools
    assert prompt(counts, USER, tools=TOOLS) == "1"


@pytest.mark.parametrize(
    ("messages", "options", "lost"),
    [
        ([USER], {"tools": TOOLS}, "tools"),
        ([ASSISTANT], {}, "tool_calls"),
        ([RESULT], {}, "tool_call_id"),
        ([{**USER, "name": "Ann"}], {}, "name"),
        ([{"role": "assistant", "content": "a", "reasoning_content": "b"}], {}, "reasoning_content"),
    ],
)
def test_without_a_template_only_contents_are_joined(messages: Any, options: dict[str, Any], lost: str) -> None:
    _, tokenizer = kvpolicy.tiny()
    assert not adapt_tokenizer(tokenizer)
    joined = tokenizer.apply_chat_template([USER, USER], tools=None)["input_ids"]
    assert joined.tolist()[0] == tokenizer("Weather?\nWeather?")["input_ids"]
    with pytest.raises(
        KVPolicyError, match=f"must have a chat template for {lost}, got one without; try it without {lost}"
    ):
        tokenizer.apply_chat_template([parse_message(message) for message in messages], **options)


def test_a_template_is_looked_at_once_for_each_part() -> None:
    """So that most requests are rendered once, with any number of messages."""
    rendered: list[dict[str, Any]] = []

    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        rendered.append(options)
        return str((messages, options.get("tools")))

    use = TemplateUse(render)
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *[USER, ASSISTANT, RESULT] * 100]
    use.check(messages, {"tools": TOOLS, "tokenize": True})
    assert len(rendered) == 5 and not any(options["tokenize"] for options in rendered)  # the text, and four parts
    use.check(messages, {"tools": TOOLS})
    assert len(rendered) == 5
    for number in range(100):
        use.check([{"role": f"role {number}", "content": "?"}], {})
    assert len(use._used) == MOST_REMEMBERED


def test_an_error_of_a_template_is_the_fault_of_the_request() -> None:
    template = (
        "{% if messages[1] %}{{ raise_exception('two') }}{% endif %}{{ 'Today: ' + today }}{{ messages[0].content }}"
    )
    assert prompt(template, USER, today="Monday") == "Today: MondayWeather?"
    for messages, today, error in (([USER], 20261130, "can only conc"), ([USER, USER], "Monday", "two")):
        with pytest.raises(KVPolicyError, match=f"must fit the model's chat template, got an error: {error}"):
            prompt(template, *messages, today=today)


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
    ("fields", "text"),
    [
        ({"content": "I will look."}, "I will look."),
        ({"content": [{"type": "text", "text": "I will "}, {"type": "text", "text": "look."}]}, "I will look."),
        *(({}, ""), ({"content": None}, ""), ({"content": ""}, ""), ({"content": []}, "")),
    ],
)
def test_a_message_with_tool_calls_or_reasoning_has_its_text(fields: dict[str, Any], text: str) -> None:
    """Or none; arguments are an object, over which templates iterate."""
    parsed = parse_message({"role": "assistant", **fields, "tool_calls": [CALL]})
    assert parsed == {"role": "assistant", "content": text, "tool_calls": [DECODED]}
    assert CALL["function"]["arguments"] == '{"a": 1}'
    assert parse_message(parsed) == parsed
    assert parse_message({"role": "assistant", **fields, "reasoning_content": "hm"})["content"] == text


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

"""What a chat template leaves out of a request is refused, not dropped."""

from __future__ import annotations

from typing import Any

import pytest

import kvpolicy
from kvpolicy.serving.templates import MOST_REMEMBERED, TemplateUse, adapt_tokenizer, parse_message
from kvpolicy.text.errors import KVPolicyError

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
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


def test_a_template_that_python_cannot_compute_is_the_fault_of_the_request() -> None:
    template = "{{ 'Today: ' + today }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert prompt(template, USER, today="Monday").startswith("Today: Monday")
    with pytest.raises(kvpolicy.KVPolicyError, match="must fit the model's chat template, got an error: can only conc"):
        prompt(template, USER, today=20261130)

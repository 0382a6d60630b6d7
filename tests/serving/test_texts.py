"""Texts of the server with a tokenizer that drops the first space: answers, streams, stop strings and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.counting_model import ANSWER, PROMPT, WORDS, counting_model
from tests.serving.servers import client_of, metric, running, wait_for

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %} {{ c.function.name }}{% endfor %}"
    "{% endfor %}"
)
PARSED = {
    "defaults": {"role": "assistant"},
    "start_anchor": "is",
    "fields": {"content": {"close": ["</s>"], "content": "text", "content_args": {"strip": False}}},
}
"""A response template of transformers, with which it parses answers."""


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    model, tokenizer = counting_model()
    tokenizer.chat_template = TEMPLATE
    with running((model, tokenizer)) as port, client_of(port) as made:
        yield made


def answer(client: Any, stream: bool, prompt: str = PROMPT, **fields: Any) -> tuple[list[str], str]:
    """The pieces of a completion, and why it ended."""
    made = client.completions.create(model="tiny", prompt=prompt, temperature=0, stream=stream, **fields)
    chunks = [*made] if stream else [made]
    return [chunk.choices[0].text for chunk in chunks if chunk.choices[0].text], chunks[-1].choices[0].finish_reason


def say(client: Any, stream: bool, **fields: Any) -> tuple[list[str], str]:
    messages = [{"role": "user", "content": PROMPT}]
    made = client.chat.completions.create(model="tiny", messages=messages, temperature=0, stream=stream, **fields)
    if not stream:
        return [made.choices[0].message.content], made.choices[0].finish_reason
    chunks = [*made]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    return texts, chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("ask", [answer, say])
def test_an_answer_begins_with_its_space(ask: Any, client: Any) -> None:
    assert ask(client, False) == ([ANSWER], "stop")
    assert ask(client, True) == ([" paris", "🙂", " on", " river", " seine"], "stop")


@pytest.mark.parametrize("ask", [answer, say])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (" paris", ""),
        ("paris", " "),
        ("🙂", " paris"),
        (" river", " paris🙂 on"),
        ("on river", " paris🙂 "),
        (["x", " seine</s>"], ANSWER),
        ("</s>", ANSWER),
    ],
)
def test_a_stop_string_is_found_with_its_space(ask: Any, stream: bool, stop: Any, text: str, client: Any) -> None:
    texts, reason = ask(client, stream, stop=stop)
    assert ("".join(texts), reason) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_generation_ends_with_the_stop_string(stream: bool, client: Any) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "stop": " paris", "stream": stream}
    made = client.completions.create(**asked, **({"stream_options": {"include_usage": True}} if stream else {}))
    usage = [*made][-1].usage if stream else made.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 1)


@pytest.mark.parametrize("ask", [answer, say])
def test_an_incomplete_character_ends_an_answer(ask: Any, client: Any) -> None:
    """It is in a stream as well, as in transformers' own decoding."""
    whole = "".join(ask(client, False, max_tokens=4)[0])
    assert whole == " paris" + 3 * "\ufffd"
    assert ask(client, True, max_tokens=4) == ([" paris", 3 * "\ufffd"], "length")


def test_a_prompt_that_ends_within_a_sentence_of_bytes(client: Any) -> None:
    assert answer(client, True, prompt="the capital paris", max_tokens=6)[0] == ["🙂", " on", " river"]


CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "is",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": ["</s>"], "content": "text", "content_args": {"strip": False}},
    },
}
"""A response template with calls of tools, as those of transformers have them."""

WHOLE = ["paris", "<call>", '{"name":', '"f",', '"arguments":', "{}}", "</call>"]
NO_ARGUMENTS = ["<call>", '{"name":', '"f"}', "</call>", "on"]
NO_JSON = ["<call>", "river", "</call>", "on"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "fields", "text", "reason"),
    [
        (WHOLE, {}, " paris", "tool_calls"),
        (WHOLE, {"max_tokens": 4}, " paris", "length"),
        (NO_ARGUMENTS, {}, ' <call> {"name": "f"} </call> on', "stop"),
        (NO_ARGUMENTS, {"max_tokens": 4}, ' <call> {"name": "f"} </call>', "length"),
        (NO_JSON, {}, " <call> river </call> on", "stop"),
    ],
    ids=["whole", "cut off", "without arguments", "without arguments at the end", "no JSON"],
)
def test_a_malformed_call_of_a_tool_is_text(said: Any, fields: Any, text: str, reason: str, stream: bool) -> None:
    """Transformers' handler fails on it, or says nothing of it."""
    model, tokenizer = counting_model(said)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = CALLS
    with running((model, tokenizer)) as port, client_of(port) as client:
        texts, found = say(client, stream, **fields)
        given = "".join(each or "" for each in texts)
        if reason == "length" and not stream:
            assert given.startswith(text)  # and the call that was cut off
        else:
            assert given.strip() == text.strip()
        assert found == reason
        wait_for(lambda: metric(port, 'requests_total{outcome="answered"}') == 1)
        assert metric(port, 'requests_total{outcome="failed"}') == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [answer, say])
def test_an_answer_that_ends_by_itself_with_its_last_token_was_not_cut_off(ask: Any, stream: bool, client: Any) -> None:
    """Nor one whose stop string ends there."""
    tokens = len(WORDS) - len(PROMPT.split()) - 1  # of the answer, with the special token that ends it
    for fields, text in (({"max_tokens": tokens}, ANSWER), ({"max_tokens": 6, "stop": " on"}, " paris🙂")):
        texts, reason = ask(client, stream, **fields)
        assert ("".join(texts), reason) == (text, "stop")
    assert ask(client, stream, max_tokens=tokens - 1)[1] == "length"


def test_words_of_log_probabilities_have_their_spaces(client: Any) -> None:
    """And a part of a character has no bytes, since its token stands for none of a whole one."""
    made = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, logprobs=2)
    words = made.choices[0].logprobs.tokens
    assert [word for word in words if "\ufffd" not in word] == [" paris", " on", " river", " seine", "</s>"]
    assert [next(iter(reversed(top))) for top in made.choices[0].logprobs.top_logprobs] == words
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, logprobs=True)
    content = chat.choices[0].logprobs.content
    assert [word.token for word in content] == words
    for word in content:
        assert word.bytes is None if "\ufffd" in word.token else bytes(word.bytes).decode() == word.token


@pytest.mark.parametrize("stream", [False, True])
def test_a_parsed_answer_begins_with_its_space(stream: bool) -> None:
    model, tokenizer = counting_model()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = PARSED
    with running((model, tokenizer)) as port, client_of(port) as client:
        texts, reason = say(client, stream)
        assert ("".join(texts), reason) == (ANSWER, "stop")
        assert "".join(say(client, stream, stop=" on")[0]) == " paris🙂"


def test_the_text_of_a_message_with_tool_calls_is_in_the_prompt(client: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "river", "arguments": "{}"}}
    tokens = {}
    for content in (None, "the capital"):
        messages = [{"role": "user", "content": "is"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
        made = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=1)
        assert made.choices[0].message.content == " seine"
        tokens[content] = made.usage.prompt_tokens
    assert tokens[None] == 2 and len(WORDS) > 10
    assert tokens["the capital"] == 3


def test_a_part_that_the_template_leaves_out_is_refused(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="must use tools of a request, got one that leaves out tools"):
        say(client, False, tools=[tool])

"""Answers with a format, from a server with one row and with several, by a model that speaks of none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

import kvpolicy
from kvpolicy.serving.capacity import Capacity
from tests.serving.servers import client_of, running
from tests.serving.test_formats import FORMAT, ONE, PERSON, SCHEMAS, TOOLS

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def served() -> tuple[Any, Any]:
    model, tokenizer = kvpolicy.tiny()
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


@pytest.fixture(scope="module", params=[1, 3])
def port(request: Any) -> Iterator[int]:
    """A server with one row, and one with three."""
    capacity = Capacity() if request.param == 1 else Capacity(rows=3, length=512)
    with running(served(), policy="snapkv@0.5", capacity=capacity) as found:
        yield found


def ask(port: int, number: int, **fields: Any) -> Any:
    """A request with a seed and a temperature at which the model speaks nonsense."""
    with client_of(port) as api:
        usual = {"model": "tiny", "temperature": 3.0, "seed": number, "max_tokens": 200}
        usual |= {"messages": [{"role": "user", "content": "tiger="}]}
        made = api.chat.completions.create(**{**usual, **fields})
        return list(made) if fields.get("stream") else made


def test_an_answer_that_is_too_long_ends_with_its_length(port: int) -> None:
    (choice,) = ask(port, 1, response_format=FORMAT, max_tokens=4).choices
    assert choice.finish_reason == "length"
    whole = ask(port, 1, response_format=FORMAT)
    assert whole.choices[0].message.content.startswith(choice.message.content)
    exactly = ask(port, 1, response_format=FORMAT, max_tokens=whole.usage.completion_tokens).choices[0]
    assert (exactly.finish_reason, exactly.message.content) == ("stop", whole.choices[0].message.content)


def test_a_schema_that_cannot_be_followed_is_refused(port: int) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"got an error: Unimplemented keys"):
            ask(port, 0, response_format=asked, stream=stream)


def test_choices_streams_and_log_probabilities(port: int) -> None:
    """Choices are those of requests of their own, and a stream has the text of an answer in one piece."""
    several = ask(port, 4, response_format=FORMAT, n=2, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in several.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert texts == [ask(port, seed, response_format=FORMAT).choices[0].message.content for seed in (4, 5)]
    entries = several.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == texts[0]
    assert any(entry.top_logprobs[0].logprob > entry.logprob for entry in entries), "of the model, not of the format"
    chunks = ask(port, 4, response_format=FORMAT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[0]
    assert chunks[-1].choices[0].finish_reason == "stop" and len(chunks) > 4


def test_a_stop_string_ends_a_format(port: int) -> None:
    (choice,) = ask(port, 4, response_format=FORMAT, stop=['"age"']).choices
    assert choice.finish_reason == "stop" and choice.message.content.rstrip().endswith(",")


def calls_of(answer: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls]


def test_a_required_call_names_a_function_and_has_its_parameters(port: int) -> None:
    one: Any = {"tool_choice": ONE}
    any_one: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    for seed, (fields, named) in enumerate(((one, {"light"}), (any_one, {*SCHEMAS}))):
        answer = ask(port, seed, tools=TOOLS, **fields)
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        ((name, arguments),) = calls_of(answer)
        assert name in named
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_a_stream_of_calls(port: int) -> None:
    """The pieces are the calls of an answer in one piece; a call that is cut has the beginning of its arguments."""
    named = {"type": "function", "function": {"name": 'say "hé"'}}
    whole = ask(port, 3, tools=TOOLS, tool_choice=named)
    chunks = ask(port, 3, tools=TOOLS, tool_choice=named, stream=True)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert [(deltas[0].function.name, "".join(delta.function.arguments for delta in deltas))] == calls_of(whole)
    assert len(deltas) > 3 and deltas[0].id.endswith("_tool_call_0") and {delta.index for delta in deltas} == {0}
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    cut = ask(port, 3, tools=TOOLS, tool_choice=named, max_tokens=whole.usage.completion_tokens - 4)
    assert cut.choices[0].finish_reason == "length"
    assert calls_of(whole)[0][1].startswith(calls_of(cut)[0][1])
    nothing = ask(port, 3, tools=TOOLS, tool_choice=named, max_tokens=2).choices[0]
    assert (nothing.finish_reason, nothing.message.tool_calls, nothing.message.content) == ("length", None, None)

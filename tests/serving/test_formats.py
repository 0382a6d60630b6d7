"""Formats of answers without a server: JSON, JSON of a schema, and calls of tools."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import jsonschema
import pytest
import torch

import kvpolicy
from kvpolicy.serving.formats import AnswerFormat, parse_format
from kvpolicy.serving.grammars import MOST_COMPILED, Grammars, Matcher
from kvpolicy.serving.requests import parse_chat, parse_completion
from kvpolicy.serving.sampling import Sampler, Sampling
from kvpolicy.serving.tool_calls import CallReader, read_calls
from kvpolicy.text.errors import KVPolicyError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tag": {"enum": ["a", "é", "ß c"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIGHT = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"node": {"type": "object", "properties": {"value": {"type": "number"}}, "required": ["value"]}},
    "type": "array",
    "items": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}, {"type": "null"}]},
    "minItems": 1,
    "maxItems": 3,
}
TOOLS = [
    {"type": "function", "function": {"name": 'say "hé"', "parameters": PERSON}},
    {"type": "function", "function": {"name": "light", "parameters": LIGHT}},
    {"type": "function", "function": {"name": "ping"}},
]
SCHEMAS = {'say "hé"': PERSON, "light": LIGHT, "ping": {"type": "object", "additionalProperties": False}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ONE = {"type": "function", "function": {"name": "light"}}
GRAMMARS = Grammars()
TOKENIZER = kvpolicy.tiny()[1]


def matcher_of(fields: dict[str, Any], ends: tuple[int, ...] = (2,), grammars: Grammars = GRAMMARS) -> Matcher:
    asked = parse_format(fields)
    assert asked is not None
    return grammars.matcher(asked, TOKENIZER, ends)


def schema_fields(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def spoken(fields: dict[str, Any], seed: int, longest: int = 600, *, is_greedy: bool = False) -> tuple[str, bool]:
    """The text of a model that speaks at random, and whether it is complete."""
    draw = torch.Generator().manual_seed(seed)
    found = matcher_of(fields)
    sampler = Sampler(Sampling(seed=seed), [1], longest, [], is_greedy=is_greedy, matcher=found)
    tokens: list[int] = []
    while not found.is_complete and len(tokens) < longest:
        logits = torch.randn(768, generator=draw) * 3
        tokens.append(sampler(logits, int(logits.argmax())))
    return TOKENIZER.decode(tokens, skip_special_tokens=True), found.is_complete


@pytest.mark.parametrize("schema", [PERSON, NESTED])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_an_answer_has_its_schema_whatever_the_seed(schema: Any, is_greedy: bool) -> None:
    texts: set[str] = set()
    for seed in range(20):
        text, is_complete = spoken(schema_fields(schema), seed, is_greedy=is_greedy)
        if is_complete:
            jsonschema.validate(json.loads(text), schema)
            texts.add(text)
    assert len(texts) > 12


def test_any_object_is_an_object() -> None:
    """It may be endless; those that ended are whole."""
    made = [spoken({"response_format": {"type": "json_object"}}, seed, 200) for seed in range(30)]
    ended = [json.loads(text) for text, is_complete in made if is_complete]
    assert len(ended) > 5 and all(isinstance(each, dict) for each in ended) and any(ended)


@pytest.mark.parametrize("parallel", [False, True])
def test_calls_have_the_parameters_of_their_functions(parallel: bool) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    names: set[str] = set()
    most = 0
    for seed in range(20):
        text, is_complete = spoken(fields, seed)
        calls = [call["function"] for call in read_calls(text, "k")]
        if is_complete:
            assert [call["name"] for call in calls] == [call["name"] for call in json.loads(text)]
            most = max(most, len(calls))
        for call in calls if is_complete else calls[:-1]:
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
            names.add(call["name"])
    assert names == set(SCHEMAS) and (most > 1) is parallel


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "person"}, "response_format must have a schema that llguidance can follow, got an error: Invalid"),
        ({"not": {}}, 'got an error: Unimplemented keys: ["not"]; try another'),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ({"$ref": "http://example.com/schema"}, "does not fetch resources"),
        ({"type": "string", "pattern": "(?=a)"}, "regex parse error: (?=a) ^^^ error: look-around"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_one_sentence(schema: Any, message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)) as caught:
        matcher_of(schema_fields(schema))
    assert "\n" not in str(caught.value)


def test_llguidance_or_the_tokenizer_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = AnswerFormat(source="response_format", grammar="{}")
    with pytest.raises(KVPolicyError, match="response_format must have a tokenizer that llguidance reads, got an err"):
        Grammars().matcher(asked, object(), ())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(KVPolicyError, match=r"package llguidance .*, got none; try pip install 'kvpolicy\[grammar\]'"):
        Grammars().matcher(asked, TOKENIZER, (2,))


NAMED = {"function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "json"}, 'the type text, json_object or json_schema, got "json"; try'),
        ({"response_format": {"type": "grammar"}}, 'json_object or json_schema, got {"type": "grammar"}'),
        ({"response_format": {"type": "json_schema"}}, "must be an object with a schema, got null"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, 'schema, got {"schema": 1}; try'),
        ({"response_format": {"type": "json_object"}, "tools": [NAMED]}, "response_format must be text with tools"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [NAMED]}, "auto, none, required or a named function"),
        ({"tool_choice": [], "tools": [NAMED]}, "auto, none, required or a named function, got []"),
        ({"tool_choice": "required"}, "tool_choice must be about a function of tools, got no tools"),
        ({"tool_choice": {"type": "function", **NAMED}}, "got no tools"),
        ({"tool_choice": ONE, "tools": [NAMED]}, "got 'light', which is not among them; try it without tool_choice"),
        ({"parallel_tool_calls": False, "tools": [NAMED]}, "unless tool_choice asks for a call, got false; try"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true unless tool_choice asks for a call, got 1"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            'the schema of an object, got {"type": "string"}',
        ),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": 3}}]}, "an object, got 3"),
    ],
)
def test_fields_that_ask_for_no_format(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        parse_chat({"messages": [{"role": "user", "content": "?"}], **fields}, "tiny")


def test_a_format_is_part_of_a_request() -> None:
    body = {"messages": [{"role": "user", "content": "?"}]}
    plain = parse_chat(body, "tiny")
    same: list[dict[str, Any]] = [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"tools": [NAMED], "tool_choice": "none"},  # tools that must not be called are not shown
    ]
    for fields in same:
        assert parse_chat({**body, **fields}, "tiny") == plain
    formatted = {**body, "response_format": FORMAT}
    assert parse_chat({**formatted, "tools": [NAMED], "tool_choice": "none"}, "tiny") == parse_chat(formatted, "tiny")
    text = parse_completion({"prompt": ["a", "b"], "response_format": FORMAT}, "tiny")
    assert text.format is not None and [one.format for one in text.each()] == [text.format] * 2


def test_only_tokens_of_the_format_are_left() -> None:
    """Also if the model has more tokens than its tokenizer, or fewer."""
    brace = TOKENIZER("{", add_special_tokens=False).input_ids[0]
    for size in (768, 800, brace + 1):
        scores = matcher_of({"response_format": {"type": "json_object"}}).restrict(torch.zeros(size))
        assert scores.shape == (size,) and scores[brace] == 0
        texts = [TOKENIZER.decode([token]) for token in scores.isfinite().nonzero().flatten().tolist()]
        assert texts and all(text.strip()[:1] in ("{", "") for text in texts)
    found = matcher_of(schema_fields({"const": 1}))
    with pytest.raises(KVPolicyError, match=r"got an error: .*doesn't satisfy the grammar"):
        found.take(brace)


def test_an_answer_that_may_go_on_ends_with_a_token_of_the_model() -> None:
    """A number may have another digit, so that the token of the end is one of those that may come next."""
    integer = parse_format(schema_fields({"type": "integer"}))
    assert integer is not None
    for ends in ((2,), (2, 1)):
        found = Grammars().matcher(integer, TOKENIZER, ends)
        found.take(TOKENIZER("7", add_special_tokens=False).input_ids[0])
        assert not found.is_complete and all(found.restrict(torch.zeros(768))[end] == 0 for end in ends)
        found.take(ends[-1])
        assert found.is_complete


def test_a_grammar_is_compiled_once_and_forgotten_among_many() -> None:
    grammars = Grammars()
    fields = schema_fields({"const": 1})
    first, second = (matcher_of(fields, grammars=grammars) for _ in range(2))
    compiled = grammars._compiled
    assert len(compiled) == 1
    first.take(TOKENIZER("1", add_special_tokens=False).input_ids[0])
    assert first.is_complete and not second.is_complete
    for number in range(2, MOST_COMPILED + 2):
        matcher_of(schema_fields({"const": number}), grammars=grammars)
    assert len(compiled) == MOST_COMPILED and not any('"const": 1,' in grammar for grammar in compiled)


LETTERS = ['"', "\\", "{", "}", "[", "]", ",", ":", " ", "a", "é", "\n", "\U0001f600"]


def value_of(draw: random.Random, depth: int = 3) -> Any:
    """Some JSON, with the characters that could be taken for the end of something."""
    kind = draw.randrange(6 if depth else 4)
    if kind == 4:
        return [value_of(draw, depth - 1) for _ in range(draw.randrange(3))]
    if kind == 5:
        return arguments_of(draw, depth - 1)
    return (None, draw.random() < 0.5, draw.randrange(-99, 99), text_of(draw))[kind]


def arguments_of(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    return {text_of(draw): value_of(draw, depth) for _ in range(draw.randrange(3))}


def text_of(draw: random.Random) -> str:
    return "".join(draw.choices(LETTERS, k=draw.randrange(6)))


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_calls_are_read_from_pieces_of_any_size(seed: int, ascii_only: bool) -> None:
    draw = random.Random(seed)
    calls = [(text_of(draw), arguments_of(draw)) for _ in range(draw.randrange(1, 5))]
    written = [json.dumps(arguments, ensure_ascii=ascii_only) for _, arguments in calls]
    heads = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ' for name, _ in calls]
    text = "[" + ", ".join(f"{head}{arguments}}}" for head, arguments in zip(heads, written, strict=True)) + "]"
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in read_calls(text, "k")]
    assert whole == [(name, arguments) for (name, _), arguments in zip(calls, written, strict=True)]
    reader, place = CallReader("k"), 0
    names: dict[int, str] = {}
    parts: dict[int, str] = {}
    while place < len(text):
        size = draw.randrange(1, 9)
        for delta in reader.feed(text[place : place + size]):
            function = delta["function"]
            if "id" in delta:
                names[delta["index"]] = function["name"]
                assert delta["id"] == f"k_tool_call_{delta['index']}"
            parts[delta["index"]] = parts.get(delta["index"], "") + function["arguments"]
        place += size
    assert [(names[index], parts[index]) for index in range(len(calls))] == whole


def test_arguments_that_python_does_not_decode() -> None:
    """A number with too many digits is read; what is too deep stays open."""
    digits = f'{{"x": {"1" * 5000}}}'
    deep = f'{{"x": {"[" * 100_000}'
    assert read_calls(f'[{{"name": "f", "arguments": {digits}}}]', "k")[0]["function"]["arguments"] == digits
    (call,) = read_calls(f'[{{"name": "f", "arguments": {deep}}}', "k")
    assert call["function"]["arguments"].startswith(deep)

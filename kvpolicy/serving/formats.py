"""The format that a request asks of its answer: JSON, JSON of a schema, or calls of tools.

A format is a grammar of llguidance, as text. Whether the grammar can be followed is known only once llguidance has read
it: see `Grammars`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.serving.templates import brief
from kvpolicy.text.errors import KVPolicyError

OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,40})", "lenient": False}
"""How llguidance reads a schema, whatever the schema says itself.

Whitespace is a space, or a new line with its indentation, since a model may repeat it for ever; and a keyword that
cannot be enforced is an error.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """What the text of an answer is restricted to.

    Attributes:
        source: The field of the request, for messages.
        grammar: The grammar.
        calls: Whether the text is a list of calls of tools, as `CallReader` reads it.
    """

    source: str
    grammar: str
    calls: bool = False


def parse_format(fields: Mapping[str, Any]) -> AnswerFormat | None:
    """Check `response_format`, and `tool_choice` with what belongs to it.

    Args:
        fields: The fields of a request; its `tools` are checked.

    Returns:
        The format; None for any text.

    Raises:
        KVPolicyError: If a field is invalid, or two of them contradict each other.

    Examples:
        >>> parse_format({"response_format": {"type": "json_object"}}).source
        'response_format'
        >>> parse_format({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}).calls
        True
    """
    found = _response_format(fields["response_format"]) if "response_format" in fields else None
    choice = fields.get("tool_choice", "auto")
    tools = [] if choice == "none" else fields.get("tools") or []  # which the prompt then leaves out, too
    if found is not None and tools:
        raise KVPolicyError(
            "response_format must be text with tools, got both; try tool_choice='required', or the request without "
            "tools."
        )
    is_free = choice in ("auto", "none")
    parallel = fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool) or (is_free and not parallel):
        raise KVPolicyError(
            f"parallel_tool_calls must be true unless tool_choice asks for a call, got {brief(parallel)}; try it "
            "without parallel_tool_calls."
        )
    return found if is_free else _calls(fields["tool_choice"], tools, parallel)


def _response_format(given: Any) -> AnswerFormat | None:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    source = "response_format"
    if kind == "json_object":
        return AnswerFormat(source=source, grammar=_grammar({"type": "object"}))
    if kind != "json_schema":
        raise KVPolicyError(
            f"response_format must have the type text, json_object or json_schema, got {brief(given)}; try "
            '{"type": "json_object"}.'
        )
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise KVPolicyError(
            f"json_schema of response_format must be an object with a schema, got {brief(inner)}; try "
            '{"name": "answer", "schema": {"type": "object"}}.'
        )
    return AnswerFormat(source=source, grammar=_grammar(schema))


def _calls(choice: Any, tools: Sequence[Mapping[str, Any]], parallel: bool) -> AnswerFormat:
    """The format of answers that call tools: one function that the choice names, or any of them."""
    functions: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        functions.setdefault(tool["function"]["name"], tool["function"])
    name = _named(choice)
    if choice != "required" and name is None:
        raise KVPolicyError(
            f"tool_choice must be auto, none, required or a named function, got {brief(choice)}; try it without "
            "tool_choice."
        )
    if not functions or (name is not None and name not in functions):
        got = "no tools" if not functions else f"{name!r}, which is not among them"
        raise KVPolicyError(f"tool_choice must be about a function of tools, got {got}; try it without tool_choice.")
    chosen = list(functions) if name is None else [name]
    rules = [_rule(number, functions[each]) for number, each in enumerate(chosen)]
    more = ' (", " call)*' if parallel and name is None else ""
    lark = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call{number}" for number in range(len(chosen)))]
    grammar = {"lark_grammar": "\n".join(["%llguidance {}", *lark, *rules])}
    return AnswerFormat(source="tool_choice", grammar=_dump({"grammars": [grammar]}), calls=True)


def _named(choice: Any) -> str | None:
    """The name of the function that a choice names."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _rule(number: int, function: Mapping[str, Any]) -> str:
    """The rules of the grammar for calls of one function, in the form in which most chat templates show calls."""
    parameters = function.get("parameters")
    parameters = {"properties": {}, "additionalProperties": False} if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise KVPolicyError(
            f"The parameters of a function must be the schema of an object, got {brief(parameters)}; try "
            '{"type": "object", "properties": {}}.'
        )
    schema = _with_options({**parameters, "type": "object"})
    head = f'{{"name": {_dump(function["name"])}, "arguments": '
    return f'call{number}: {_dump(head)} object{number} "}}"\nobject{number}: %json {_dump(schema)}'


def _grammar(schema: Mapping[str, Any]) -> str:
    return _dump({"grammars": [{"json_schema": _with_options(schema)}]})


def _with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": OPTIONS}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

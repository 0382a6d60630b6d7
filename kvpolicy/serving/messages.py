"""Messages of a chat: what each may have, and how a chat template gets it. Nothing is left out in silence."""

from __future__ import annotations

import json
from typing import Any

from kvpolicy.text.errors import KVPolicyError

FIELDS = {"role", "content", "name"}
"""Fields of any message, which chat templates get."""

FIELDS_OF_ROLES = {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id"}}
"""Further fields of the messages of a role."""

EMPTY: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_calls": ([],),
}
"""Values that mean the same as leaving out a field, besides null."""

IGNORED_IN_PARTS = {"prompt_cache_breakpoint"}
"""Fields of a part of a text without effect on an answer."""

INSTEAD = {"function_call": "tool_calls", "reasoning": "reasoning_content", "refusal": "content"}
"""The fields to use in place of some that are not supported."""


def parse_message(message: Any) -> dict[str, Any]:
    """Check a message, and write it as chat templates take it.

    Parts of a text are joined, the arguments of tool calls are decoded, and the content of a message that has only tool
    calls or reasoning is empty text.

    Args:
        message: The decoded JSON.

    Raises:
        KVPolicyError: If a field is unknown, unsupported or of another type.

    Examples:
        >>> parse_message({"role": "user", "content": [{"type": "text", "text": "Hi"}], "refusal": None})
        {'role': 'user', 'content': 'Hi'}
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise KVPolicyError(f"A message must be an object with a role, got {brief(message)}.")
    given = {name: value for name, value in message.items() if value is not None and value not in EMPTY.get(name, ())}
    _check_names(given)
    for name in ("name", "reasoning_content", "tool_call_id"):
        if not isinstance(given.get(name, ""), str):
            raise KVPolicyError(f"{name} of a message must be a string, got {kind(given[name])}.")
    if "tool_calls" in given:
        calls = as_list("tool_calls", given["tool_calls"])
        given["tool_calls"] = [_tool_call(call) for call in calls]
    needs_content = not given.keys() & FIELDS_OF_ROLES["assistant"]
    given["content"] = _text(given.get("content", None if needs_content else ""))
    return given


def _check_names(given: dict[str, Any]) -> None:
    role = given["role"]
    for name in sorted(given.keys() - FIELDS - FIELDS_OF_ROLES.get(role, set())):
        instead = f"{INSTEAD[name]} instead" if name in INSTEAD else f"it without {name}"
        raise KVPolicyError(
            f"A message must have only fields that kvpolicy serve supports for its role, got {name}="
            f"{brief(given[name])} and role={brief(role)}; try {instead}."
        )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise KVPolicyError(f"The content of a message must be a string, got {kind(content)}.")
    parts: list[Any] = content
    return "".join(_text_of_part(part) for part in parts)


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        found = part.get("type") if isinstance(part, dict) else part
        raise KVPolicyError(f"The content of a message must be text, got a part {brief(found)}; try text alone.")
    others = {name for name, value in part.items() if value is not None} - {"type", "text"} - IGNORED_IN_PARTS
    if others:
        name = min(others)
        raise KVPolicyError(f"A part of a text must have only type and text, got {name}; try it without {name}.")
    return part["text"]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        decoded = None
    if (
        not isinstance(decoded, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or call.get("type", "function") != "function"
    ):
        raise KVPolicyError(f"A tool call must have a function with a name and arguments in JSON, got {brief(call)}.")
    return {**call, "function": {**function, "arguments": decoded}}


def as_list(name: str, value: Any) -> list[Any]:
    """A field of a request that must be a list.

    Raises:
        KVPolicyError: If it is none.
    """
    if not isinstance(value, list):
        raise KVPolicyError(f"{name} must be a list, got {kind(value)}.")
    return value


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "nothing"}
    return names.get(type(value), "a number")


def brief(value: Any) -> str:
    """The beginning of a value in JSON."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

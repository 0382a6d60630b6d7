"""Messages of a chat, and their prompt: the chat template of the tokenizer, or their joined contents without one.

What a message may have, and how a template gets it, is said here. Nothing is left out in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kvpolicy.serving import handlers
from kvpolicy.serving.streamer import AnswerTokens
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
    """Check that a field of a request is a list."""
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


Messages = list[dict[str, Any]]
Render = Callable[..., Any]

ALWAYS_USED = {"user", "assistant"}
"""Roles that every chat template has."""

MOST_REMEMBERED = 64
"""The most parts of which a server remembers that its template uses them: clients may make up roles."""


def adapt_tokenizer(tokenizer: Any) -> bool:
    """Let a tokenizer refuse messages of which its chat template, or the lack of one, would leave out a part.

    Without a chat template, the contents of messages are joined by newlines.

    Args:
        tokenizer: The tokenizer; its `apply_chat_template` and `parse_response` are replaced.

    Returns:
        Whether it has a chat template.

    Raises:
        KVPolicyError: If it is not a fast tokenizer.
    """
    if not hasattr(tokenizer, "_tokenizer"):
        raise KVPolicyError(
            f"The tokenizer must be a fast tokenizer to be streamed, got {type(tokenizer).__name__}; try a model with "
            "a tokenizer.json."
        )
    # A call of the tokenizer would do so too, while another thread may be using it.
    tokenizer._tokenizer.no_truncation()
    tokenizer._tokenizer.no_padding()
    has_template = bool(getattr(tokenizer, "chat_template", None))
    tokenizer.apply_chat_template = _rendering(tokenizer) if has_template else _joining(tokenizer)
    if hasattr(tokenizer, "parse_response"):
        tokenizer.parse_response = _parsing(tokenizer)
    return has_template


def _joining(tokenizer: Any) -> Render:
    def join(messages: Messages, *, tools: Any = None, **kwargs: Any) -> Any:
        given = {name for message in messages for name in message} - {"role", "content"}
        lost = "tools" if tools else next(iter(sorted(given)), "")
        if lost:
            raise KVPolicyError(
                f"The tokenizer must have a chat template for {lost}, got one without; try it without {lost}."
            )
        # With the special tokens that the tokenizer adds to any text, unlike those of a template.
        return tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt", verbose=False)

    return join


def _rendering(tokenizer: Any) -> Render:
    render = tokenizer.apply_chat_template
    used = TemplateUse(render)

    def apply(messages: Messages, **kwargs: Any) -> Any:
        from jinja2 import TemplateError

        try:
            used.check(messages, kwargs)
            return render(messages, **kwargs)
        except KVPolicyError:
            raise
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # as Python words them
            said = str(error).rstrip(".")
            raise KVPolicyError(f"The messages must fit the model's chat template, got an error: {said}.") from None

    return apply


def _parsing(tokenizer: Any) -> Callable[..., Any]:
    parse = tokenizer.parse_response

    def parse_response(response: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(response, AnswerTokens):
            return parse(response, *args, **kwargs)
        try:
            found = parse(response.whole_text, *args, **kwargs)
            handlers.check_calls(found.get("tool_calls") or ())
        except handlers.MALFORMED:  # a call of a tool that was cut off, or is no JSON
            return {"content": response.text}
        return found

    return parse_response


class TemplateUse:
    """Refuses what a chat template leaves out: tools, tool calls, and messages of roles that it does not have.

    Templates ignore what they do not know without an error. So the first time that a request has such a part, the
    template is rendered with and without it.

    Args:
        render: Renders messages, as `apply_chat_template` of a tokenizer.
    """

    def __init__(self, render: Render) -> None:
        """A template of which nothing is known."""
        self._render = render
        self._used: set[str] = set()

    def check(self, messages: Messages, options: dict[str, Any]) -> None:
        """Check a request.

        Args:
            messages: The messages.
            options: Arguments of `render`.

        Raises:
            KVPolicyError: If the text is the same without a part of the request.
        """
        text = None
        for part, index in _parts(messages, options).items():
            if part in self._used:
                continue
            text = self._text(messages, options) if text is None else text
            if self._is_same(text, *_without(part, index, messages, options)):
                raise KVPolicyError(
                    f"The model's chat template must use {part} of a request, got one that leaves out {part}; try "
                    f"{_instead(part)}."
                )
            if len(self._used) < MOST_REMEMBERED:
                self._used.add(part)

    def _text(self, messages: Messages, options: dict[str, Any]) -> str:
        plain = {"tokenize": False, "return_dict": False, "return_tensors": None}
        return self._render(messages, **{**options, **plain})

    def _is_same(self, text: str, messages: Messages, options: dict[str, Any]) -> bool:
        try:
            return self._text(messages, options) == text
        except Exception:  # so the template looks at the part
            return False


def _parts(messages: Messages, options: dict[str, Any]) -> dict[str, int]:
    """The parts of a request that a template may leave out, each with the first message that has it."""
    found = {"tools": 0} if options.get("tools") else {}
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            found.setdefault("tool_calls", index)
        if message["role"] not in ALWAYS_USED:
            found.setdefault(f"the role {message['role']}", index)
    return found


def _without(part: str, index: int, messages: Messages, options: dict[str, Any]) -> tuple[Messages, dict[str, Any]]:
    """Messages and options that differ in one part."""
    if part == "tools":
        return messages, {**options, "tools": None}
    changed = {**messages[index]}
    if part == "tool_calls":
        del changed["tool_calls"]
    else:
        changed["content"] += " ?"
    return [*messages[:index], changed, *messages[index + 1 :]], options


def _instead(part: str) -> str:
    return f"it without {part}" if part.startswith("tool") else "the role system or user"

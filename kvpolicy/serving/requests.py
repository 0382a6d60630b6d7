"""Checks of a request before anything is computed; an invalid one is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.serving.handlers import RESERVED
from kvpolicy.spec.errors import KVPolicyError

IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields without effect on an answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
}
"""Fields that are not supported, with the values that mean the same as leaving them out."""

LEAST_TEMPERATURE = 1e-5
"""A temperature below it is greedy decoding: logits that are divided by less may be infinite."""

MOST_STOPS = 16
"""The most stop strings of a request; the OpenAI API has 4."""

LONGEST_STOP = 256
"""The most characters of a stop string."""

CHAT = {"messages", "tools", "chat_template_kwargs"}
COMPLETION = {"prompt"}
SHARED = {
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
}


class RequestError(KVPolicyError):
    """A request that is refused with an HTTP status other than 400.

    Args:
        message: One sentence.
        status: The HTTP status.
        code: The code of the OpenAI API, if it has one.
    """

    def __init__(self, message: str, status: int, code: str | None = None) -> None:
        """Remember the status."""
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A checked request.

    Attributes:
        body: The fields for transformers' handler.
        stream: Whether the answer is streamed.
        include_usage: Whether a stream ends with its usage.
        max_tokens: The most tokens to generate; None for the default.
        sample: Whether to sample (True), decode greedily (False), or do as the model's generation config says (None).
        seed: The random seed, or None.
        stop: Strings that end the answer, which does not contain them.
    """

    body: dict[str, Any] = field(default_factory=dict[str, Any])
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    sample: bool | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()


def parse_chat(body: Any, model: str) -> Call:
    """Check the body of a request to `/v1/chat/completions`.

    Args:
        body: The decoded JSON.
        model: The name of the served model.

    Raises:
        KVPolicyError: If a field is unknown, unsupported or out of range.

    Examples:
        >>> parse_chat({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}, "tiny").max_tokens
        8
    """
    fields = _fields(body, CHAT)
    own: dict[str, Any] = {"messages": [_message(message) for message in _messages(fields)]}
    if fields.get("tools"):
        own["tools"] = _tools(fields["tools"])
    if fields.get("chat_template_kwargs") is not None:
        own["chat_template_kwargs"] = _template_options(fields["chat_template_kwargs"])
    return _call(fields, own, model)


def parse_completion(body: Any, model: str) -> Call:
    """Check the body of a request to `/v1/completions`.

    Args:
        body: The decoded JSON.
        model: The name of the served model.

    Raises:
        KVPolicyError: If a field is unknown, unsupported or out of range.

    Examples:
        >>> parse_completion({"prompt": "Once", "temperature": 0}, "tiny").sample
        False
    """
    fields = _fields(body, COMPLETION)
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise KVPolicyError(f"prompt must be a string, got {_kind(prompt)}; try one request for each prompt.")
    if not prompt:
        raise KVPolicyError("The prompt must have at least one token, got none; try a longer prompt.")
    return _call(fields, {"prompt": prompt}, model)


def _fields(body: Any, own: set[str]) -> dict[str, Any]:
    """The fields that are supported, after checking that the others may be left out."""
    if not isinstance(body, dict):
        raise KVPolicyError(f"The body of a request must be a JSON object, got {_kind(body)}.")
    given: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
    supported = own | SHARED
    for name, value in given.items():
        if name in supported or name in IGNORED:
            continue
        # Types are compared too, since True equals 1 in Python, and JSON tells them apart.
        if not any(type(value) is type(same) and value == same for same in NEUTRAL.get(name, ())):
            raise KVPolicyError(
                f"The request must have only fields that kvpolicy serve supports, got {name}={_brief(value)}; try it "
                f"without {name}."
            )
    return {name: value for name, value in given.items() if name in supported}


def _call(fields: Mapping[str, Any], own: dict[str, Any], model: str) -> Call:
    _check_model(fields.get("model", model), model)
    stream = _bool("stream", fields.get("stream", False))
    options = _object("stream_options", fields.get("stream_options", {}))
    asked = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    most = _integer(asked, fields[asked], 1) if asked in fields else None
    temperature = _number("temperature", fields["temperature"], 0, 100) if "temperature" in fields else None
    top_p = _number("top_p", fields["top_p"], 0, 1) if "top_p" in fields else None
    if top_p == 0:
        raise KVPolicyError("top_p must be above 0 and at most 1, got 0; try temperature=0 for greedy decoding.")
    sample = None if temperature is None and top_p is None else temperature is None or temperature >= LEAST_TEMPERATURE
    seed = _integer("seed", fields["seed"], -(2**63), 2**63 - 1) if "seed" in fields else None
    stop = _stop(fields.get("stop", []))
    # Not the seed: transformers would set it at once, while the request before this one is still sampling. Not the stop
    # strings either: see `StopStrings`.
    passed = {"max_tokens": most, "stream": stream}
    if sample:
        passed |= {"temperature": temperature, "top_p": top_p}
    body = {**own, "model": model, **{name: value for name, value in passed.items() if value is not None}}
    return Call(
        body=body,
        stream=stream,
        include_usage=stream and bool(options.get("include_usage")),
        max_tokens=most,
        sample=sample,
        seed=seed,
        stop=stop,
    )


def _check_model(name: Any, model: str) -> None:
    if name != model:
        raise RequestError(
            f"model must be {model!r}, the one that this server has, got {name!r}.", 404, "model_not_found"
        )


def _messages(fields: Mapping[str, Any]) -> list[Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise KVPolicyError(
            f"messages must be a list of at least one message, got {_brief(messages)}; try "
            '[{"role": "user", "content": "..."}].'
        )
    return messages


def _message(message: Any) -> dict[str, Any]:
    """Check one message, and join the parts of its text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise KVPolicyError(f"A message must be an object with a role, got {_brief(message)}.")
    kept = {name: message[name] for name in ("role", "tool_call_id") if isinstance(message.get(name), str)}
    if message.get("tool_calls"):
        return {**kept, "tool_calls": [_tool_call(call) for call in _list("tool_calls", message["tool_calls"])]}
    content = message.get("content")
    if isinstance(content, str):
        return {**kept, "content": content}
    if not isinstance(content, list):
        raise KVPolicyError(f"The content of a message must be a string, got {_kind(content)}.")
    parts: list[Any] = content
    if not all(isinstance(part, dict) and part.get("type") == "text" and _is_text(part.get("text")) for part in parts):
        raise KVPolicyError("The content of a message must be text, got a part of another type; try text alone.")
    return {**kept, "content": "".join(part["text"] for part in parts)}


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict) or not isinstance(function, dict) or not _is_text(function.get("name")):
        raise KVPolicyError(f"A tool call must have a function with a name and arguments in JSON, got {_brief(call)}.")
    return call


def _tools(tools: Any) -> list[Any]:
    tools = _list("tools", tools)
    if not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        raise KVPolicyError(f"tools must be a list of objects with a function each, got {_brief(tools)}.")
    return tools


def _template_options(options: Any) -> dict[str, Any]:
    options = _object("chat_template_kwargs", options)
    reserved = sorted(options.keys() & RESERVED)
    if reserved:
        raise KVPolicyError(
            f"chat_template_kwargs must be variables of the chat template, got {', '.join(reserved)}; try those that "
            "the model card names, such as enable_thinking."
        )
    return options


def _stop(stop: Any) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(_is_text(part) and part for part in found):
        raise KVPolicyError(f"stop must be a string or a list of strings that are not empty, got {_brief(stop)}.")
    if len(found) > MOST_STOPS or any(len(part) > LONGEST_STOP for part in found):
        longest = max(len(part) for part in found)
        raise KVPolicyError(
            f"stop must be at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters, got {len(found):,} of up "
            f"to {longest:,}; try fewer or shorter ones."
        )
    return tuple(found)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise KVPolicyError(f"{name} must be a list, got {_kind(value)}.")
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise KVPolicyError(f"{name} must be a JSON object, got {_kind(value)}.")
    return value


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise KVPolicyError(f"{name} must be true or false, got {_brief(value)}.")
    return value


def _integer(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KVPolicyError(f"{name} must be an integer from {least} to {most}, got {_brief(value)}; try 64.")
    return value


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise KVPolicyError(f"{name} must be a number from {least} to {most}, got {_brief(value)}; try 1.")
    return float(value)


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "nothing"}
    return names.get(type(value), "a number")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

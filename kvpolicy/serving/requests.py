"""Checks of a request before anything is computed, from its body on; an invalid one is refused in one sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from kvpolicy.serving.formats import AnswerFormat, parse_format
from kvpolicy.serving.handlers import RESERVED
from kvpolicy.serving.sampling import Sampling
from kvpolicy.serving.templates import as_list, brief, kind, parse_message
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import LEAST_TEMPERATURE

IGNORED = {  # docs/guide/serving.md lists them
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields without effect on an answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "suffix": ("",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
}
"""Fields that are not supported, with the values that mean the same as leaving them out."""

MOST_STOPS = 16
"""The most stop strings of a request; the OpenAI API has 4."""

LONGEST_STOP = 256
"""The most characters of a stop string."""

MOST_CHOICES = 16
"""The most answers to one prompt."""

MOST_PROMPTS = 256
"""The most prompts of a request; the OpenAI API has 2048."""

MOST_LOGPROBS = 20
"""The most tokens whose log probabilities are returned beside a chosen one, as in the OpenAI API."""

MOST_ROLES = 16
"""The most different roles of the messages of a request."""

CHAT = {"messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "top_logprobs"}
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
    "n",
    "logprobs",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "response_format",
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
        sampling: What else the choice of tokens depends on.
        stop: Strings that end the answer, which does not contain them.
        format: What the text of an answer is restricted to; None for nothing.
        prompts: The prompts of a completion; none for a chat, which has one.
        choices: Answers to each prompt.
    """

    body: dict[str, Any] = field(default_factory=dict[str, Any])
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    sample: bool | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    format: AnswerFormat | None = None
    prompts: tuple[str, ...] = ()
    choices: int = 1

    def each(self) -> list[Call]:
        """The request of each answer: the choices of the first prompt, of the second one, and so on.

        Choices of a prompt have seeds that follow each other.
        """
        bodies = [{**self.body, "prompt": prompt} for prompt in self.prompts] or [self.body]
        seed = self.sampling.seed
        seeds = [seed if seed is None else (seed + k + 2**63) % 2**64 - 2**63 for k in range(self.choices)]
        return [
            replace(self, body=body, sampling=replace(self.sampling, seed=own), prompts=(), choices=1)
            for body in bodies
            for own in seeds
        ]


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
    messages = [parse_message(message) for message in _messages(fields)]
    roles = len({message["role"] for message in messages})
    if roles > MOST_ROLES:
        raise KVPolicyError(f"messages must have at most {MOST_ROLES} different roles, got {roles:,}; try user.")
    own: dict[str, Any] = {"messages": messages}
    tools = _tools(fields.get("tools", []))
    if tools and fields.get("tool_choice") != "none":
        own["tools"] = tools
    if fields.get("chat_template_kwargs") is not None:
        own["chat_template_kwargs"] = _template_options(fields["chat_template_kwargs"])
    return _call(fields, own, model, _chat_logprobs(fields))


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
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not all(isinstance(each, str) for each in prompts):
        raise KVPolicyError(f"prompt must be a string or a list of strings, got {brief(prompt)}.")
    if not prompts or not all(prompts):
        raise KVPolicyError("The prompt must have at least one token, got none; try a longer prompt.")
    if len(prompts) > MOST_PROMPTS:
        raise KVPolicyError(f"prompt must be at most {MOST_PROMPTS} prompts, got {len(prompts):,}; try two requests.")
    logprobs = fields.get("logprobs", False)
    most = None if logprobs is False else _integer("logprobs", logprobs, 0, MOST_LOGPROBS, 5)
    call = _call(fields, {"prompt": prompts[0]}, model, most)
    return replace(call, prompts=tuple(prompts))


def _chat_logprobs(fields: Mapping[str, Any]) -> int | None:
    """How many tokens are returned beside a chosen one, or None for neither."""
    most = _integer("top_logprobs", fields.get("top_logprobs", 0), 0, MOST_LOGPROBS, 5)
    if _bool("logprobs", fields.get("logprobs", False)):
        return most
    if most:
        raise KVPolicyError(f"logprobs must be true with top_logprobs, got top_logprobs={most} alone; try both.")
    return None


def _fields(body: Any, own: set[str]) -> dict[str, Any]:
    """The fields that are supported, after checking that the others may be left out."""
    if not isinstance(body, dict):
        raise KVPolicyError(f"The body of a request must be a JSON object, got {kind(body)}.")
    given: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
    supported = own | SHARED
    for name, value in given.items():
        if name in supported or name in IGNORED:
            continue
        # Types are compared too, since True equals 1 in Python, and JSON tells them apart.
        if not any(type(value) is type(same) and value == same for same in NEUTRAL.get(name, ())):
            raise KVPolicyError(
                f"The request must have only fields that kvpolicy serve supports, got {name}={brief(value)}; try it "
                f"without {name}."
            )
    return {name: value for name, value in given.items() if name in supported}


def _call(fields: Mapping[str, Any], own: dict[str, Any], model: str, logprobs: int | None) -> Call:
    check_model(fields.get("model", model), model)
    stream = _bool("stream", fields.get("stream", False))
    include_usage = _include_usage(fields.get("stream_options", {}))
    most = _max_tokens(fields)
    temperature = _number("temperature", fields["temperature"], 0, 100) if "temperature" in fields else None
    top_p = _number("top_p", fields["top_p"], 0, 1) if "top_p" in fields else None
    if top_p == 0:
        raise KVPolicyError("top_p must be above 0 and at most 1, got 0; try temperature=0 for greedy decoding.")
    sampling = _sampling(fields, logprobs)
    asks = temperature is not None or any(each is not None for each in (top_p, sampling.top_k, sampling.min_p))
    sample = (temperature is None or temperature >= LEAST_TEMPERATURE) if asks else None
    # Not the seed: transformers would set it at once, for the whole program. Not the stop strings either: see
    # `StopStrings`. Nor `frequency_penalty`, which transformers takes for one of repetition.
    passed = {"max_tokens": most, "stream": stream}
    if sample:
        passed |= {"temperature": temperature, "top_p": top_p}
    return Call(
        body={**own, "model": model, **{name: value for name, value in passed.items() if value is not None}},
        stream=stream,
        include_usage=stream and include_usage,
        max_tokens=most,
        sample=sample,
        sampling=sampling,
        stop=_stop(fields.get("stop", [])),
        format=parse_format(fields),
        choices=_integer("n", fields.get("n", 1), 1, MOST_CHOICES, 2),
    )


def _sampling(fields: Mapping[str, Any], logprobs: int | None) -> Sampling:
    """What the choice of tokens depends on, beyond temperature and `top_p`."""
    top_k = _integer("top_k", fields["top_k"], -1) if "top_k" in fields else None
    penalty = fields.get("repetition_penalty")
    if penalty is not None and _number("repetition_penalty", penalty, 0, 100) == 0:
        raise KVPolicyError("repetition_penalty must be above 0 and at most 100, got 0; try 1.1.")
    return Sampling(
        seed=_integer("seed", fields["seed"], -(2**63), 2**63 - 1) if "seed" in fields else None,
        top_k=None if top_k is None else max(top_k, 0),  # -1 is another word for all
        min_p=_number("min_p", fields["min_p"], 0, 1) if "min_p" in fields else None,
        repetition_penalty=None if penalty is None else float(penalty),
        frequency_penalty=_number("frequency_penalty", fields.get("frequency_penalty", 0), -2, 2),
        presence_penalty=_number("presence_penalty", fields.get("presence_penalty", 0), -2, 2),
        logprobs=logprobs,
    )


def _include_usage(options: Any) -> bool:
    """Whether a stream has its usage, which an answer in one piece always has."""
    given = {name: value for name, value in _object("stream_options", options).items() if value is not None}
    others = given.keys() - {"include_usage"}
    if given.get("include_obfuscation") is False:
        others -= {"include_obfuscation"}
    if others:
        name = min(others)
        raise KVPolicyError(
            f"stream_options must have only include_usage, got {name}={brief(given[name])}; try it without {name}."
        )
    return _bool("include_usage of stream_options", given.get("include_usage", False))


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """The most tokens of an answer, which has two names."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields]
    found = {_integer(name, fields[name], 1) for name in names}
    if len(found) > 1:
        raise KVPolicyError(
            f"max_tokens and max_completion_tokens must be equal, got {min(found)} and {max(found)}; try one of them."
        )
    return found.pop() if found else None


def check_model(name: Any, model: str) -> None:
    """Refuse every name but that of the server's model.

    Args:
        name: The name that a request has.
        model: The name of the model.

    Raises:
        RequestError: With status 404, if they differ.
    """
    if name != model:
        raise RequestError(
            f"model must be {model!r}, the one that this server has, got {brief(name)}.", 404, "model_not_found"
        )


def _messages(fields: Mapping[str, Any]) -> list[Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise KVPolicyError(
            f"messages must be a list of at least one message, got {brief(messages)}; try "
            '[{"role": "user", "content": "..."}].'
        )
    return messages


def _tools(tools: Any) -> list[Any]:
    tools = as_list("tools", tools)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") in (None, "function") else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise KVPolicyError(f"tools must be a list of objects with a named function each, got {brief(tool)}.")
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
    if not isinstance(found, list) or not all(isinstance(part, str) and part for part in found):
        raise KVPolicyError(f"stop must be a string or a list of strings that are not empty, got {brief(stop)}.")
    if len(found) > MOST_STOPS or any(len(part) > LONGEST_STOP for part in found):
        longest = max(len(part) for part in found)
        raise KVPolicyError(
            f"stop must be at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters, got {len(found):,} of up "
            f"to {longest:,}; try fewer or shorter ones."
        )
    return tuple(found)


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise KVPolicyError(f"{name} must be a JSON object, got {kind(value)}.")
    return value


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise KVPolicyError(f"{name} must be true or false, got {brief(value)}.")
    return value


def _integer(name: str, value: Any, least: int, most: int = 2**31 - 1, example: int = 64) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KVPolicyError(f"{name} must be an integer from {least} to {most}, got {brief(value)}; try {example}.")
    return value


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise KVPolicyError(f"{name} must be a number from {least} to {most}, got {brief(value)}; try 1.")
    return float(value)


TOO_LARGE = 413
"""The HTTP status of a body that is too large."""

TOO_MANY = 429
"""The HTTP status of a request while too many others wait."""

ENVELOPE = 2**16
"""Bytes of a body for everything but the tokens of the prompt."""

BYTES_PER_POSITION = 32
"""Bytes of a body for each position of the model: five characters, each escaped as in `\\u043a`, and a rest."""

DISCARDED = 2**24
"""Announced bytes of a body that is too large, up to which it is read and discarded before the answer.

A server that closes a connection with unread bytes resets it, and a client that still sends may lose the answer.
"""

DISCARD_SECONDS = 2.0
"""Seconds after which the answer comes although the client has not sent the rest."""

DEFAULT_POSITIONS = 2**20
"""Positions of a model without a limit in its config, for the size of bodies alone."""


def positions_of(model: Any) -> int | None:
    """The positions that a model was trained for, or None if its config has no limit."""
    found: Any = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def body_limit(positions: int | None) -> int:
    """The bytes that a body may have.

    Args:
        positions: The positions of the model, or None if they are not limited.

    Examples:
        >>> body_limit(2048), body_limit(131072)
        (131072, 4259840)
    """
    return ENVELOPE + BYTES_PER_POSITION * (positions or DEFAULT_POSITIONS)


async def read_json(request: Request, limit: int) -> Any:
    """Read and decode the body of a request.

    Args:
        request: The request.
        limit: The bytes that its body may have; no more are kept, whether or not the request says how many it has.

    Raises:
        RequestError: If the body has another type, or is too large.
        KVPolicyError: If it is not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page may send other types to a local server without asking
        raise RequestError(f"The content type must be application/json, got {kind or 'none'}.", 415)
    data = await _read(request, limit)
    try:
        body = json.loads(data.decode("utf-8"))
        json.dumps(body, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(f"The body of a request must be JSON in UTF-8, got an error: {error}.") from None
    return body


async def _read(request: Request, limit: int) -> bytearray:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (length := int(announced[:20])) > limit:
        if length <= DISCARDED:
            await _discard(request)
        raise _too_large(limit, f"{length:,}")
    data = bytearray()
    async for part in request.stream():
        if len(data) + len(part) > limit:
            raise _too_large(limit, "more")
        data += part
    return data


async def _discard(request: Request) -> None:
    """Read the body of a request and keep nothing of it."""

    async def read() -> None:
        async for _ in request.stream():
            pass

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), DISCARD_SECONDS)


def _too_large(limit: int, got: str) -> RequestError:
    return RequestError(
        f"The body of a request must be at most {limit:,} bytes for this model, got {got}; try a shorter prompt.",
        TOO_LARGE,
    )

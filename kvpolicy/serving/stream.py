"""Responses of the server: usage with the cache's numbers, texts that end before a stop string, errors in JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from kvpolicy.serving.generation import Job
from kvpolicy.serving.streamer import StopFilter


def finish(answer: dict[str, Any], job: Job) -> dict[str, Any]:
    """Complete an answer that is not streamed: its text ends before a stop string, its usage has the cache's numbers.

    Args:
        answer: The answer of transformers' handler.
        job: The request; its tokens are generated.
    """
    for choice in answer["choices"]:
        holder, name = _text_of(choice, "message")
        if holder.get(name):
            stop = StopFilter(job.call.stop)
            holder[name] = stop.feed(holder[name]) + stop.flush()
            _note_stop(choice, stop)
    answer["usage"] = _usage(answer["usage"], job)
    return answer


async def rewrite(chunks: AsyncIterator[str], job: Job) -> AsyncIterator[str]:
    """Complete a stream of transformers' handler.

    The text ends before a stop string. The usage is sent if it was asked for, in a chunk of its own without choices, as
    the OpenAI API does, and `[DONE]` follows.

    Args:
        chunks: Events of the handler; one string may contain several.
        job: The request.
    """
    stop = StopFilter(job.call.stop)
    try:
        async for several in chunks:
            for event in several.split("\n\n"):
                if event.startswith('data: {"error"') and job.failure is not None:  # transformers escapes no quotes
                    yield _event(error_body(str(job.failure), job.failure.status))
                    return
                if event:
                    for chunk in _rewritten(json.loads(event.removeprefix("data: ")), stop, job):
                        yield _event(chunk)
        yield "data: [DONE]\n\n"
    except BaseException:  # the client is gone, or the server ends
        job.cancelled.set()
        raise


def _rewritten(chunk: dict[str, Any], stop: StopFilter, job: Job) -> list[dict[str, Any]]:
    """One event as none, one or several."""
    usage = chunk.pop("usage", None)
    (choice,) = chunk["choices"]
    holder, name = _text_of(choice, "delta")
    text = holder.get(name)
    out: list[dict[str, Any]] = []
    if choice.get("finish_reason"):
        rest = stop.flush()
        if rest:
            out.append({**chunk, "choices": [_with_text(choice, rest)]})
        _note_stop(choice, stop)
        out.append(chunk)
        if usage is not None and job.call.include_usage and job.usage is not None:
            out.append({**chunk, "choices": [], "usage": _usage(usage, job)})
        return out
    if text:
        holder[name] = stop.feed(text)
        return [chunk] if holder[name] else []
    return [chunk]


def _note_stop(choice: dict[str, Any], stop: StopFilter) -> None:
    """Let a text that ended before a stop string say so: transformers sees only that the last token was reached."""
    if stop.has_ended and choice["finish_reason"] == "length":
        choice["finish_reason"] = "stop"


def _with_text(choice: dict[str, Any], text: str) -> dict[str, Any]:
    """A choice that only has a text, like one that has the finish reason."""
    plain = {"index": choice.get("index", 0), "finish_reason": None}
    return {**plain, "delta": {"content": text}} if "delta" in choice else {**plain, "text": text}


def _text_of(choice: dict[str, Any], inner: str) -> tuple[dict[str, Any], str]:
    """Where the text of a choice stands: in its message or delta, or in itself for completions."""
    return (choice[inner], "content") if inner in choice else (choice, "text")


def _usage(usage: dict[str, Any], job: Job) -> dict[str, Any]:
    return usage if job.usage is None else {**usage, "kvpolicy": job.usage.as_dict()}


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error as the OpenAI API words it.

    >>> error_body("no", 400)["error"]["type"]
    'invalid_request_error'
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

"""The responses of the server, made of those of transformers' handlers, which have one choice each.

They have usage with the cache's numbers, texts that end before a stop string, log probabilities, and several choices.
Fields without a value that the OpenAI API always has are null.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvpolicy.reporting.detokenizer import INCOMPLETE
from kvpolicy.serving.generation import Job, describe
from kvpolicy.serving.metrics import CacheUsage
from kvpolicy.serving.requests import TOO_MANY, Call
from kvpolicy.serving.sampling import LogProb
from kvpolicy.serving.streamer import StopFilter
from kvpolicy.serving.tool_calls import CallReader, read_calls


def join(answers: Sequence[dict[str, Any]], jobs: Sequence[Job], call: Call) -> dict[str, Any]:
    """One answer that is not streamed, of those of transformers' handler.

    Args:
        answers: The answer of each job.
        jobs: The jobs; their tokens are generated.
        call: The request.
    """
    choices = [_finished(answer["choices"][0], job) for answer, job in zip(answers, jobs, strict=True)]
    numbered = [{"logprobs": None, **choice, "index": index} for index, choice in enumerate(choices)]
    return {**answers[0], "model": call.body["model"], "choices": numbered, "usage": _usage(jobs, call)}


def _finished(choice: dict[str, Any], job: Job) -> dict[str, Any]:
    """A choice whose text ends before a stop string, with its log probabilities, and calls if they are its format."""
    holder, name = _text_of(choice, "message")
    asked = job.call.format
    if asked is not None and holder is not choice:
        holder = choice["message"] = {"role": "assistant", name: job.written}  # as no parser of a template has read it
    stop = StopFilter(job.call.stop)
    if holder.get(name):
        holder[name] = stop.feed(holder[name]) + stop.flush()
    _note_end(choice, stop, job)
    if asked is not None and asked.calls:
        calls = read_calls(holder[name], job.key)
        choice["message"] = {"role": "assistant", name: None, **({"tool_calls": calls} if calls else {})}
    if job.call.sampling.logprobs is not None:
        choice["logprobs"] = _logprobs(job, job.logprobs, 0, in_chat=holder is not choice)
    if "message" in choice:
        choice["message"] = {"content": None, "refusal": None, **choice["message"]}
    return choice


async def rewrite(streams: Sequence[AsyncIterator[str]], jobs: Sequence[Job], call: Call) -> AsyncIterator[str]:
    """One stream, of those of transformers' handler.

    The text ends before a stop string. The usage is sent if it was asked for, in a chunk of its own without choices, as
    the OpenAI API does, and `[DONE]` follows.

    Args:
        streams: Events of the handler for each job; one string may contain several.
        jobs: The jobs.
        call: The request.
    """
    chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1)  # no faster than the client reads
    common: dict[str, Any] = {"id": jobs[0].key, "created": int(time.time()), "model": call.body["model"]}
    common |= {"usage": None} if call.include_usage else {}

    async def pump(index: int) -> None:
        try:
            async for chunk in _chunks(streams[index], jobs[index]):
                if "error" not in chunk:
                    (choice,) = chunk["choices"]
                    choice = {"logprobs": None, "finish_reason": None, **choice, "index": index}
                    chunk = {**chunk, **common, "choices": [choice]}
                await chunks.put(chunk)
        except Exception as error:  # of the handler: the client must not wait for ever
            failure = describe(error)
            await chunks.put(error_body(str(failure), failure.status))
        await chunks.put(None)

    pumps = [asyncio.create_task(pump(index)) for index in range(len(jobs))]
    last: dict[str, Any] = {}
    open_streams = len(jobs)
    try:
        while open_streams:
            chunk = await chunks.get()
            if chunk is None:
                open_streams -= 1
                continue
            yield _event(chunk)
            if "error" in chunk:
                return
            last = chunk
        if call.include_usage and all(job.usage is not None for job in jobs):
            yield _event({**last, "choices": [], "usage": _usage(jobs, call)})
        yield "data: [DONE]\n\n"
    finally:  # also if the client is gone, or the server ends
        for task, job in zip(pumps, jobs, strict=True):
            task.cancel()
            job.cancel()


async def _chunks(events: AsyncIterator[str], job: Job) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one job, the last of which may be an error."""
    stop = StopFilter(job.call.stop)
    asked = job.call.format
    calls = CallReader(job.key) if asked is not None and asked.calls else None
    sent = 0
    async for several in events:
        for event in several.split("\n\n"):
            if event.startswith('data: {"error"') and job.failure is not None:  # transformers escapes no quotes
                yield error_body(str(job.failure), job.failure.status)
                return
            if event:
                for chunk in _rewritten(json.loads(event.removeprefix("data: ")), stop, job):
                    (choice,) = chunk["choices"]
                    holder, name = _text_of(choice, "delta")
                    if calls is not None and holder.get(name):
                        new = calls.feed(holder.pop(name))
                        if not new:
                            continue
                        holder["tool_calls"] = new
                    entries = job.logprobs[sent:]  # the rows add to the list meanwhile
                    has_text = holder.get(name) or holder.get("tool_calls")
                    if entries and (has_text or choice.get("finish_reason")):
                        choice["logprobs"] = _logprobs(job, entries, sent, in_chat=holder is not choice)
                        sent += len(entries)
                    yield chunk


def _rewritten(chunk: dict[str, Any], stop: StopFilter, job: Job) -> list[dict[str, Any]]:
    """One event as none, one or several."""
    chunk.pop("usage", None)
    (choice,) = chunk["choices"]
    holder, name = _text_of(choice, "delta")
    text = holder.get(name)
    if choice.get("finish_reason"):
        rest = stop.flush()
        _note_end(choice, stop, job)
        return [{**chunk, "choices": [_with_text(choice, rest)]}, chunk] if rest else [chunk]
    if text:
        holder[name] = stop.feed(text)
        return [chunk] if holder[name] else []
    return [chunk]


def _note_end(choice: dict[str, Any], stop: StopFilter, job: Job) -> None:
    """Say why a text ended where transformers cannot know: it counts tokens, and looks for calls of its own."""
    asked = job.call.format
    if stop.has_ended or (job.has_stopped and asked is None):
        if asked is not None or choice["finish_reason"] == "length":
            choice["finish_reason"] = "stop"
    elif asked is not None and job.is_complete:
        choice["finish_reason"] = "tool_calls" if asked.calls else "stop"
    elif asked is not None and choice["finish_reason"] == "tool_calls":
        choice["finish_reason"] = "length"


def _with_text(choice: dict[str, Any], text: str) -> dict[str, Any]:
    """A choice that only has a text, like one that has the finish reason."""
    plain = {"index": choice.get("index", 0), "finish_reason": None}
    return {**plain, "delta": {"content": text}} if "delta" in choice else {**plain, "text": text}


def _text_of(choice: dict[str, Any], inner: str) -> tuple[dict[str, Any], str]:
    """Where the text of a choice stands: in its message or delta, or in itself for completions."""
    return (choice[inner], "content") if inner in choice else (choice, "text")


def _usage(jobs: Sequence[Job], call: Call) -> dict[str, Any]:
    """The usage of a request; a prompt with several choices counts once."""
    prompt = sum(len(job.prompt.ids) for job in jobs[:: call.choices])
    made = sum(len(job.tokens) for job in jobs)
    cached = sum(job.cached for job in jobs[:: call.choices])
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}
    held = [job.usage for job in jobs if job.usage is not None]
    return {**usage, "kvpolicy": _sum(held).as_dict()} if held else usage


def _sum(held: Sequence[CacheUsage]) -> CacheUsage:
    """The bytes of several caches, and the mean of the tokens that they keep."""
    return CacheUsage(
        kept_tokens=sum(each.kept_tokens for each in held) / len(held),
        cache_nbytes=sum(each.cache_nbytes for each in held),
        full_nbytes=sum(each.full_nbytes for each in held),
    )


def _logprobs(job: Job, entries: Sequence[LogProb], first: int, *, in_chat: bool) -> dict[str, Any]:
    """Log probabilities as the two endpoints word them.

    Args:
        job: The answer.
        entries: The probabilities of some of its tokens.
        first: The number of the first of them.
        in_chat: Whether they are those of a chat.
    """

    def word(token: int, value: float, text: str) -> dict[str, Any]:
        # A part of a character has bytes that the tokenizer does not tell.
        return {"token": text, "logprob": value, "bytes": None if INCOMPLETE in text else list(text.encode("utf-8"))}

    places = [(one, job.texts_at(number)) for number, one in enumerate(entries, first)]
    if in_chat:
        content = [
            {
                **word(one.token, one.value, text(one.token)),
                "top_logprobs": [word(token, value, text(token)) for token, value in one.top],
            }
            for one, text in places
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [text(one.token) for one, text in places],
        "token_logprobs": [one.value for one in entries],
        # The likeliest last: of several tokens with one text, it is the one that counts.
        "top_logprobs": [{text(token): value for token, value in reversed(one.top)} for one, text in places],
    }


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error as the OpenAI API words it.

    >>> error_body("no", 400)["error"]["type"]
    'invalid_request_error'
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == TOO_MANY else kind
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"

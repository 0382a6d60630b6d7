"""The usage in an answer: the tokens of whole texts instead of placeholders."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kvpolicy_vllm.asgi import Event, Send
from kvpolicy_vllm.documents import Document


class Tokens(NamedTuple):
    """Numbers of tokens that the placeholders of a prompt stand for.

    Attributes:
        more: Tokens that a usage lacks, since placeholders stand for them.
        facts: What is said beside.
    """

    more: int
    facts: dict[str, int]


def tokens_of(document: Document) -> Tokens:
    """Numbers of tokens that the placeholders of a document stand for."""
    return Tokens(document.total - document.kept, {"document_tokens": document.total, "kept_tokens": document.kept})


def corrected(usage: dict[str, Any], tokens: Tokens) -> dict[str, Any]:
    """A usage that counts whole texts instead of placeholders.

    Examples:
        >>> usage = {"prompt_tokens": 23, "completion_tokens": 5, "total_tokens": 28}
        >>> corrected(usage, Tokens(80, {"kept_tokens": 20}))["prompt_tokens"]
        103
    """
    found: dict[str, Any] = {**usage, "kvpolicy": tokens.facts}
    for name in ("prompt_tokens", "total_tokens"):
        if isinstance(found.get(name), int):
            found[name] += tokens.more
    return found


class UsageEditor:
    """Passes on the events of an ASGI response, and corrects the usage in them.

    Args:
        tokens: What its placeholders stand for.
        send: Where the events go.
    """

    def __init__(self, tokens: Tokens, send: Send) -> None:
        """Expect the start of a response."""
        self._tokens = tokens
        self._send = send
        self._start: Event | None = None
        self._held = b""
        self._is_stream = False

    async def send(self, event: Event) -> None:
        """Pass on an event: at once, or of a JSON answer when it is whole."""
        if event["type"] == "http.response.start":
            kind = dict(event["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if self._is_stream or event["status"] != 200 or not kind.startswith(b"application/json"):
                self._start = None
                await self._send(event)
            else:
                self._start = event
            return
        if event["type"] != "http.response.body" or (self._start is None and not self._is_stream):
            await self._send(event)
            return
        self._held += event.get("body", b"")
        ends = not event.get("more_body", False)
        if self._is_stream:
            await self._send({**event, "body": self._whole_events(ends)})
        elif ends and self._start is not None:
            body = self._edited(self._held)
            headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
            await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            await self._send({"type": "http.response.body", "body": body})

    def _whole_events(self, ends: bool) -> bytes:
        """The server-sent events that are complete, corrected."""
        *events, self._held = self._held.split(b"\n\n")
        done = b"".join(self._edited_event(each) + b"\n\n" for each in events)
        if ends:
            done += self._held
            self._held = b""
        return done

    def _edited_event(self, event: bytes) -> bytes:
        prefix = b"data: "
        return prefix + self._edited(event[len(prefix) :]) if event.startswith(prefix) else event

    def _edited(self, body: bytes) -> bytes:
        try:
            content: Any = json.loads(body)
        except ValueError:  # such as [DONE]
            return body
        if not isinstance(content, dict) or not isinstance(content.get("usage"), dict):
            return body
        content["usage"] = corrected(content["usage"], self._tokens)
        return json.dumps(content, ensure_ascii=False).encode()

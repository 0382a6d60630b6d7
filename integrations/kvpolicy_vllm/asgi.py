"""ASGI for middleware in front of vLLM's server: bodies that are read, replayed and replaced, and API keys."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def posted(scope: Scope) -> str:
    """The path that something is posted to, without the root path; empty for other requests."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return ""
    return str(scope.get("path", "")).removeprefix(str(scope.get("root_path") or ""))


def with_body(scope: Scope, body: bytes) -> Scope:
    """A request with another body."""
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}


def is_let_in(scope: Scope, args: Any) -> bool:
    """Whether a request has one of the server's API keys, as vLLM checks it behind this middleware."""
    keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    if not keys:
        return True
    header = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    scheme, _, given = header.decode("latin-1").partition(" ")
    digest = hashlib.sha256(given.encode()).digest()
    same = [secrets.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    return scheme.lower() == "bearer" and any(same)


async def body_of(receive: Receive) -> bytes | None:
    """The body of a request; None if its client left."""
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            return None
        parts.append(event.get("body", b""))
        if not event.get("more_body", False):
            return b"".join(parts)


def parsed(raw: bytes | None) -> Any:
    """The JSON of a body; None if it is none, which vLLM refuses in its own words."""
    try:
        return None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return None


def replay(raw: bytes | None, receive: Receive) -> Receive:
    """Receive a body that was read before, and then what comes."""
    events: list[Event] = [{"type": "http.request", "body": raw or b"", "more_body": False}]
    if raw is None:
        events = [{"type": "http.disconnect"}]

    async def again() -> Event:
        return events.pop() if events else await receive()

    return again


async def refuse(send: Send, message: str, field: str) -> None:
    """Answer with status 400 and a sentence about a field."""
    error = {"message": message, "type": "BadRequestError", "param": field, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""What stands behind a middleware of vLLM's server, and its clients."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any


class AsgiServer:
    """A server that records what gets through a middleware.

    Args:
        middleware: The class of the middleware.
        config: The config of the engine.
        **args: Arguments of the server.

    Attributes:
        bodies: The bodies that came: their JSON if they have one, and None of a client that left.
        scopes: Where they came to.
        middleware: The middleware in front of it.
    """

    def __init__(self, middleware: Any, config: Any, **args: Any) -> None:
        """Nothing has come."""
        self.state = SimpleNamespace(vllm_config=config, args=SimpleNamespace(**args))
        self.bodies: list[Any] = []
        self.scopes: list[Any] = []
        self.middleware = middleware(self._app)

    async def respond(self, content: Any, receive: Any, send: Any) -> None:
        """Answer to a body."""
        raise NotImplementedError

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        event: Any = {"type": "http.request", "more_body": True}
        raw = b""
        while event["type"] == "http.request" and event.get("more_body"):
            event = await receive()
            raw += event.get("body", b"")
        if event["type"] == "http.disconnect":
            self.bodies.append(None)
            return
        assert [int(value) for name, value in scope["headers"] if name == b"content-length"] in ([], [len(raw)])
        try:
            content = json.loads(raw)
        except ValueError:
            content = raw
        self.bodies.append(content)
        await self.respond(content, receive, send)

    def post(self, path: str, body: Any, key: str = "", root: str = "", scheme: str = "Bearer") -> tuple[int, bytes]:
        """Send a body in two parts; the status and the body of the answer, 0 if there is none."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"content-length", str(len(raw)).encode()), (b"x-request-id", b"7")]
        headers += [(b"authorization", f"{scheme} {key}".encode())] if key else []
        scope = {"type": "http", "method": "POST", "path": root + path, "root_path": root, "headers": headers}
        halves = [{"body": raw[:3], "more_body": True}, {"body": raw[3:], "more_body": False}]
        sent = self.call(scope, [{"type": "http.request", **half} for half in halves])
        if not sent:
            return 0, b""
        content = b"".join(event.get("body", b"") for event in sent[1:])
        lengths = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
        assert lengths in ([], [len(content)])
        return sent[0]["status"], content

    def call(self, scope: dict[str, Any], events: list[Any]) -> list[Any]:
        """What is sent when these events come, and then the client leaves."""
        sent: list[Any] = []

        async def receive() -> Any:
            return events.pop(0) if events else {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        asyncio.run(self.middleware({**scope, "app": SimpleNamespace(state=self.state)}, receive, send))
        return sent

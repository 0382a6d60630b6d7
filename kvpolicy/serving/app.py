"""The routes of the server, and the names that it answers to.

Errors are in JSON. What a coroutine does before it first waits runs in a thread.

A web page may let its own name resolve to the address of a local server, and then reads what the server answers ("DNS
rebinding"). The browser sends the page's name in the `Host` header, by which the server can tell.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import socket
import time
import types
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvpolicy.serving.answers import error_body, join, rewrite
from kvpolicy.serving.generation import Cancelled, Failure, Generation, Job, describe, make_jobs
from kvpolicy.serving.metrics import Metrics
from kvpolicy.serving.requests import TOO_LARGE, Call, RequestError, parse_chat, parse_completion, read_json
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.version import __version__

ANY = "*"
"""Stands for every name."""

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?")
_HEADER = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::[0-9]*)?")


class Hosts:
    """The names and addresses that a `Host` header may have.

    Args:
        address: The numeric address that the server listens on.
        allowed: More names and addresses, or `*` for every one.

    Examples:
        >>> hosts = Hosts("127.0.0.1", ["gpu-box"])
        >>> [hosts.allows(name) for name in ("localhost:8000", "GPU-box", "[::1]:80", "example.com", "10.0.0.5")]
        [True, True, True, False, False]
        >>> Hosts("0.0.0.0").allows("10.0.0.5:8000")
        True
    """

    def __init__(self, address: str, allowed: Iterable[str] = ()) -> None:
        """The names of a server, which are looked up once."""
        own = ["localhost", "127.0.0.1", "::1", address.partition("%")[0]]
        # An address in the header is no name that a page could have let point here.
        self._any_address = ipaddress.ip_address(own[-1]).is_unspecified
        if self._any_address:
            own += [socket.gethostname(), socket.getfqdn()]
        self._allowed = {_canonical(name) for name in (*own, *allowed) if name}

    def allows(self, header: str | None) -> bool:
        """Whether the server answers to a `Host` header; None for a request without one, or with several."""
        if ANY in self._allowed:
            return True
        match = None if header is None else _HEADER.fullmatch(header)
        if match is None:
            return False
        host = _canonical(match["host"])
        return host in self._allowed or (self._any_address and _address(host) is not None)


def check_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names of `--allowed-hosts`, if all of them are names or addresses.

    Args:
        names: The names.

    Raises:
        KVPolicyError: If one is something else, such as a URL.
    """
    for name in names:
        found = _canonical(name)
        if found != ANY and _address(found) is None and not _NAME.fullmatch(found):
            raise KVPolicyError(
                f"--allowed-hosts must be names or addresses without ports, separated by commas, got {name!r}; try "
                "gpu-box.example.com,10.0.0.5."
            )
    return names


class KeyCheck:
    """Middleware that refuses requests to `/v1` without the server's key.

    Args:
        app: The app.
        key: The key.
    """

    def __init__(self, app: Any, key: str) -> None:
        """Stand before an app."""
        self._app = app
        self._wanted = b"Bearer " + key.encode("utf-8")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._wanted):
                message = "The Authorization header must be 'Bearer' and the key of this server, got another."
                await JSONResponse(error_body(message, 401, "invalid_api_key"), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostCheck:
    """Middleware that refuses requests for other names than those of the server.

    Starlette's `TrustedHostMiddleware` knows neither addresses in general nor the form of this server's errors, and
    older versions of it cut IPv6 addresses at their first colon.

    Args:
        app: The app.
        hosts: The names.
    """

    def __init__(self, app: Any, hosts: Hosts) -> None:
        """Stand before an app."""
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] in ("http", "websocket"):
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            header = given[0] if len(given) == 1 else None
            if not self._hosts.allows(header):
                await _refusal(given)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(given: list[str]) -> JSONResponse:
    got = " and ".join(repr(host[:60]) for host in given[:2]) or "none"
    message = (
        f"The Host header must be a name or an address of this server, got {got}; try starting kvpolicy serve with "
        "--allowed-hosts and this name."
    )
    return JSONResponse(error_body(message, 403), status_code=403)


def _canonical(name: str) -> str:
    """A name or an address in the one form in which they are compared."""
    found = name.strip().lower()
    address = _address(found.removeprefix("[").removesuffix("]"))
    return found.removesuffix(".") if address is None else str(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """The rest of a coroutine that has begun, which `await` would refuse by itself."""
    return (yield from coroutine.__await__())


async def begin_in_thread(executor: Executor, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread up to its first `await asyncio.sleep(0)`, and from there in the event loop.

    Args:
        executor: The threads.
        coroutine: The coroutine; its first `await` that suspends it must be of that form.

    Returns:
        The result of the coroutine.
    """
    ended, value = await asyncio.get_running_loop().run_in_executor(executor, _begin, coroutine)
    return value if ended else await _rest(coroutine)


def _begin(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Whether the coroutine ended, and what it returned."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration as end:
        return True, end.value
    if waits_for is not None:  # what it waits for belongs to an event loop, and this thread has none
        coroutine.close()
        raise RuntimeError(f"A coroutine in a thread must not wait, got one that waits for {waits_for!r}.")
    return False, None


CLIENT_CLOSED = 499
"""The status of a request after its client disconnected; nobody reads it."""


def build_app(
    name: str,
    policy: str,
    handlers: tuple[Any, Any],
    generation: Generation,
    metrics: Metrics,
    hosts: Hosts,
    limit: int,
    key: str | None = None,
) -> FastAPI:
    """Build the app of a server.

    Args:
        name: The name of the model.
        policy: The spec of the policy.
        handlers: Transformers' handlers for chat and completions.
        generation: The `Generation` that answers requests.
        metrics: The counters.
        hosts: The names that the server answers to.
        limit: The bytes that the body of a request may have.
        key: The key that requests must have; None for none.
    """
    # One thread: tokenizers may have state, and a long prompt leaves the other cores to the model.
    preparation = ThreadPoolExecutor(1, "kvpolicy-prompts")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await generation.stop_running()
        preparation.shutdown()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if key is not None:
        app.add_middleware(KeyCheck, key=key)
    app.add_middleware(HostCheck, hosts=hosts)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvpolicy", "policy": policy}
    chat, completion = handlers
    watching: set[asyncio.Task[None]] = set()

    async def answer(request: Request, kind: str, parse: Callable[[Any, str], Call], handler: Any) -> Response:
        jobs: list[Job] = []
        try:
            call = parse(await read_json(request, limit), name)
            jobs = make_jobs(f"{kind}-{uuid.uuid4().hex}", call)
            generation.open(jobs)
            # Until the response is complete, which uvicorn reports as a disconnect too.
            task = asyncio.create_task(_watch(request, jobs))
            watching.add(task)
            task.add_done_callback(watching.discard)
            return await _respond(handler, call, jobs, generation, preparation)
        except ClientDisconnect:  # while it sent the body
            metrics.count("cancelled")
            return Response(status_code=CLIENT_CLOSED)
        except Cancelled:
            return Response(status_code=CLIENT_CLOSED)
        except Failure as error:
            return _error(str(error), error.status)
        except KVPolicyError as error:
            metrics.count("refused")
            if isinstance(error, RequestError):
                return _error(str(error), error.status, error.code)
            return _error(str(error), 400)
        except Exception as error:
            if all(job.times.whole is None for job in jobs):  # else they are counted as what they were for the rows
                metrics.count("failed")
            failure = describe(error)
            return _error(str(failure), failure.status)

    async def chat_completions(request: Request) -> Response:
        return await answer(request, "chatcmpl", parse_chat, chat)

    async def completions(request: Request) -> Response:
        return await answer(request, "cmpl", parse_completion, completion)

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(wanted: str) -> Response:
        if wanted == name:
            return JSONResponse(card)
        return _error(f"model must be {name!r}, the one that this server has, got {wanted!r}.", 404, "model_not_found")

    async def health() -> Response:
        return JSONResponse({"status": "ok", "model": name, "policy": policy, "kvpolicy": __version__})

    async def counters() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def no_route(_: Request, error: Exception) -> Response:
        status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
        return _error(
            "The path must be /v1/chat/completions, /v1/completions, /v1/models, /health or /metrics, with the method "
            "that belongs to it.",
            status,
            headers=headers,
        )

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{wanted:path}", model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", counters, methods=["GET"])
    app.add_exception_handler(404, no_route)
    app.add_exception_handler(405, no_route)
    return app


async def _respond(
    handler: Any, call: Call, jobs: list[Job], generation: Generation, preparation: Executor
) -> Response:
    # The template and the tokenizer take seconds for a long prompt.
    started = [begin_in_thread(preparation, handler.handle_request(job.call.body, job.key)) for job in jobs]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in started]
    try:
        responses = await asyncio.gather(*tasks)
    except BaseException as error:
        for job in jobs:
            generation.close(job)
        if isinstance(error, Exception):
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
    if not call.stream:
        return JSONResponse(join([json.loads(response.body) for response in responses], jobs, call))
    # Only now, since a status cannot be taken back: the policy may refuse the prompt. Of several answers the first one
    # counts: others may have to wait for its row.
    await asyncio.wait([job.begun for job in jobs], return_when=asyncio.FIRST_COMPLETED)
    failed = next((job.failure for job in jobs if job.failure is not None and not job.tokens), None)
    if failed is not None:
        for job in jobs:
            job.cancel()
        raise failed
    return StreamingResponse(rewrite([each.body_iterator for each in responses], jobs, call), media_type=EVENTS)


EVENTS = "text/event-stream"


async def _watch(request: Request, jobs: list[Job]) -> None:
    """Cancel answers once their client is gone; after the end of the response this does nothing."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.cancel()


def _error(message: str, status: int, code: str | None = None, *, headers: Mapping[str, str] | None = None) -> Response:
    # Of a body that is too large, the rest is not read.
    headers = {"Connection": "close"} if status == TOO_LARGE else headers
    return JSONResponse(error_body(message, status, code), status_code=status, headers=headers)

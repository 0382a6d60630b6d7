"""The routes of the server; what a coroutine does before it first waits runs in a thread."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from kvpolicy.serving.generation import Cancelled, Failure, Generation, Job, describe
from kvpolicy.serving.hosts import HostCheck, Hosts
from kvpolicy.serving.metrics import Metrics
from kvpolicy.serving.requests import TOO_LARGE, Call, RequestError, parse_chat, parse_completion, read_json
from kvpolicy.serving.stream import error_body, finish, rewrite
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.version import __version__


class _Rest:
    """Awaitable for the rest of a coroutine that has begun, which `await` would refuse by itself.

    Args:
        coroutine: The coroutine.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


async def begin_in_thread(executor: Executor, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread up to its first `await asyncio.sleep(0)`, and from there in the event loop.

    Args:
        executor: The threads.
        coroutine: The coroutine; its first `await` that suspends it must be of that form.

    Returns:
        The result of the coroutine.
    """
    ended, value = await asyncio.get_running_loop().run_in_executor(executor, _begin, coroutine)
    return value if ended else await _Rest(coroutine)


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
    """
    # One thread: tokenizers may have state, and a long prompt leaves the other cores to the model.
    preparation = ThreadPoolExecutor(1, "kvpolicy-prompts")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await generation.stop_running()
        preparation.shutdown()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HostCheck, hosts=hosts)
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvpolicy", "policy": policy}
    chat, completion = handlers
    watching: set[asyncio.Task[None]] = set()

    async def answer(request: Request, kind: str, parse: Callable[[Any, str], Call], handler: Any) -> Response:
        try:
            call = parse(await read_json(request, limit), name)
            job = Job(f"{kind}-{uuid.uuid4().hex}", call)
            generation.open(job)
            # Until the response is complete, which uvicorn reports as a disconnect too.
            task = asyncio.create_task(_watch(request, job))
            watching.add(task)
            task.add_done_callback(watching.discard)
            return await _respond(handler, job, generation, preparation)
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
        status = error.status_code if isinstance(error, HTTPException) else 404
        return _error(
            "The path must be /v1/chat/completions, /v1/completions, /v1/models, /health or /metrics, with the method "
            "that belongs to it.",
            status,
        )

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{wanted:path}", model, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/metrics", counters, methods=["GET"])
    app.add_exception_handler(404, no_route)
    app.add_exception_handler(405, no_route)
    return app


async def _respond(handler: Any, job: Job, generation: Generation, preparation: Executor) -> Response:
    try:
        # The template and the tokenizer take seconds for a long prompt.
        response = await begin_in_thread(preparation, handler.handle_request(job.call.body, job.key))
    except BaseException:
        job.cancelled.set()
        generation.close(job)
        raise
    if not job.call.stream:
        return JSONResponse(finish(json.loads(response.body), job))
    # Only now, since a status cannot be taken back: the policy may refuse the prompt.
    await job.begun
    if job.failure is not None and not job.tokens:
        raise job.failure
    return StreamingResponse(rewrite(response.body_iterator, job), media_type="text/event-stream")


async def _watch(request: Request, job: Job) -> None:
    """Cancel a job once its client is gone; after the end of the response this does nothing."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancelled.set()


def _error(message: str, status: int, code: str | None = None) -> Response:
    # Of a body that is too large, the rest is not read.
    headers = {"Connection": "close"} if status == TOO_LARGE else None
    return JSONResponse(error_body(message, status, code), status_code=status, headers=headers)

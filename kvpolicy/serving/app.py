"""The routes of the server. Errors are in JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from kvpolicy.serving.access import HostCheck, Hosts, KeyCheck
from kvpolicy.serving.answering import Answering, error_response
from kvpolicy.serving.generation import Generation
from kvpolicy.serving.metrics import Metrics
from kvpolicy.serving.requests import RequestError, check_model, parse_chat, parse_completion
from kvpolicy.text.version import __version__


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
    answering = Answering(name, generation, metrics, limit)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await answering.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    if key is not None:
        app.add_middleware(KeyCheck, key=key)
    app.add_middleware(HostCheck, hosts=hosts)
    _add_answers(app, answering, *handlers)
    _add_model(app, name, policy)
    _add_state(app, name, policy, metrics)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(405, _no_route)
    return app


def _add_answers(app: FastAPI, answering: Answering, chat: Any, completion: Any) -> None:
    """The routes of what the model generates."""

    async def chat_completions(request: Request) -> Response:
        return await answering.answer(request, "chatcmpl", parse_chat, chat)

    async def completions(request: Request) -> Response:
        return await answering.answer(request, "cmpl", parse_completion, completion)

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", completions, methods=["POST"])


def _add_model(app: FastAPI, name: str, policy: str) -> None:
    """The routes of the list of models, which has one."""
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvpolicy", "policy": policy}

    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def model(wanted: str) -> Response:
        try:
            check_model(wanted, name)
        except RequestError as error:
            return error_response(str(error), error.status, error.code)
        return JSONResponse(card)

    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{wanted:path}", model, methods=["GET"])


def _add_state(app: FastAPI, name: str, policy: str, metrics: Metrics) -> None:
    """The routes of what the server is and does, which need no key."""

    async def health() -> Response:
        return JSONResponse({"status": "ok", "model": name, "policy": policy, "kvpolicy": __version__})

    async def counters() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", counters, methods=["GET"])


async def _no_route(_: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
    return error_response(
        "The path must be /v1/chat/completions, /v1/completions, /v1/models, /health or /metrics, with the method that "
        "belongs to it.",
        status,
        headers=headers,
    )

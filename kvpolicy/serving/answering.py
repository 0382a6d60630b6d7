"""Answers to requests: from the body of a request to its response, whatever happens in between.

What a coroutine does before it first waits runs in a thread.
"""

from __future__ import annotations

import asyncio
import json
import types
import uuid
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from kvpolicy.serving.answers import error_body, join, rewrite
from kvpolicy.serving.generation import Cancelled, Failure, Generation, Job, describe, make_jobs
from kvpolicy.serving.metrics import Metrics
from kvpolicy.serving.requests import TOO_LARGE, Call, RequestError, read_json
from kvpolicy.text.errors import KVPolicyError

CLIENT_CLOSED = 499
"""The status of a request after its client disconnected; nobody reads it."""

EVENTS = "text/event-stream"


class Answering:
    """Answers requests to a model.

    Args:
        name: The name of the model.
        generation: The `Generation` that answers requests.
        metrics: The counters.
        limit: The bytes that the body of a request may have.
    """

    def __init__(self, name: str, generation: Generation, metrics: Metrics, limit: int) -> None:
        """Nothing was asked."""
        self._name = name
        self._generation = generation
        self._metrics = metrics
        self._limit = limit
        # One thread: tokenizers may have state, and a long prompt leaves the other cores to the model.
        self._preparation = ThreadPoolExecutor(1, "kvpolicy-prompts")
        self._watching: set[asyncio.Task[None]] = set()

    async def answer(self, request: Request, kind: str, parse: Callable[[Any, str], Call], handler: Any) -> Response:
        """Answer a request, with an error if it is refused or fails.

        Args:
            request: The request.
            kind: What the ids of its answers begin with.
            parse: Checks the body of a request to the model of a name.
            handler: Transformers' handler of such requests.
        """
        jobs: list[Job] = []
        try:
            call = parse(await self._generation.receive(read_json(request, self._limit)), self._name)
            jobs = make_jobs(f"{kind}-{uuid.uuid4().hex}", call)
            self._generation.open(jobs)
            self._watch(request, jobs)
            return await self._respond(handler, call, jobs)
        except ClientDisconnect:  # while it sent the body
            self._metrics.count("cancelled")
            return Response(status_code=CLIENT_CLOSED)
        except Cancelled:
            return Response(status_code=CLIENT_CLOSED)
        except Failure as error:
            if not jobs:  # else it was counted at its end
                self._metrics.count("failed")
            return error_response(str(error), error.status)
        except KVPolicyError as error:
            self._metrics.count("refused")
            if isinstance(error, RequestError):
                return error_response(str(error), error.status, error.code)
            return error_response(str(error), 400)
        except Exception as error:
            if all(job.times.whole is None for job in jobs):  # else they are counted as what they were for the rows
                self._metrics.count("failed")
            failure = describe(error)
            return error_response(str(failure), failure.status)

    async def stop(self) -> None:
        """End all answers with an error."""
        await self._generation.stop_running()
        self._preparation.shutdown()

    def _watch(self, request: Request, jobs: list[Job]) -> None:
        """Cancel answers once their client is gone; after the end of the response this does nothing."""

        async def wait() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            for job in jobs:
                job.cancel()

        # Until the response is complete, which uvicorn reports as a disconnect too.
        task = asyncio.create_task(wait())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _respond(self, handler: Any, call: Call, jobs: list[Job]) -> Response:
        responses = await self._handle(handler, jobs)
        if not call.stream:
            return JSONResponse(join([json.loads(response.body) for response in responses], jobs, call))
        # Only now, since a status cannot be taken back: the policy may refuse the prompt. Of several answers the first
        # one counts: others may have to wait for its row.
        await asyncio.wait([job.begun for job in jobs], return_when=asyncio.FIRST_COMPLETED)
        failed = next((job.failure for job in jobs if job.failure is not None and not job.tokens), None)
        if failed is not None:
            for job in jobs:
                job.cancel()
            raise failed
        return StreamingResponse(rewrite([each.body_iterator for each in responses], jobs, call), media_type=EVENTS)

    async def _handle(self, handler: Any, jobs: list[Job]) -> list[Any]:
        """What transformers' handler responds to each job."""
        # Of copies: the handler changes the name of a model in them, and choices share one.
        handled = [handler.handle_request({**job.call.body}, job.key) for job in jobs]
        # The template and the tokenizer take seconds for a long prompt.
        started = [begin_in_thread(self._preparation, coroutine) for coroutine in handled]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in started]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            for job in jobs:
                self._generation.close(job)
            if isinstance(error, Exception):
                await asyncio.gather(*tasks, return_exceptions=True)
            raise


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


def error_response(
    message: str, status: int, code: str | None = None, *, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to a request that is not answered.

    Args:
        message: One sentence.
        status: The HTTP status.
        code: The code of the OpenAI API, if it has one.
        headers: Further headers.
    """
    # Of a body that is too large, the rest is not read.
    headers = {"Connection": "close"} if status == TOO_LARGE else headers
    return JSONResponse(error_body(message, status, code), status_code=status, headers=headers)

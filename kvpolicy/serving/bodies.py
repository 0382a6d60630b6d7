"""The bodies of requests: their type, their size, and their JSON."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import Request

from kvpolicy.serving.requests import RequestError
from kvpolicy.text.errors import KVPolicyError

TOO_LARGE = 413
"""The HTTP status of a body that is too large."""

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

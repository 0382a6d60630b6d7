"""The first part of a coroutine, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from concurrent.futures import Executor
from typing import Any


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

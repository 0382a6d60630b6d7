"""Clients of a server with OpenAI's interface, that ask at random moments and note when their tokens come."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import openai

RATE = 4.0
"""Requests of a second, in the mean."""


class Workload(NamedTuple):
    """What clients ask.

    Attributes:
        clients: How many there are, with one request each.
        prompt: The fewest and the most tokens of a prompt.
        new: The same of an answer.
    """

    clients: int
    prompt: tuple[int, int]
    new: tuple[int, int]

    @property
    def length(self) -> int:
        """The most tokens of a request and its answer."""
        return self.prompt[1] + self.new[1] + 8


class Request(NamedTuple):
    """What a client asks.

    Attributes:
        at: Seconds after the first request.
        prompt: The prompt.
        new: Tokens of the answer.
    """

    at: float
    prompt: str
    new: int


class Seen(NamedTuple):
    """What a client sees of one answer.

    Attributes:
        first: Seconds from the request to its first token.
        gaps: Seconds between its tokens.
        new: Its tokens.
    """

    first: float
    gaps: list[float]
    new: int


class Address(NamedTuple):
    """Where a server is.

    Attributes:
        port: Its port on this machine.
        model: The name of its model.
    """

    port: int
    model: str


class Measured(NamedTuple):
    """A server under its clients.

    Attributes:
        nbytes: The most bytes of its cache.
        rate: Generated tokens of a second.
        first: Seconds to first tokens.
        gaps: Seconds between tokens.
    """

    nbytes: int
    rate: float
    first: list[float]
    gaps: list[float]


def requests(work: Workload, seed: int = 0) -> list[Request]:
    """Requests that arrive as a Poisson process, with lengths that are equally likely."""
    draw = random.Random(seed)
    at = 0.0
    made: list[Request] = []
    for _ in range(work.clients):
        text = "".join(draw.choice("abcdefghij0123456789=\n") for _ in range(draw.randint(*work.prompt)))
        made.append(Request(at, text, draw.randint(*work.new)))
        at += draw.expovariate(RATE)
    return made


def quantile(values: Sequence[float], part: float) -> float:
    """The value that a part of them does not exceed.

    Examples:
        >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([4.0, 1.0, 3.0, 2.0], 0.99), quantile([1.0], 0.5)
        (2.0, 4.0, 1.0)
    """
    ranked = sorted(values)
    return ranked[max(-(-len(ranked) * round(100 * part) // 100) - 1, 0)]


def measured(address: Address, asked: Sequence[Request], nbytes: Callable[[], int]) -> Measured:
    """Ask a server, after three requests that are not measured.

    Args:
        address: Where it is.
        asked: The requests.
        nbytes: The bytes of its cache now; called again and again.
    """
    # Of several lengths, so that no step is compiled later: with one row, each prompt has a cache of its own size.
    warm = [request._replace(at=0.0, new=4) for request in asked[:3]]
    asyncio.run(_ask_all(address, warm, nbytes))
    seen, seconds, held = asyncio.run(_ask_all(address, asked, nbytes))
    gaps = [gap for each in seen for gap in each.gaps]
    return Measured(held, sum(each.new for each in seen) / seconds, [each.first for each in seen], gaps)


async def _ask_all(
    address: Address, asked: Sequence[Request], nbytes: Callable[[], int]
) -> tuple[list[Seen], float, int]:
    """What clients see, the seconds of all of them together, and the most bytes of the cache."""
    held = 0
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{address.port}/v1", api_key="none", max_retries=0, timeout=3600
    ) as client:

        async def watch() -> None:
            nonlocal held
            while True:
                held = max(held, await asyncio.to_thread(nbytes))
                await asyncio.sleep(0.5)

        watcher = asyncio.create_task(watch())
        begun = time.perf_counter()
        seen = await asyncio.gather(*(_ask(client, address.model, request) for request in asked))
        seconds = time.perf_counter() - begun
        watcher.cancel()
    return list(seen), seconds, held


async def _ask(client: Any, model: str, request: Request) -> Seen:
    """Send a request at its time, and note when its tokens come."""
    await asyncio.sleep(request.at)
    begun = time.perf_counter()
    times: list[float] = []
    stream = await client.completions.create(
        model=model, prompt=request.prompt, max_tokens=request.new, temperature=0, stream=True
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].finish_reason is None:
            times.append(time.perf_counter())
    times = times or [time.perf_counter()]  # of special tokens alone, for which some servers send nothing
    return Seen(times[0] - begun, [b - a for a, b in itertools.pairwise(times)], request.new)

"""`kvpolicy serve` under clients that ask at random moments: one row, and as many as fit into the same memory.

The server is a thread with a random model, whose answers have the length that is asked for; clients stream them. What
is measured is what a client sees. The memory is that of a few rows of the full cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai

import kvpolicy
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.server import bind, serving
from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.bench.models import llama
from kvpolicy_eval.common.table import Grid, Option, Section, Table, collect, threads, torch_note

POLICIES = ("full", "snapkv@0.2", "h2o@256", "snapkv+tokenwise:bits=4@0.2")
LAYERS = 4
HIDDEN = 1024
HEADS = 16
KV_HEADS = 4
RATE = 4.0
"""Requests of a second, in the mean."""
COLUMNS = [
    "requests",
    "policy",
    "rows",
    "bytes of the cache",
    "tokens/s",
    "over one row",
    "over `full`",
    "first token, s: p50",
    "p99",
    "between tokens, ms: p50",
    "p99",
]


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
        """The most tokens of a row."""
        return self.prompt[1] + self.new[1] + 8


WORKLOADS = {
    "chat": Workload(24, (100, 500), (64, 256)),
    "documents": Workload(12, (500, 4000), (16, 256)),
}
QUICK = {"quick": Workload(4, (50, 100), (4, 8))}


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


def model_and_tokenizer() -> tuple[Any, Any]:
    """A Llama with random weights, and the tokenizer of the embedded model, with a token for each character."""
    _, tokenizer = kvpolicy.tiny()
    model = llama(LAYERS, HIDDEN, HEADS, kv_heads=KV_HEADS, vocabulary=len(tokenizer), positions=8192)
    return model, tokenizer


@contextmanager
def server(policy: str, capacity: Capacity, compile: bool) -> Generator[int]:
    """A server in a thread, and its port."""
    found = bind("127.0.0.1", 0)
    how: Any = {"capacity": capacity, "compile": compile, "tile": 512}
    with found as listener, serving(*model_and_tokenizer(), "bench", policy, listener, **how) as running:
        thread = threading.Thread(target=lambda: running.run(sockets=[listener]))
        thread.start()
        while not running.started:
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


async def ask(client: Any, request: Request) -> Seen:
    """Send a request at its time, and note when its tokens come."""
    await asyncio.sleep(request.at)
    begun = time.perf_counter()
    times: list[float] = []
    stream = await client.completions.create(
        model="bench", prompt=request.prompt, max_tokens=request.new, temperature=0, stream=True
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].finish_reason is None:
            times.append(time.perf_counter())
    if not times:
        raise RuntimeError("An answer must have a token, got none.")
    return Seen(times[0] - begun, [b - a for a, b in itertools.pairwise(times)], request.new)


async def ask_all(port: int, asked: Sequence[Request]) -> tuple[list[Seen], float, int]:
    """What clients see, the seconds of all of them together, and the most bytes of the cache."""
    held = 0
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=3600
    ) as client:

        async def watch() -> None:
            nonlocal held
            while True:
                held = max(held, await asyncio.to_thread(cache_nbytes, port))
                await asyncio.sleep(0.5)

        watcher = asyncio.create_task(watch())
        begun = time.perf_counter()
        seen = await asyncio.gather(*(ask(client, request) for request in asked))
        seconds = time.perf_counter() - begun
        watcher.cancel()
    return list(seen), seconds, held


def cache_nbytes(port: int) -> int:
    """The bytes of a server's cache, by its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("kvpolicy_cache_nbytes "))


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


def measure_server(policy: str, rows: int, asked: Sequence[Request], length: int, compile: bool) -> Measured:
    """Measure one policy with a number of rows."""
    with server(policy, Capacity(rows=rows, length=length), compile) as port:
        # Of several lengths, so that no step is compiled later: with one row, each prompt has a cache of its own size.
        warm = [request._replace(at=0.0, new=4) for request in asked[:3]]
        asyncio.run(ask_all(port, warm))
        seen, seconds, held = asyncio.run(ask_all(port, asked))
    gaps = [gap for each in seen for gap in each.gaps]
    return Measured(held, sum(each.new for each in seen) / seconds, [each.first for each in seen], gaps)


def fitting(policy: str, full_rows: int, work: Workload) -> int:
    """The rows under a policy that fit into the memory of some rows of the full cache; at most one for each client."""
    model, _ = model_and_tokenizer()
    memory = kvpolicy.plan(model, "full", batch=full_rows, prompt=work.length).nbytes
    rows, _ = Capacity(memory=f"{memory}B", length=work.length).sizes(model, kvpolicy.Policy.parse(policy))
    return min(rows, work.clients)


def lines(args: argparse.Namespace, name: str, work: Workload) -> Iterator[list[str]]:
    """The rows of the table; `full` comes first, since the others are compared with it."""
    asked = requests(work)
    full = 0.0
    for policy in ["full", *(policy for policy in args.policies or POLICIES if policy != "full")]:
        one = 0.0
        for rows in dict.fromkeys((1, fitting(policy, args.full_rows, work))):
            found = measure_server(policy, rows, asked, work.length, args.compile)
            one = one or found.rate
            full = found.rate if policy == "full" else full  # with the most rows, which come last
            yield [
                name,
                f"`{policy}`",
                str(rows),
                format_bytes(found.nbytes),
                f"{found.rate:.1f}",
                f"{found.rate / one:.2f}x",
                "" if rows == 1 else f"{found.rate / full:.2f}x",
                f"{quantile(found.first, 0.5):.2f}",
                f"{quantile(found.first, 0.99):.2f}",
                f"{1000 * statistics.median(found.gaps):.0f}",
                f"{1000 * quantile(found.gaps, 0.99):.0f}",
            ]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    works = QUICK if args.quick else {name: WORKLOADS[name] for name in args.requests}
    rows = collect(row for name, work in works.items() for row in lines(args, name, work))
    asked = "; ".join(
        f"{name}: {work.clients} clients, prompts of {work.prompt[0]:,} to {work.prompt[1]:,} tokens, answers of "
        f"{work.new[0]} to {work.new[1]}"
        for name, work in works.items()
    )
    note = (
        f"A Llama of {LAYERS} layers, hidden size {HIDDEN}, {KV_HEADS} KV heads, fp32, random weights, "
        f"{'compiled' if args.compile else 'eager'} steps, {RATE:g} requests a second as a Poisson process, clients in "
        f"the process of the server. {asked}. Rows: one, and as many as fit into the memory of {args.full_rows} rows "
        f"of the full cache, up to one for each client. {torch_note()}."
    )
    yield Section("serve", [Grid(COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={"serve": ["docs/benchmarks.md"]},
    options=[
        Option("--requests", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="what clients ask"),
        Option("--full-rows", type=int, default=4, help="rows of the full cache whose memory all have"),
        Option("--policies", nargs="*", help="policies; by default four"),
        Option("--compile", action="store_true", help="compile steps"),
        Option("--quick", action="store_true", help="few clients with short prompts, to see that it runs"),
        threads(),
    ],
)

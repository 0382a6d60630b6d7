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
PROMPT = (500, 4000)
NEW = (16, 128)
CLIENTS = 32
RATE = 4.0
COLUMNS = [
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


def requests(clients: int, rate: float, prompt: tuple[int, int], new: tuple[int, int], seed: int = 0) -> list[Request]:
    """Requests that arrive as a Poisson process, with lengths that are equally likely.

    Args:
        clients: How many there are.
        rate: Requests of a second, in the mean.
        prompt: The fewest and the most tokens of a prompt.
        new: The same of an answer.
        seed: The random seed.
    """
    draw = random.Random(seed)
    at = 0.0
    made: list[Request] = []
    for _ in range(clients):
        text = "".join(draw.choice("abcdefghij0123456789=\n") for _ in range(draw.randint(*prompt)))
        made.append(Request(at, text, draw.randint(*new)))
        at += draw.expovariate(rate)
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
        warm = [asked[0]._replace(at=0.0, new=4)]
        asyncio.run(ask_all(port, warm))
        seen, seconds, held = asyncio.run(ask_all(port, asked))
    gaps = [gap for each in seen for gap in each.gaps]
    return Measured(held, sum(each.new for each in seen) / seconds, [each.first for each in seen], gaps)


def fitting(policies: Sequence[str], full_rows: int, length: int, most: int) -> dict[str, int]:
    """For each policy, the rows of a length that fit into the memory of some rows of the full cache; `most` at most."""
    model, _ = model_and_tokenizer()
    memory = kvpolicy.plan(model, "full", batch=full_rows, prompt=length).nbytes
    each = {policy: kvpolicy.plan(model, policy, prompt=length).nbytes for policy in policies}
    return {policy: max(min(memory // nbytes, most), 1) for policy, nbytes in each.items()}


def lines(args: argparse.Namespace, asked: Sequence[Request], length: int) -> Iterator[list[str]]:
    """The rows of the table; `full` comes first, since the others are compared with it."""
    policies = ["full", *(policy for policy in args.policies or POLICIES if policy != "full")]
    full = 0.0
    for policy, most in fitting(policies, args.full_rows, length, len(asked)).items():
        one = 0.0
        for rows in dict.fromkeys((1, most)):
            found = measure_server(policy, rows, asked, length, args.compile)
            one = one or found.rate
            full = found.rate if policy == "full" else full  # with the most rows, which come last
            yield [
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
    prompt, new = ((50, 100), (4, 8)) if args.quick else (PROMPT, NEW)
    asked = requests(4 if args.quick else args.clients, args.rate, prompt, new)
    length = prompt[1] + new[1] + 8
    rows = collect(lines(args, asked, length))
    note = (
        f"A Llama of {LAYERS} layers, hidden size {HIDDEN}, {KV_HEADS} KV heads, fp32, random weights, "
        f"{'compiled' if args.compile else 'eager'} steps: {len(asked)} clients, {args.rate:g} requests a second as a "
        f"Poisson process, prompts of {prompt[0]:,} to {prompt[1]:,} tokens, answers of {new[0]} to {new[1]}, in the "
        f"process of the server. Rows: one, and as many as fit into the memory of {args.full_rows} rows of the full "
        f"cache of {length:,} tokens, up to one for each client; {torch_note()}."
    )
    yield Section("serve", [Grid(COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={"serve": ["docs/benchmarks.md"]},
    options=[
        Option("--clients", type=int, default=CLIENTS, help="clients, each with one request"),
        Option("--rate", type=float, default=RATE, help="requests of a second, in the mean"),
        Option("--full-rows", type=int, default=4, help="rows of the full cache whose memory all have"),
        Option("--policies", nargs="*", help="policies; by default four"),
        Option("--compile", action="store_true", help="compile steps"),
        Option("--quick", action="store_true", help="few clients with short prompts, to see that it runs"),
        threads(),
    ],
)

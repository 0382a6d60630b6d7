"""`kvpolicy serve` under clients that ask at random moments: one row, and as many as fit into the same memory.

The server is a thread with a random model, whose answers have the length that is asked for; clients stream them. What
is measured is what a client sees. The memory is that of a few rows of the full cache. `--beside` measures servers
without a policy in the same memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.server import bind, serving
from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.bench.clients import RATE, Address, Measured, Request, Workload, measured, quantile, requests
from kvpolicy_eval.bench.models import llama
from kvpolicy_eval.bench.stock_servers import NAMES, Place, cached_tokens, stock_server
from kvpolicy_eval.common.table import Grid, Option, Section, Table, UsageError, collect, threads, torch_note

POLICIES = ("full", "snapkv@0.2", "h2o@256", "snapkv+tokenwise:bits=4@0.2")
LAYERS = 4
HIDDEN = 1024
HEADS = 16
KV_HEADS = 4
TITLES = {
    "transformers": "`transformers serve`",
    "batching": "`transformers serve --continuous-batching`",
    "vllm": "vLLM",
}
BESIDE = "Other servers, in a process of their own: pages for as many tokens, or one request at a time. "
COLUMNS = [
    "requests",
    "server, policy",
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
WORKLOADS = {
    "chat": Workload(24, (100, 500), (64, 256)),
    "documents": Workload(12, (500, 4000), (16, 256)),
}
QUICK = {
    "chat": Workload(4, (50, 100), (4, 8)),
    "documents": Workload(3, (520, 700), (4, 8)),  # in several steps of a server, as those above
}


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


def cache_nbytes(port: int) -> int:
    """The bytes of a server's cache, by its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("kvpolicy_cache_nbytes "))


def measure_server(policy: str, rows: int, asked: Sequence[Request], length: int, compile: bool) -> Measured:
    """Measure one policy with a number of rows."""
    with server(policy, Capacity(rows=rows, length=length), compile) as port:
        return measured(Address(port, "bench"), asked, lambda: cache_nbytes(port))


def measure_stock(name: str, args: argparse.Namespace, work: Workload) -> Measured:
    """Measure a server without a policy; its bytes are those of the tokens for which it has memory."""
    model, tokenizer = model_and_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        for each in (model, tokenizer):
            each.save_pretrained(folder)
        _make_ordinary(Path(folder) / "tokenizer.json")
        place = Place(
            folder=Path(folder),
            tokens=args.full_rows * work.length,
            longest=work.length,
            clients=work.clients,
            threads=args.threads,
            compile=args.compile,
            vllm=args.vllm,
        )
        nbytes = kvpolicy.plan(model, "full", prompt=cached_tokens(name, place)).nbytes
        with stock_server(name, place) as address:
            return measured(address, requests(work), lambda: nbytes)


def _make_ordinary(file: Path) -> None:
    """Let special tokens of a tokenizer have text: for others, some servers send nothing, and the model says them."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = False
    file.write_text(json.dumps(content), encoding="utf-8")


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
            over = (f"{found.rate / one:.2f}x", "" if rows == 1 else f"{found.rate / full:.2f}x")
            yield [name, f"`{policy}`", str(rows), *cells(found, *over)]
    for stock in args.beside or ():
        found = measure_stock(stock, args, work)
        rows = "1" if stock == "transformers" else "any"
        yield [name, TITLES[stock], rows, *cells(found, "", f"{found.rate / full:.2f}x")]


def cells(found: Measured, over_one: str, over_full: str) -> list[str]:
    """What the table says of a server under its clients, from its bytes on."""
    return [
        format_bytes(found.nbytes),
        f"{found.rate:.1f}",
        over_one,
        over_full,
        f"{quantile(found.first, 0.5):.2f}",
        f"{quantile(found.first, 0.99):.2f}",
        f"{1000 * statistics.median(found.gaps):.0f}",
        f"{1000 * quantile(found.gaps, 0.99):.0f}",
    ]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    if "vllm" in (args.beside or ()) and args.vllm is None:
        raise UsageError("--beside vllm needs --vllm FOLDER; make it with python -m kvpolicy_vllm.env FOLDER")
    works = {name: (QUICK if args.quick else WORKLOADS)[name] for name in args.requests}
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
        f"of the full cache, up to one for each client. {BESIDE if args.beside else ''}{torch_note()}."
    )
    yield Section("serve-beside" if args.beside else "serve", [Grid(COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={"serve": ["docs/benchmarks.md"], "serve-beside": ["docs/benchmarks.md"]},
    options=[
        Option("--requests", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="what clients ask"),
        Option("--full-rows", type=int, default=4, help="rows of the full cache whose memory all have"),
        Option("--policies", nargs="*", help="policies; by default four"),
        Option("--compile", action="store_true", help="compile steps"),
        Option("--beside", nargs="+", choices=NAMES, help="servers without a policy to measure too"),
        Option("--vllm", type=Path, help="an environment with vLLM, as python -m kvpolicy_vllm.env FOLDER makes it"),
        Option("--quick", action="store_true", help="few clients with short requests, to see that it runs"),
        threads(),
    ],
)

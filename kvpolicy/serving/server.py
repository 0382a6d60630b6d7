"""The server as a whole: its socket, its start-up log, and its end."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from kvpolicy.hf.attach import attach
from kvpolicy.hf.attachment import PLAIN, Chunks, Hold
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.serving import handlers
from kvpolicy.serving.access import Hosts
from kvpolicy.serving.app import build_app
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.forwards import Prompts, make_forwards, pause_between_tiles, settle
from kvpolicy.serving.generation import Generation
from kvpolicy.serving.interruptible import Interruptible
from kvpolicy.serving.metrics import Metrics
from kvpolicy.serving.prefix import Prefix, check_room, check_together
from kvpolicy.serving.requests import body_limit, positions_of
from kvpolicy.serving.scheduler import Scheduler
from kvpolicy.serving.several_ranks import Channel, Leading, follow
from kvpolicy.serving.templates import adapt_tokenizer
from kvpolicy.serving.warm_up import warm_up
from kvpolicy.text.errors import KVPolicyError

GRACE = 5.0
"""Seconds that running requests have after a first signal; connections are closed after twice as many."""


class Server(uvicorn.Server):
    """A server that ends the running requests with an error if they take too long after a signal, or at a second one.

    uvicorn would cancel the requests, and log a traceback for each.

    Args:
        config: The configuration.
        generation: The `Generation` that answers requests.

    Attributes:
        metrics: The counters.
    """

    def __init__(self, config: uvicorn.Config, generation: Generation) -> None:
        """A server that does not listen yet."""
        super().__init__(config)
        self._generation = generation
        self._is_urgent = False
        self.metrics = generation.metrics

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running requests end at the first signal, end them at the second one, and leave them at a third one."""
        if self.should_exit and not self._is_urgent:
            self._is_urgent = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new requests, and wait for the running one."""
        self._generation.refuse_new()
        stop = asyncio.create_task(self._stop_later())
        await super().shutdown(sockets)
        stop.cancel()

    async def _stop_later(self) -> None:
        deadline = time.monotonic() + GRACE
        while not self._is_urgent and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await self._generation.stop_running()


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address; connections are refused until the server listens.

    Args:
        host: The name or the number of an interface.
        port: The port; 0 for one that is free.

    Raises:
        KVPolicyError: If the address cannot be used. Whether another server that is being started has it too is known
            only once one of them listens: see `listen`.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, port))
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as error:  # the second of a name that is none
        raise _unusable(host, port, error) from error
    return found


def listen(listener: socket.socket) -> None:
    """Let clients connect to a reserved address.

    Args:
        listener: A bound socket.

    Raises:
        KVPolicyError: If another server, which was started at the same time, listens there already.
    """
    try:
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: OSError | UnicodeError) -> KVPolicyError:
    said = error.strerror if isinstance(error, OSError) else "not a name"
    return KVPolicyError(
        f"--host and --port must be an address that is free, got {host} and {port} ({said}); try --port 0 for a free "
        "port."
    )


ONE_ROW = Capacity()
"""One request at a time."""


@contextmanager
def serving(
    model: Any,
    tokenizer: Any,
    name: str,
    policy: str,
    listener: socket.socket,
    load: Callable[[Any], Prefix] | None = None,
    allowed_hosts: Sequence[str] = (),
    tile: TileSize = None,
    hold: Hold = PLAIN,
    compile: bool | None = None,
    prefix_memory: int = 0,
    capacity: Capacity = ONE_ROW,
    key: str | None = None,
    channel: Channel | None = None,
    *,
    warm: bool = False,
) -> Generator[Server, None, None]:
    """Attach a policy to a model, and make the server.

    Args:
        model: A model without a policy.
        tokenizer: Its tokenizer.
        name: The name of the model in requests.
        policy: The spec of the policy.
        listener: A bound socket.
        load: Loads the cache that every request starts from, given the model with the policy attached; or None.
        allowed_hosts: Names and addresses that a `Host` header may have, besides those of the listener.
        tile: The most tokens of a prompt that a layer takes at a time, `auto`, or None.
        hold: How a prompt is held that waits, as `hold` of `attach`.
        compile: Whether steps are compiled, as `compile` of `attach`.
        prefix_memory: The most bytes of beginnings that prompts have in common; 0 to compute every prompt alone.
        capacity: How many requests are answered at a time.
        key: The key that requests must have; None for none.
        channel: The way to the other ranks that have parts of the model, and call `following`; None without any.
        warm: Whether a prompt and some steps run before the first request, which then does not wait for compilations.

    Yields:
        The server; call `run(sockets=[listener])`. The policy is detached at the end.

    Raises:
        KVPolicyError: If the policy does not fit the model, transformers' server is not as expected, or another server
            listens at the address.
    """
    hosts = Hosts(listener.getsockname()[0], allowed_hosts)
    handlers.check_transformers()
    has_template = adapt_tokenizer(tokenizer)
    chunks: Chunks = "hold" if prefix_memory else "select"
    with attach(model, policy, tile=tile, chunks=chunks, hold=hold, compile=compile) as handle:
        prefix = None if load is None else load(model)
        metrics = Metrics()
        reading = Interruptible(settle(model))
        # Several ranks read a prompt at once: a pause of one would not be one of the others.
        pausing = pause_between_tiles(model, reading) if channel is None else lambda: None
        rows, length = capacity.sizes(model, handle.policy)  # which may follow from the memory
        shared = prefix is not None and prefix.shared
        check_together(
            prefix=prefix is not None, shared=shared, caching=prefix_memory > 0, rows=rows, codes=hold == "codes"
        )
        if prefix is not None:
            check_room(prefix, positions_of(model), length)
        own = make_forwards(Prompts(model, handle, metrics, prefix, prefix_memory), rows, length)
        leading = None if channel is None else Leading(own, channel)
        forwards = leading or own
        scheduler = Scheduler(forwards, reading, capacity.share)
        generation = Generation(scheduler, metrics, prefix, capacity.queue, length)
        routes = handlers.make_handlers(handlers.OneModel(model, tokenizer, name), generation)
        app = build_app(name, policy, routes, generation, metrics, hosts, body_limit(positions_of(model)), key)
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=math.ceil(2 * GRACE))
        # transformers logs each request as a warning.
        logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)
        try:
            listen(listener)  # clients that come early wait
            if warm:
                _say("Warming up, for minutes where something is compiled.")
                warm_up(model, scheduler, prefix, length)
            limits = (rows, length, key is not None)
            for line in _notes(name, policy, listener, limits, has_template, prefix):
                _say(line)
            yield Server(config, generation)
        finally:
            pausing()
            if leading is not None:
                leading.close()


def following(
    model: Any,
    policy: str,
    channel: Channel,
    load: Callable[[Any], Prefix] | None = None,
    tile: TileSize = None,
    hold: Hold = PLAIN,
    capacity: Capacity = ONE_ROW,
) -> None:
    """Run the forwards of the first rank's server on another rank, until it ends.

    Args:
        model: This rank's part of the model, without a policy.
        policy: The spec of the policy.
        channel: The way from the first rank.
        load: As in `serving`; all ranks load at the same time.
        tile: As in `serving`.
        hold: As in `serving`.
        capacity: As in `serving`.
    """
    with attach(model, policy, tile=tile, hold=hold, compile=False) as handle:
        prefix = None if load is None else load(model)
        rows, length = capacity.sizes(model, handle.policy)
        follow(make_forwards(Prompts(model, handle, Metrics(), prefix), rows, length), channel)


@contextmanager
def log_to_terminal() -> Generator[None, None, None]:
    """Write the log of the server to stderr meanwhile: a line for each answer, and the traceback of each failure."""
    log = logging.getLogger("kvpolicy.serving")
    before = log.level
    log.setLevel(logging.INFO)  # a line for each request
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C. After SIGTERM the process goes on, so that it can end with exit code 0."""
    if threading.current_thread() is not threading.main_thread():
        server.run(sockets=[listener])
        return
    # uvicorn handles the signal, and raises it again for the handler that it found.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    log = logging.getLogger("uvicorn.error")
    log.addFilter(_is_no_cancellation)
    try:
        server.run(sockets=[listener])
    finally:
        log.removeFilter(_is_no_cancellation)
        signal.signal(signal.SIGTERM, before)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a record is not the traceback of what ended with the server, such as a client that never reads."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and not record.getMessage().rstrip().endswith("CancelledError")


def _say(line: str) -> None:
    """Write a line to the start-up log."""
    print(line, file=sys.stderr, flush=True)


def _notes(
    name: str,
    policy: str,
    listener: socket.socket,
    limits: tuple[int, int | None, bool],
    has_template: bool,
    prefix: Prefix | None,
) -> Generator[str, None, None]:
    """The start-up log."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    yield f"{name} under {policy}: http://{address}:{port}/v1"
    rows, length, has_key = limits
    if rows == 1:
        yield "One request is answered at a time; others wait for their turn."
    else:
        yield f"{rows} requests are answered at a time, of up to {length:,} tokens each; others wait for a row."
    if not has_template:
        yield (
            "The tokenizer has no chat template: the contents of messages are joined by newlines, with nothing after "
            "the last."
        )
    if prefix is not None:
        yield f"Every prompt must begin with the {len(prefix.ids):,} tokens of the prefix."
    if not host.startswith("127.") and host != "::1":
        yield f"The server can be reached from other machines, and asks for {'a' if has_key else 'no'} key."

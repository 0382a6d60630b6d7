"""A server on several ranks: the first one answers requests, and tells the others which forwards to run with it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvpolicy.parallel.launch import meet
from kvpolicy.serving.prompt import Prompt
from kvpolicy.serving.scheduler import Forwards
from kvpolicy.text.errors import KVPolicyError

IDLE = timedelta(days=3650)
"""How long ranks wait for the next request."""

ALIKE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to fail too."""

log = logging.getLogger("kvpolicy.serving")


def join_ranks(size: int) -> int:
    """Meet the other ranks that a launcher has started; returns the number of this one.

    Args:
        size: How many there are.

    Raises:
        KVPolicyError: If no launcher started so many.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != size:
        raise KVPolicyError(
            f"--tp must be the number of processes that a launcher started, got {size} and {started}; try torchrun "
            f"--standalone --nproc_per_node {size} -m kvpolicy serve ... --tp {size}."
        )
    return meet().rank


def leave_ranks() -> None:
    """Part from the other ranks, when all of them have ended."""
    dist.barrier()
    dist.destroy_process_group()


class Channel:
    """Messages from the first rank to all others, in JSON; every rank makes one."""

    def __init__(self) -> None:
        """A group of its own, so that waiting for a request is no collective of the model."""
        self._group: Any = dist.new_group(backend="gloo", timeout=IDLE)

    def send(self, *message: Any) -> None:
        """Send a message, on the first rank."""
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(text)], device="cpu"), 0, self._group)
        dist.broadcast(text, 0, self._group)

    def receive(self, limit: timedelta = IDLE) -> list[Any]:
        """The next message, on all other ranks.

        Args:
            limit: How long to wait for it.

        Raises:
            RuntimeError: If it does not come.
        """
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        waits: Any = dist.broadcast(size, 0, self._group, async_op=True)
        waits.wait(limit)
        text = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(text, 0, self._group)
        return json.loads(text.numpy().tobytes())

    def meet(self) -> None:
        """Wait for all ranks, for a while.

        Raises:
            RuntimeError: If one does not come.
        """
        dist.monitored_barrier(self._group, ALIKE)


class Leading:
    """The forwards of the first rank, which the others run with it.

    A cache has a number on all ranks. Those of caches that are gone are sent with the next message.

    Args:
        forwards: The forwards of this rank.
        channel: The way to the other ranks.
    """

    def __init__(self, forwards: Forwards, channel: Channel) -> None:
        """The others follow."""
        self.count = forwards.count
        self.usage = forwards.usage
        self.must_read_again = forwards.must_read_again
        self._forwards = forwards
        self._channel = channel
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._gone: list[int] = []

    def read(self, answer: Any) -> tuple[Any, Tensor]:
        """Run the text of an answer; see `Forwards`."""
        config = json.loads(answer.prompt.config.to_json_string(use_diff=False))
        number = self._number()
        self._tell("read", number, [*answer.text], len(answer.tokens), config)
        try:
            cache, logits = self._forwards.read(answer)
        except KVPolicyError:  # of the prompt, which all ranks know
            raise
        except Exception:
            self._tell("failed", number)
            self._channel.meet()
            raise
        return self._name(cache, number), logits

    def copy(self, cache: Any) -> Any:
        """A copy of a cache."""
        number = self._number()
        self._tell("copy", number, self._numbers[cache])
        return self._name(self._forwards.copy(cache), number)

    def put(self, row: int, cache: Any) -> None:
        """Let a row go on from a cache."""
        self._tell("put", row, self._numbers[cache])
        self._forwards.put(row, cache)

    def drop(self, row: int) -> None:
        """Free a row."""
        self._tell("drop", row)
        self._forwards.drop(row)

    def step(self, tokens: list[int]) -> Tensor:
        """Run a token of each row."""
        self._tell("step", tokens)
        return self._forwards.step(tokens)

    def restart(self) -> None:
        """Begin with empty rows."""
        self._tell("restart")
        self._forwards.restart()

    def close(self) -> None:
        """Let the others end."""
        self._tell("end")

    def _tell(self, name: str, *args: Any) -> None:
        gone, self._gone = self._gone, []
        self._channel.send(gone, name, *args)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _name(self, cache: Any, number: int) -> Any:
        self._numbers[cache] = number
        weakref.finalize(cache, lambda: self._gone.append(number))
        return cache


class _Answer:
    """An answer as another rank knows it.

    Attributes:
        text: Token ids of the prompt and the answer so far.
        tokens: As many as were generated.
        prompt: The prompt.
        cached: Tokens that were not computed.
    """

    def __init__(self, text: list[int], new: int, config: Any) -> None:
        self.text = text
        self.tokens = [0] * new
        self.prompt = Prompt(text, config)
        self.cached = 0


def follow(forwards: Forwards, channel: Channel) -> None:
    """Run the forwards that the first rank runs, until it ends.

    What is wrong with a prompt is wrong on all ranks, and the first one says so. An error of this rank alone, such as
    memory that ran out, ends the rank, and with it the job: the others wait for its part of a forward.

    Args:
        forwards: The forwards of this rank.
        channel: The way from the first one.
    """
    from transformers import GenerationConfig

    caches: dict[int, Any] = {}

    def read(number: int, text: list[int], new: int, config: dict[str, Any]) -> None:
        try:
            caches[number] = forwards.read(_Answer(text, new, GenerationConfig.from_dict(config)))[0]
        except KVPolicyError as error:
            log.debug("A prompt was not read.", exc_info=error)
        except Exception as error:
            try:
                _, name, *which = channel.receive(ALIKE)
            except RuntimeError:
                raise error from None
            if (name, which) != ("failed", [number]):
                raise
            failed(number)

    def failed(number: int) -> None:
        caches.pop(number, None)
        channel.meet()

    def copy(number: int, source: int) -> None:
        caches[number] = forwards.copy(caches[source])

    does: dict[str, Callable[..., Any]] = {
        "read": read,
        "failed": failed,
        "copy": copy,
        "put": lambda row, number: forwards.put(row, caches[number]),
        "drop": forwards.drop,
        "step": forwards.step,
        "restart": forwards.restart,
    }
    with _ignoring_signals():
        while True:
            gone, name, *args = channel.receive()
            for number in gone:
                caches.pop(number, None)
            if name == "end":
                return
            does[name](*args)


@contextmanager
def _ignoring_signals() -> Generator[None]:
    """Leave SIGTERM and Ctrl-C, which a launcher sends to all ranks, to the first one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

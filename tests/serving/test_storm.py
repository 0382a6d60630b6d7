"""A thousand requests of every kind, in an order of a fixed seed: right answers, nothing left behind, all counted."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import pytest
import torch

import kvpolicy
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.serving.capacity import Capacity
from kvpolicy.serving.forwards import ManyRows
from kvpolicy.serving.generation import Job
from kvpolicy.serving.metrics import OUTCOMES
from tests.serving.servers import client_of, metric, post, running, wait_for
from tests.serving.test_rows import PAIRS, prompt_of

REQUESTS = 1000
CLIENTS = 8
ROWS = 3
LENGTH = 288
KNOWN = 24
"""Requests whose answers are known."""
UNLUCKY = "unlucky=1\n" * 3
"""A prompt at which the model fails."""
RUINED = 97
"""Of so many steps, one has logits of one row that are no numbers."""


def fields_of(number: int) -> tuple[str, dict[str, Any]]:
    """A request whose answer is known, and its endpoint."""
    draw = random.Random(number)
    fields: dict[str, Any] = {"max_tokens": draw.randrange(1, 16), "temperature": 0}
    if number % 3 == 0:
        fields |= {"temperature": 2.0, "seed": number}
    if number % 5 == 0:
        fields["n"] = 2
    if number % 4 == 1:
        fields["stop"] = ["7", "\n"]
    prompt = prompt_of(number)
    if number % 6 == 2:  # long
        prompt = "".join(f"{word}={value}\n" for word, value in PAIRS * 2) + prompt
    if number % 7 == 3:
        return "chat", {**fields, "messages": [{"role": "user", "content": prompt}]}
    return "completions", {**fields, "prompt": [prompt, prompt_of(number + 1)] if number % 8 == 4 else prompt}


def count_of(number: int) -> int:
    """The answers of a request."""
    fields = fields_of(number)[1]
    return fields.get("n", 1) * (len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1)


class Clients:
    """What clients do with a server, and what they got.

    Attributes:
        expected: How many answers the server must have counted, as one of its outcomes or `any`; `perhaps` if it may
            not have heard of them.
        kinds: How many requests there were of each kind.
        known: The texts of requests, as they are alone.
        wrong: Answers that are not what they should be.
        ruined: Requests that ended with an error of the model.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.expected = Counter[str]()
        self.kinds = Counter[str]()
        self.wrong: list[str] = []
        self.ruined = 0
        self.api = self.new_api()
        self.known: dict[int, list[str]] = {}
        self._lock = threading.Lock()

    def new_api(self) -> openai.OpenAI:
        return client_of(self.port, timeout=120)

    def note(self, **outcomes: int) -> None:
        with self._lock:
            self.expected.update(outcomes)

    def create(self, number: int, **more: Any) -> Any:
        path, fields = fields_of(number)
        api: Any = self.api.chat.completions if path == "chat" else self.api.completions
        return api.create(model="tiny", **fields, **more)

    def texts(self, number: int, *, stream: bool) -> list[str]:
        if not stream:
            made = self.create(number)
            return [each.message.content if hasattr(each, "message") else each.text for each in made.choices]
        found = [""] * count_of(number)
        for chunk in self.create(number, stream=True):
            for choice in chunk.choices:
                piece = choice.delta.content if hasattr(choice, "delta") else choice.text
                found[choice.index] += piece or ""
        return found

    def ask(self, draw: random.Random, *, stream: bool) -> None:
        number = draw.randrange(KNOWN)
        self.note(any=count_of(number))
        try:
            found = self.texts(number, stream=stream)
        except openai.APIError as error:
            assert "ArithmeticError" in str(error), error
            with self._lock:
                self.ruined += 1
            return
        if found != self.known[number]:
            self.wrong.append(f"{number}: {found} instead of {self.known[number]}")

    def single(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        """A request for one answer, which is counted once however early its client leaves."""
        return fields_of(draw.choice([number for number in range(KNOWN) if count_of(number) == 1]))

    def leave(self, draw: random.Random, **how: Any) -> None:
        """In the middle of a stream, or before the answer comes."""
        path, fields = self.single(draw)
        api: Any = self.api.chat.completions if path == "chat" else self.api.completions
        self.note(any=1)
        try:
            made = api.create(model="tiny", **{**fields, "max_tokens": 100}, **how)
            if "stream" in how:
                next(iter(made), None)
                made.close()
        except openai.APITimeoutError:
            assert "timeout" in how
        except openai.APIError as error:
            assert "ArithmeticError" in str(error), error

    def hang_up(self, draw: random.Random) -> None:
        """Behind the whole body, some of it, its head, or without any request."""
        path, fields = self.single(draw)
        body = json.dumps({"model": "tiny", "stream": draw.random() < 0.5, **fields}).encode()
        sent = draw.choice([len(body), len(body) // 2, 0, None])
        is_reset = draw.random() < 0.5
        head = f"POST /v1/{'chat/' if path == 'chat' else ''}completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if sent is None:
                return
            # What was sent before a reset may be lost.
            self.note(**{"perhaps" if is_reset else "any": 1})
            connection.sendall(head.encode() + body[:sent])
            if draw.random() < 0.5:
                time.sleep(0.1)

    def refused(self, draw: random.Random) -> None:
        status, body, kind = draw.choice(
            [
                (400, b'{"prompt": "a"', "application/json"),
                (400, b"[1, 2]", "application/json"),
                (400, b'{"prompt": "a", "nonsense": 1}', "application/json"),
                (400, b'{"prompt": "a", "max_tokens": -1}', "application/json"),
                (400, b'{"prompt": "\\ud800"}', "application/json"),
                (400, b'{"prompt": "a", "max_tokens": 288}', "application/json"),
                (400, json.dumps({"prompt": "tiger=1\n" * 100}).encode(), "application/json"),
                (400, json.dumps({"prompt": ["a", "tiger=1\n" * 100], "n": 2}).encode(), "application/json"),
                (404, b'{"prompt": "a", "model": "another"}', "application/json"),
                (413, b'{"prompt": "' + b"x" * 2**18 + b'"}', "application/json"),
                (415, b'{"prompt": "a"}', "text/plain"),
            ]
        )
        self.note(refused=1)
        got, _ = post(self.port, body, ("Content-Type", kind))
        if got != status:
            self.wrong.append(f"{body[:60]!r}: status {got} instead of {status}")

    def unlucky(self, draw: random.Random) -> None:
        self.note(failed=1)
        got, _ = post(self.port, json.dumps({"prompt": UNLUCKY, "stream": draw.random() < 0.5}).encode())
        if got != 500:
            self.wrong.append(f"status {got} for a prompt at which the model fails")

    def one(self, number: int) -> None:
        """One request of the lot."""
        draw = random.Random(f"storm {number}")
        does: dict[str, tuple[int, Callable[[], None]]] = {
            "whole": (4, lambda: self.ask(draw, stream=False)),
            "stream": (4, lambda: self.ask(draw, stream=True)),
            "leave": (2, lambda: self.leave(draw, stream=True)),
            "give up": (2, lambda: self.leave(draw, timeout=draw.choice([0.1, 0.3]))),
            "hang up": (3, lambda: self.hang_up(draw)),
            "refused": (2, lambda: self.refused(draw)),
            "unlucky": (1, lambda: self.unlucky(draw)),
        }
        (kind,) = draw.choices([*does], [weight for weight, _ in does.values()])
        try:
            does[kind][1]()
        except Exception as error:
            self.wrong.append(f"{kind}, request {number}: {error!r}")
        with self._lock:
            self.kinds[kind] += 1


class Lines(logging.Handler):
    """What the log says of answers: their outcomes, how many tokens they had, and how many had a first one."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes = Counter[str]()
        self.generated = 0
        self.begun = 0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"\S+ (\w+): [\d,]+ tokens of prompt, ([\d,]+) generated", record.getMessage())
        if found is not None:
            self.outcomes[found[1]] += 1
            self.generated += int(found[2].replace(",", ""))
            self.begun += found[2] != "0"


def left() -> dict[str, int]:
    """What is alive in this process: caches, answers, tasks of the event loop, threads, and open files."""
    gc.collect()
    kinds = {"caches": PolicyCache, "answers": Job, "tasks": asyncio.Task}
    held = [type(each) for each in gc.get_objects()]
    found = {name: sum(issubclass(each, kind) for each in held) for name, kind in kinds.items()}
    found["threads"] = threading.active_count()
    found["files"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return found


def counted(port: int) -> dict[str, float]:
    return {name: metric(port, f'requests_total{{outcome="{name}"}}') for name in OUTCOMES}


def idle(port: int) -> bool:
    return metric(port, "requests_running") == metric(port, "requests_waiting") == 0


def checked(port: int, requests: int, ruined: list[int], others: int) -> None:
    """Everything that clients do; `others` are caches that were alive before."""
    lines = Lines()
    log = logging.getLogger("kvpolicy.serving")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(lines)
    log.propagate = False  # pytest keeps records of errors, which have caches in their frames
    clients = Clients(port)
    try:
        clients.known = {number: clients.texts(number, stream=False) for number in range(KNOWN)}
        assert {number: clients.texts(number, stream=True) for number in range(KNOWN)} == clients.known
        clients.api.close()
        wait_for(lambda: idle(port) and not lines_lack(lines, port))
        nbytes = metric(port, "cache_nbytes")
        before = counted(port)
        wait_for(lambda: left()["answers"] == 0)
        held = left()
        assert held["caches"] == others + 1  # that of the rows

        clients.api = clients.new_api()
        ruined.append(0)  # from now on, some steps are
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(clients.one, range(requests)))
        clients.api.close()
        wait_for(lambda: idle(port) and not lines_lack(lines, port))
        number = ruined.pop()
        assert not clients.wrong, "\n".join(clients.wrong)
        assert min(clients.kinds.values()) > 0 and sum(clients.kinds.values()) == requests

        # What was counted adds up: with what clients did, and with the log.
        found = counted(port)
        new = {name: int(found[name] - before[name]) for name in OUTCOMES}
        expected = clients.expected
        assert new["refused"] == expected["refused"]
        assert new["failed"] == expected["failed"] + number and clients.ruined <= number
        total = expected.total() - expected["perhaps"]
        assert total <= sum(new.values()) <= total + expected["perhaps"]
        assert metric(port, "generated_tokens_total") == lines.generated
        assert metric(port, "first_token_seconds_count") == lines.begun

        # Nothing is left behind.
        assert metric(port, "cache_nbytes") == nbytes
        with suppress(AssertionError):
            wait_for(lambda: left() == held)
        assert left() == held
        clients.api = clients.new_api()
        assert {number: clients.texts(number, stream=False) for number in range(KNOWN)} == clients.known
    finally:
        clients.api.close()
        log.removeHandler(lines)
        log.setLevel(level)
        log.propagate = True


def lines_lack(lines: Lines, port: int) -> bool:
    """Whether the log has fewer answers than the counters; those that were refused before are not in the log."""
    return lines.outcomes["answered"] < metric(port, 'requests_total{outcome="answered"}')


@pytest.mark.slow
def test_a_thousand_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes on one core."""
    model, tokenizer = kvpolicy.tiny()
    unlucky = tokenizer(UNLUCKY).input_ids
    draw = random.Random(0)
    ruined: list[int] = []
    others = left()["caches"]
    steps = 0
    step = ManyRows.step

    def fail(module: Any, args: Any) -> None:
        if args[0].shape[1] == len(unlucky) and args[0][0].tolist() == unlucky:
            raise ValueError("a defect of the model")

    def ruin(self: ManyRows, tokens: list[int]) -> torch.Tensor:
        nonlocal steps
        logits = step(self, tokens)
        steps += 1
        live = [row for row in range(self.count) if not self._rows.is_free(row)]
        if ruined and live and steps % RUINED == 0:
            logits = logits.clone()
            logits[draw.choice(live)] = torch.nan
            ruined[0] += 1
        return logits

    monkeypatch.setattr(ManyRows, "step", ruin)
    hook = model.get_input_embeddings().register_forward_pre_hook(fail)
    with running((model, tokenizer), policy="snapkv@0.5", capacity=Capacity(rows=ROWS, length=LENGTH)) as port:
        checked(port, REQUESTS, ruined, others)
    hook.remove()

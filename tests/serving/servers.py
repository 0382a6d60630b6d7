"""Servers in a thread, and what tests ask them."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import openai

from kvpolicy.serving.prefix import Prefix
from kvpolicy.serving.server import bind, run, serving

POLICY = "streaming@0.5"
PROMPT = "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n?tiger=4821\n?wolf="


def client_of(port: int, key: str = "none", **options: Any) -> Any:
    """The official client of a server, which asks once."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, **options)


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return response.read().decode()


def ask(port: int, method: str, path: str, body: bytes | None = None, *headers: tuple[str, str]) -> tuple[int, Any]:
    """The status and the content of a response; with a body, JSON is sent unless a header says another type."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    names = {name for name, _ in headers}
    try:
        connection.putrequest(method, path, skip_host="Host" in names)
        for name, value in headers:
            connection.putheader(name, value)
        if body is not None:
            if "Content-Type" not in names:
                connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        text = response.read().decode()
        is_json = response.getheader("Content-Type", "").startswith("application/json")
        return response.status, json.loads(text) if is_json and text else text
    finally:
        connection.close()


def post(port: int, body: bytes, *headers: tuple[str, str]) -> tuple[int, Any]:
    """The answer to the body of a completion."""
    return ask(port, "POST", "/v1/completions", body, *headers)


def is_healthy(port: int) -> bool:
    try:
        return "ok" in get(port, "/health")
    except OSError:
        return False


def metric(port: int, name: str) -> float:
    (found,) = re.findall(rf"^kvpolicy_{re.escape(name)} (\S+)$", get(port, "/metrics"), re.MULTILINE)
    return float(found)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def running(
    model: tuple[Any, Any],
    load: Callable[[Any], Prefix] | None = None,
    allowed_hosts: Sequence[str] = (),
    policy: str = POLICY,
    name: str = "tiny",
    **options: Any,
) -> Generator[int, None, None]:
    """A server in a thread, and its port."""
    with (
        bind("127.0.0.1", 0) as listener,
        serving(*model, name, policy, listener, load, allowed_hosts, **options) as server,
    ):
        thread = threading.Thread(target=run, args=(server, listener))
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
        assert not thread.is_alive()

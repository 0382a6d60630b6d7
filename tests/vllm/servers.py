"""vLLM's OpenAI server with documents, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
START = 600
"""Seconds for a server to start, which may share two cores with other tests."""


class Answer(NamedTuple):
    """What a server sent.

    Attributes:
        status: The HTTP status.
        content: The JSON of the body.
    """

    status: int
    content: Any

    @property
    def text(self) -> str:
        """The text of a chat or a completion."""
        (choice,) = self.content["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"]


class VLLMServer(NamedTuple):
    """A server that runs.

    Attributes:
        port: Its port.
        log: Its output.
    """

    port: int
    log: Path

    def url(self, path: str) -> str:
        """The address of a path."""
        return f"http://127.0.0.1:{self.port}{path}"

    def post(self, path: str, body: Any) -> Answer:
        """Send a body and wait for the answer."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url(path), json.dumps({"model": "m", **body}).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return Answer(response.status, json.load(response))
        except urllib.error.HTTPError as error:
            return Answer(error.code, json.load(error))

    def stream(self, path: str, body: Any) -> list[Any]:
        """The events of a stream."""
        asked = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **body}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url(path), json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            lines = [line.decode().removeprefix("data: ").strip() for line in response]
        return [json.loads(line) for line in lines if line and line != "[DONE]"]

    def cancel(self, path: str, body: Any) -> None:
        """Ask for a stream, and leave after its first event."""
        raw = json.dumps({"model": "m", "stream": True, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            connection.recv(256)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(self.url("/metrics"), timeout=30) as response:
            found = re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", response.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    def wait_for_idle(self) -> None:
        """Wait until no request is in the engine, and check that its blocks are free again."""
        deadline = time.monotonic() + 60
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert self.metric("kv_cache_usage_perc") == 0


@contextmanager
def serving(
    model: Path,
    documents: Path,
    log: Path,
    options: Sequence[str] = (),
    middlewares: Sequence[str] = ("kvpolicy_vllm.Documents",),
    **variables: str,
) -> Generator[VLLMServer, None, None]:
    """Start a server with variables of its environment, wait until it answers, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    transfer = {
        "kv_connector": "KVPolicyConnector",
        "kv_connector_module_path": "kvpolicy_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(documents)},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--chat-template", TEMPLATE]
    command += ["--kv-transfer-config", json.dumps(transfer), *options]
    command += [word for each in middlewares for word in ("--middleware", each)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    settings |= variables
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT, cwd=documents
        )
    try:
        server = VLLMServer(port, log)
        _wait(process, server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # a server that is ended while it starts may wait for its engine
            process.kill()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], server: VLLMServer) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(server.url("/health"), timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(server.log.read_text()[-3000:])

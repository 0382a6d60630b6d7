"""Servers without a policy, each in a process of its own: `transformers serve` and vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy_eval.bench.clients import Address

NAMES = ("transformers", "batching", "vllm")
PAGE = 256
"""Tokens of a page of `transformers serve --continuous-batching`, its default."""
BLOCK = 32
"""Tokens of a block of vLLM: the fewest that its attention on a CPU takes."""
BATCHED = 512
"""Tokens that a step computes at most, as with our server."""
PATIENCE = 600.0
"""Seconds in which a server must answer."""


class Place(NamedTuple):
    """What a server without a policy gets.

    Attributes:
        folder: The model and its tokenizer.
        tokens: Tokens that its cache can hold, if it has a limit.
        longest: The most tokens of a request and its answer.
        clients: The most requests at a time.
        threads: Threads of a step; 0 leaves the number to the server.
        compile: Whether steps are compiled.
        vllm: The folder of an environment with vLLM.
    """

    folder: Path
    tokens: int
    longest: int
    clients: int
    threads: int
    compile: bool
    vllm: Path | None


def cached_tokens(name: str, place: Place) -> int:
    """Tokens for which a server has memory: whole pages for all of `tokens`, or one request of the largest size.

    Examples:
        >>> place = Place(Path("m"), 1000, 250, 4, 1, False, None)
        >>> [cached_tokens(name, place) for name in NAMES]
        [250, 1024, 1024]
    """
    if name == "transformers":
        return place.longest
    page = PAGE if name == "batching" else BLOCK
    return -(-place.tokens // page) * page


def command(name: str, place: Place, port: int) -> list[str]:
    """The command of a server.

    Examples:
        >>> place = Place(Path("m"), 1000, 250, 4, 1, False, Path("env"))
        >>> command("batching", place, 8000)[-6:]
        ['8000', '--continuous-batching', '--cb-num-blocks', '4', '--cb-max-batch-tokens', '512']
        >>> command("vllm", place, 8000)[:5]
        ['env/bin/python', '-m', 'vllm.entrypoints.openai.api_server', '--model', 'm']
    """
    folder = str(place.folder)
    if name == "vllm":
        assert place.vllm is not None
        # Not the command `vllm`, which fails under another name of the package, as that of the CPU build.
        words = [str(place.vllm / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        words += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(cached_tokens(name, place) // BLOCK)]
        words += ["--max-model-len", str(place.longest), "--max-num-seqs", str(place.clients)]
        words += ["--max-num-batched-tokens", str(BATCHED), "--no-enable-prefix-caching"]
        return words if place.compile else [*words, "--enforce-eager"]
    transformers = str(Path(sys.executable).with_name("transformers"))
    words = [transformers, "serve", folder, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    if name == "batching":
        blocks = cached_tokens(name, place) // PAGE
        words += ["--continuous-batching", "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", str(BATCHED)]
    elif place.compile:
        words.append("--compile")
    return words


@contextmanager
def stock_server(name: str, place: Place) -> Generator[Address]:
    """A server that answers, until the end of the block.

    Raises:
        RuntimeError: If it ends, or is silent for ten minutes; with what it has said.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command(name, place, port), stdout=log, stderr=subprocess.STDOUT, env=_environment(name, place)
        )
        try:
            _wait(process, port, log)
            yield Address(port, str(place.folder))
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _environment(name: str, place: Place) -> dict[str, str]:
    """The environment of a server's process."""
    added = {"HF_HUB_OFFLINE": "1"}
    if place.threads:
        added["OMP_NUM_THREADS"] = str(place.threads)
    if name == "vllm":
        added |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return os.environ | added


def _wait(process: subprocess.Popen[bytes], port: int, log: Any) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"{process.args} does not answer:\n{log.read().decode(errors='replace')[-4000:]}")

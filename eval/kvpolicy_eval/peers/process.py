"""A library of the comparison in a separate process, which answers requests in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PACKAGE = Path(__file__).parent.parent
START = (
    "import runpy, sys, types; package = types.ModuleType('kvpolicy_eval'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['kvpolicy_eval'] = package; runpy.run_module(sys.argv[2], run_name='__main__')"
)
"""Code that a peer's interpreter runs: it can import the files of this package, and no other package of ours."""
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment variables that suppress the output of libraries."""


class Failed(RuntimeError):
    """The error of a request."""


class Process:
    """A running process, as a context manager that ends it.

    Args:
        module: Module that serves the requests, such as `kvpolicy_eval.peers.ours`.
        python: Interpreter; the running one by default.
        log: File for its stderr; discarded by default.
    """

    def __init__(self, module: str, python: Path | None = None, log: IO[str] | int = subprocess.DEVNULL) -> None:
        """Start the process."""
        if python is None:
            command = [sys.executable, "-m", module]
            paths = os.pathsep.join(filter(None, sys.path))
        else:
            command = [str(python), "-c", START, str(PACKAGE), module]
            paths = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            env=os.environ | QUIET | {"PYTHONPATH": paths},
        )
        self._name = module.rpartition(".")[2]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            do: Name of the method, see `kvpolicy_eval.peers.side.Side`.
            **arguments: Arguments of the method.

        Raises:
            Failed: If the method raised an error, with its message.
            RuntimeError: If the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"The process {self._name!r} ended during {do!r}; run with --log to see its output.")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["answer"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Process:
        """The process, which is already running."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        self.close()

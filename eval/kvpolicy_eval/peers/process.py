"""A side in a process of its own, asked in JSON."""

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
"""What a peer's interpreter runs: it sees our files, and none of our other packages."""
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1", "TQDM_DISABLE": "1",
}  # fmt: skip


class Failed(RuntimeError):
    """What a side said went wrong."""


class Process:
    """A side at work; a context manager that ends its process.

    Args:
        module: Which side, such as `kvpolicy_eval.peers.ours`.
        python: Its interpreter, by default the one at hand.
        log: Where its stderr goes; nowhere by default.
    """

    def __init__(self, module: str, python: Path | None = None, log: IO[str] | int = subprocess.DEVNULL) -> None:
        """Start the process."""
        own = [sys.executable, "-m", module]
        command = own if python is None else [str(python), "-c", START, str(PACKAGE), module]
        paths = os.pathsep.join(filter(None, sys.path)) if python is None else ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8",
            env=os.environ | QUIET | {"PYTHONPATH": paths},
        )  # fmt: skip
        self._name = module.rpartition(".")[2]

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """Ask one question.

        Raises:
            Failed: Where the side could not answer, with what it said.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **question}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"The side {self._name!r} ended when asked to {do!r}: run it with --log to see why.")
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
        """The process runs already."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the process."""
        self.close()

"""Run tests in a folder, in a process that is forked behind the imports of the libraries.

    python tests/mutation_worker.py < requests > answers

`tests/mutations.py` starts one for each job. A defect is tried in seconds where importing PyTorch and transformers
takes most of the time of a test. A request is a line of JSON with `folder`, `tests`, `arguments` of pytest, the `limit`
in seconds and `only`, the ids of the tests that may run, or null for all; its answer has `code`, the exit code of
pytest or None after the limit, `failed`, the ids of tests that failed, and the end of the `output`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

LIBRARIES = (
    "pytest",
    "torch._dynamo",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
"""What most tests import. No package of the repository: its modules are the ones of the folder."""
PACKAGES = ("kvpolicy", "kvpolicy_deepspeed", "kvpolicy_eval", "kvpolicy_lm_eval", "kvpolicy_vllm")
"""The packages of the repository."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Fork, run pytest in the child, and wait for it."""
    with tempfile.TemporaryDirectory() as work:
        output = Path(work, "output")
        failed = Path(work, "failed")
        child = os.fork()
        if child == 0:
            _run(request, output, failed)
        code = _wait(child, request["limit"])
        return {
            "code": code,
            "failed": failed.read_text(encoding="utf-8").splitlines() if failed.exists() else [],
            "output": output.read_text(encoding="utf-8", errors="replace")[-2000:] if output.exists() else "",
        }


def _run(request: dict[str, Any], output: Path, failed: Path) -> None:
    """Be pytest, in a group of processes of its own; never returns."""
    code = 3  # an internal error, by pytest's codes
    try:
        os.setsid()
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["folder"])
        folders = [str(Path(request["folder"], name)) for name in (".", "integrations", "eval")]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # of processes that tests start
        sys.path[:0] = folders
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]  # of another copy: an installed package has a start-up file that imports it
        import pytest

        plugins: list[object] = [Failures(failed)]
        if request["only"] is not None:
            plugins.append(Chosen(frozenset(request["only"])))
        code = int(pytest.main([*request["arguments"], *request["tests"]], plugins=plugins))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Failures:
    """A plugin of pytest that writes the ids of failed tests to a file as they come."""

    def __init__(self, path: Path) -> None:
        """Write to `path`."""
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write one line for a failure of a test, of what it sets up, or of what it takes down."""
        if report.failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


class Chosen:
    """A plugin of pytest that leaves out all tests but some."""

    def __init__(self, ids: frozenset[str]) -> None:
        """Run the tests of these ids."""
        self._ids = ids

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Deselect the others."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._ids])
        items[:] = [item for item in items if item.nodeid in self._ids]


def _wait(child: int, limit: float) -> int | None:
    """The exit code of a child; None if it had to be stopped, with all processes that it started."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _stop(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _stop(child)
    os.waitpid(child, 0)
    return None


def _stop(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    """Answer requests until there are no more."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

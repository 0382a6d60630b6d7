"""Put small defects into the code, one at a time, and see which of them the tests find.

    python tests/mutations.py                       # all of tests/mutants, two at a time
    python tests/mutations.py --only engine codecs  # those whose file or name contains one of the words
    python tests/mutations.py --log mutations.jsonl # skip what the log already has, and add to it
    python tests/mutations.py --matrix kills.jsonl  # for each defect, all tests that find it
    python tests/mutations.py --reach .coverage     # run only tests that run what a defect changes, see tests/reach.py

Each defect is put into a copy of the repository, and the tests that claim the behavior run there. A defect is found if
one of them fails. The command fails if a defect survives without a reason, or if one with a reason is found after all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutants import Mutation, all_mutations  # noqa: E402
from tests.reach import Reach  # noqa: E402

LIMIT = 240
"""Seconds after which the tests of a defect are stopped: twice what they may take where nothing else runs."""
ARGUMENTS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""What pytest is always told; the warning is about plugins that libraries import before it begins."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "KVPOLICY_KERNELS": "0", "HF_HUB_OFFLINE": "1"}
"""What `tests/conftest.py` would set before libraries are imported."""
VERDICTS = {0: "survived", 1: "found", 2: "found", 4: "found", 5: "survived"}
"""By exit codes of pytest: 2 and 4 are errors of what the tests import, 5 says that this job has none of the tests."""
SLOW = ("-m", "(heavy or slow) and not (full or gpu or network or vllm)")
"""Tests that `bash .ci/run slow` runs."""


class Worker:
    """A process that runs tests, see `tests/mutation_worker.py`.

    Args:
        folder: The copy of the repository that it runs them in.
    """

    def __init__(self, folder: Path) -> None:
        """Start the process, with PyTorch in one thread and no files of pytest."""
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "tests/mutation_worker.py"],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self, tests: tuple[str, ...], *arguments: str, limit: float = LIMIT, only: set[str] | None = None
    ) -> dict[str, Any]:
        """Run tests, or those with ids in `only`; returns the verdict, the failed ones and the end of their output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "folder": str(self.folder),
            "tests": tests,
            "arguments": [*ARGUMENTS, *arguments],
            "limit": limit,
            "only": None if only is None else sorted(only),
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        code = answer.pop("code")
        return {"verdict": "timed out" if code is None else VERDICTS.get(code, f"exit {code}"), **answer}

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def try_mutation(
    mutation: Mutation, worker: Worker, *, all_failures: bool, reach: Reach | None = None
) -> dict[str, Any]:
    """Put one defect into the worker's copy, run its tests, and take it out again.

    Slow tests run where the others do not find it; `reach` does not know them.
    """
    path = worker.folder / mutation.file
    source = path.read_text(encoding="utf-8")
    only = None if reach is None else reach.tests(mutation, source)
    stop = [] if all_failures else ["-x"]
    started = time.monotonic()
    try:
        _write(path, mutation.apply(source))
        result = worker.run(mutation.tests, *stop, only=only)
        slow = result["verdict"] == "survived"
        if slow:
            result = worker.run(mutation.tests, *stop, *SLOW)
    finally:
        _write(path, source)
    seconds = round(time.monotonic() - started, 1)
    return {"name": mutation.name, "file": mutation.file, "slow": slow, "seconds": seconds, **result}


def _write(path: Path, source: str) -> None:
    path.write_text(source, encoding="utf-8")
    # A compiled file is taken to be current if size and time agree, and times are whole seconds.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def copy_repository(folder: Path) -> Path:
    """A copy of the tracked and new files of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def check_unchanged(mutations: list[Mutation], worker: Worker) -> None:
    """Stop unless the tests pass without any defect: only then does a failure mean something."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    print(f"{len(tests)} tests or files of tests on the code as it is ...", flush=True)
    result = worker.run(tuple(tests), limit=LIMIT * len(tests))
    if result["verdict"] != "survived":
        sys.exit(f"{result['output']}\nThe tests must pass without a defect.")


def try_all(
    mutations: list[Mutation], jobs: int, log: Path | None, *, baseline: bool, matrix: bool, reach: Reach | None = None
) -> list[dict[str, Any]]:
    """The verdicts of the mutations, `jobs` at a time; a log is read first and written as they come."""
    known = {} if log is None or not log.exists() else {item["name"]: item for item in _read_log(log)}
    todo = [mutation for mutation in mutations if mutation.name not in known]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(jobs) as pool:
        workers: SimpleQueue[Worker] = SimpleQueue()
        for number in range(jobs):
            workers.put(Worker(copy_repository(Path(work, str(number)))))

        def one(mutation: Mutation) -> dict[str, Any]:
            worker = workers.get()
            try:
                return try_mutation(mutation, worker, all_failures=matrix, reach=reach)
            finally:
                workers.put(worker)

        try:
            if baseline and todo:
                check_unchanged(todo, worker := workers.get())
                workers.put(worker)
            for result in pool.map(one, todo):
                known[result["name"]] = result
                verdict = f"{result['verdict']:>9}  {result['seconds']:6.1f} s"
                print(f"{verdict}  {result['file']}: {result['name']}", flush=True)
                if log is not None:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
        finally:
            while not workers.empty():
                workers.get().close()
    return [known[mutation.name] for mutation in mutations]


def _read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def summarize(mutations: list[Mutation], results: list[dict[str, Any]]) -> int:
    """Print what survived; returns the exit status."""
    wrong = 0
    for mutation, result in zip(mutations, results, strict=True):
        expected = "survived" if mutation.equivalent else "found"
        if mutation.equivalent and result["verdict"] == "survived":
            print(f"equivalent: {mutation.file}: {mutation.name}: {mutation.equivalent}")
        elif result["verdict"] != expected:
            wrong += 1
            print(f"{result['verdict'].upper()}: {mutation.file}: {mutation.name}\n{result['output']}")
    counted = [result for mutation, result in zip(mutations, results, strict=True) if not mutation.equivalent]
    found = sum(result["verdict"] == "found" for result in counted)
    slow = sum(result["verdict"] == "found" and result["slow"] for result in counted)
    print(
        f"{found} of {len(counted)} defects found, {slow} of them by slow tests alone; "
        f"{len(mutations) - len(counted)} equivalent"
    )
    return int(wrong > 0)


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description="Put small defects into the code, and see which the tests find.")
    parser.add_argument("--only", nargs="+", default=[], help="words of the files or names of the defects to try")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="how many to try at a time")
    parser.add_argument("--log", type=Path, help="a JSON-lines file of verdicts, which is resumed")
    parser.add_argument("--matrix", type=Path, help="a log as --log, with all tests that find a defect in place of one")
    parser.add_argument("--reach", type=Path, help="data of coverage.py, for less work: see tests/reach.py")
    parser.add_argument("--list", action="store_true", help="print the defects, and run nothing")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a defect first")
    given = parser.parse_args()
    mutations = [m for m in all_mutations() if not given.only or any(w in f"{m.file} {m.name}" for w in given.only)]
    if given.list:
        print(*(f"{mutation.file}: {mutation.name}" for mutation in mutations), sep="\n")
        return 0
    results = try_all(
        mutations,
        given.jobs,
        given.matrix or given.log,
        baseline=not given.no_baseline,
        matrix=given.matrix is not None,
        reach=Reach(given.reach) if given.reach else None,
    )
    return summarize(mutations, results)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the cases of a series, each in a separate process, so that running out of memory ends that case alone."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvpolicy_eval.gpu.case import MARK
from kvpolicy_eval.gpu.results import Record, append_result, case_key, read_results
from kvpolicy_eval.gpu.suites import Series


class Runner:
    """Runs cases that have no result yet.

    Args:
        results: File of JSON lines; see `kvpolicy_eval.gpu.results`.
        device: Such as `cuda`.
        limit: Bytes of memory that may be used, 0 for all: emulates a smaller GPU.
        python: Interpreter of an environment with kvpress; its cases are skipped without one.
        timeout: Seconds per case.
        retry: Whether to rerun cases that failed or timed out; running out of memory is a result.
        quiet: Whether to print nothing.
    """

    def __init__(
        self,
        results: Path,
        device: str,
        limit: int = 0,
        python: str = "",
        timeout: float = 1800,
        retry: bool = False,
        quiet: bool = False,
    ) -> None:
        """Read the results of earlier calls."""
        self.results = results
        self.device = device
        self.limit = limit
        self.python = python
        self.timeout = timeout
        self.quiet = quiet
        self.records = read_results(results)
        rerun = ("failed", "timeout") if retry else ()
        self._done = {case_key(record["case"]): record for record in self.records if record["status"] not in rerun}

    def run(self, series: Series) -> None:
        """Grow the batch until memory runs out, then bisect between the last size that fit and the first that did not.

        The bisection stops when the largest batch is known to an eighth.
        """
        if series.method == "kvpress" and not self.python:
            return
        largest = 0
        too_large = 0
        for batch in series.batch_sizes():
            if self._case(series, batch)["status"] != "ok":
                too_large = batch
                break
            largest = batch
        while series.until_full and largest and too_large - largest > max(1, largest // 8):
            batch = (largest + too_large) // 2
            if self._case(series, batch)["status"] == "ok":
                largest = batch
            else:
                too_large = batch

    def run_here(self, case: Record, measure: Callable[[Record], Record]) -> None:
        """Measure a case that has no result yet, in this process.

        Args:
            case: Its arguments.
            measure: Returns its result.
        """
        record = self._done.get(case_key(case))
        if record is None:
            record = {"case": case, "date": _now(), **measure(case)}
            self._keep(record)
        if not self.quiet:
            words = " ".join(str(value) for value in case.values())
            print(f"{words}: {record['status']}", flush=True)

    def _case(self, series: Series, batch: int) -> Record:
        """The result of a case, measured now unless it is known."""
        case = series.case(batch, self.device, self.limit)
        record = self._done.get(case_key(case))
        if record is None:
            record = self._start(case)
            self._keep(record)
        if not self.quiet:
            ok = record["status"] == "ok"
            result = f"{record['decode_tokens_per_s']:,.0f} tokens/s" if ok else record["status"]
            print(f"{series.suite}, {series.method} {series.policy} {series.mode}, batch {batch}: {result}", flush=True)
        return record

    def _start(self, case: Record) -> Record:
        """Measure a case in a new process."""
        python = self.python if case["method"] == "kvpress" else sys.executable
        script = Path(__file__).with_name("case.py")
        # `python case.py` and `python -m` would put a folder of ours first on the path, where our modules would shadow
        # others of the same name.
        code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        date = _now()
        try:
            process = subprocess.run(
                [python, "-c", code, json.dumps(case)],
                capture_output=True,
                text=True,
                timeout=self.timeout,
                env=_environment(case["method"]),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"case": case, "date": date, "status": "timeout", "error": f"over {self.timeout} s"}
        lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
        if not lines:
            last_line = (process.stderr.strip().splitlines() or ["no output"])[-1]
            error = f"exit code {process.returncode}: {last_line}"[:300]
            return {"case": case, "date": date, "status": "failed", "error": error}
        return {"case": case, "date": date, **json.loads(lines[-1][len(MARK) :])}

    def _keep(self, record: Record) -> None:
        """Append a result to the file.

        Raises:
            ValueError: If the file holds results of another GPU.
        """
        gpus = {str(old["card"]) for old in self.records if "card" in old}
        if "card" in record and gpus and record["card"] not in gpus:
            raise ValueError(
                f"{self.results} must hold results of one GPU, {', '.join(sorted(gpus))}, got {record['card']}; "
                "give another --results."
            )
        self.records.append(record)
        self._done[case_key(record["case"])] = record
        append_result(self.results, record)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _environment(method: str) -> dict[str, str]:
    """Environment of a case: our packages come from the path of this process, kvpress from its own environment."""
    env = dict(os.environ)
    if method == "kvpress":
        env.pop("PYTHONPATH", None)
    else:
        env["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    return env

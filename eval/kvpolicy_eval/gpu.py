"""`python -m kvpolicy_eval.gpu`: throughput and memory on one card, with random weights in real models' shapes.

Nothing is downloaded: weights are random and made on the card. Each case has a process of its own, so that running out
of memory ends that case alone. Results are appended to a file of JSON lines, and a second call goes on where the first
ended. With `--device cpu --shape tiny` everything runs small, to try the script.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpolicy.spec.budget import bytes_of
from kvpolicy.spec.formats import check_format, stamp
from kvpolicy_eval.gpu_case import MARK, SHAPES
from kvpolicy_eval.gpu_table import report
from kvpolicy_eval.markdown import fill

Record = dict[str, Any]

FORMAT = 1
"""Version of a line of results; a reader refuses a newer one."""

PAPER = (1, 32, 64, 128, 224)
"""The batches of SqueezeAttention's Table 3; further ones follow until memory runs out."""
MOST = 1 << 14


@dataclass(frozen=True)
class Series:
    """One method on one shape, at growing batches."""

    suite: str
    shape: str
    prompt: int
    new: int
    method: str
    mode: str
    policy: str = ""
    batches: tuple[int, ...] = (1,)
    until_full: bool = False

    def case(self, batch: int, device: str, limit: int) -> Record:
        """What one process is asked to do."""
        own = asdict(self)
        del own["batches"], own["until_full"]
        removed = {"removed": 0.8} if self.method == "kvpress" else {}
        return {**own, "batch": batch, "device": device, "limit": limit, **removed}


def table3(shape: str, prompt: int, new: int, batches: tuple[int, ...]) -> Iterator[Series]:
    """SqueezeAttention's Table 3: the full cache against squeeze over a window, at a fifth of all tokens."""
    fifth = (prompt + new) // 5
    sides = [
        ("dynamic", "eager", ""), ("static", "eager", ""), ("static", "graphs", ""),
        *(("policy", mode, f"squeeze+window@{fifth}") for mode in ("eager", "graphs")),
        *(("policy", mode, f"squeeze:profile=PROFILE+window@{fifth}") for mode in ("eager", "graphs")),
        ("kvpress", "eager", "StreamingLLMPress"),
    ]  # fmt: skip
    for method, mode, policy in sides:
        yield Series("table3", shape, prompt, new, method, mode, policy, batches, True)


def long(shape: str, prompts: tuple[int, ...], new: int) -> Iterator[Series]:
    """Long prompts: the stock caches, the selectors, KVCrush over its base, and codecs."""
    policies = [
        "snapkv@0.2", "kvcrush/snapkv@0.2", "squeeze:profile=PROFILE+window@0.2",
        "kivi:bits=4", "snapkv+kivi:bits=4@0.2", "csr", "snapkv+csr@0.2",
    ]  # fmt: skip
    for prompt in prompts:
        sides = [("dynamic", "eager", ""), ("static", "graphs", ""), ("kvpress", "eager", "SnapKVPress")]
        sides += [("policy", mode, policy) for policy in policies for mode in ("eager", "graphs")]
        for method, mode, policy in sides:
            selects = "kivi" not in policy and "csr" not in policy
            yield Series(f"long {prompt}", shape, prompt, new, method, mode, policy, (1, 4, 8, 16), selects)


def plan_suites(shape: str) -> list[Series]:
    """Every series, of the real shapes or of one small one."""
    if shape == "tiny":
        return [*table3("tiny", 32, 16, (1, 4)), *long("tiny", (64,), 24)]
    every = [*table3("mistral-7b", 512, 1024, PAPER), *long("llama-3-8b", (32768, 131072), 128)]
    return [series for series in every if shape in ("all", series.shape)]


class Runner:
    """Runs cases, and remembers those that were run before.

    Args:
        results: The file of JSON lines.
        device: Such as `cuda`.
        limit: Bytes of memory to use at most, 0 for all: a smaller card than there is.
        python: Of kvpress's environment, where there is one.
        timeout: Seconds that a case may take.
        retry: Whether to run again what failed, but for lack of memory.
        quiet: Whether to print nothing.
    """

    def __init__(
        self, results: Path, device: str, limit: int = 0, python: str = "", timeout: float = 1800, retry: bool = False,
        quiet: bool = False,
    ) -> None:  # fmt: skip
        """Read what is there."""
        self.results, self.device, self.limit, self.python = results, device, limit, python
        self.timeout, self.quiet = timeout, quiet
        self.records = read_results(results)
        again = ("failed", "timeout") if retry else ()
        self._done = {_key(record["case"]): record for record in self.records if record["status"] not in again}

    def run(self, series: Series) -> None:
        """Grow the batch until memory runs out, then look between the last that fit and the first that did not."""
        if series.method == "kvpress" and not self.python:
            return
        fits, too_large = 0, 0
        for batch in _growing(series):
            if self._case(series, batch)["status"] != "ok":
                too_large = batch
                break
            fits = batch
        while series.until_full and fits and too_large - fits > max(1, fits // 8):
            middle = (fits + too_large) // 2
            if self._case(series, middle)["status"] == "ok":
                fits = middle
            else:
                too_large = middle

    def _case(self, series: Series, batch: int) -> Record:
        case = series.case(batch, self.device, self.limit)
        record = self._done.get(_key(case))
        if record is None:
            record = self._start(case)
            self._keep(record)
        if not self.quiet:
            rate = f"{record['decode_tokens_per_s']:,.0f} tokens/s" if record["status"] == "ok" else record["status"]
            print(f"{series.suite}, {series.method} {series.policy} {series.mode}, batch {batch}: {rate}", flush=True)
        return record

    def _start(self, case: Record) -> Record:
        python = self.python if case["method"] == "kvpress" else sys.executable
        script = Path(__file__).with_name("gpu_case.py")
        # not as a script or module: the folder of either would hide modules of the same names
        code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        try:
            done = subprocess.run(
                [python, "-c", code, json.dumps(case)], capture_output=True, text=True, timeout=self.timeout,
                env=_environment(case["method"]), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"case": case, "date": date, "status": "timeout", "error": f"over {self.timeout} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not lines:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            error = f"ended with {done.returncode} and said {said}"[:300]
            return {"case": case, "date": date, "status": "failed", "error": error}
        return {"case": case, "date": date, **json.loads(lines[-1][len(MARK) :])}

    def _keep(self, record: Record) -> None:
        cards = {str(old["card"]) for old in self.records if "card" in old}
        if "card" in record and cards and record["card"] not in cards:
            raise ValueError(
                f"{self.results} holds results of {', '.join(sorted(cards))}, and this is {record['card']}: "
                "give another --results."
            )
        self.records.append(record)
        self._done[_key(record["case"])] = record
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read() != b"\n"  # a call was killed while it wrote
                file.write(b"\n" * torn)
            file.write(json.dumps(record | stamp(FORMAT)).encode() + b"\n")


def read_results(path: Path) -> list[Record]:
    """Results of earlier calls; a line that was cut off when a call was killed is left out.

    Raises:
        ValueError: Where a newer kvpolicy wrote one.
    """
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record: Record = json.loads(line)
        except json.JSONDecodeError:
            continue
        check_format(record, FORMAT, path)
        records.append(record)
    return records


def _growing(series: Series) -> Iterator[int]:
    yield from series.batches
    batch = series.batches[-1]
    while series.until_full and batch < MOST:
        batch = max(batch + 1, batch * 3 // 2)
        yield batch


def _key(case: Record) -> str:
    return json.dumps(case, sort_keys=True)


def _environment(method: str) -> dict[str, str]:
    """Our packages are found where this process found them; kvpress's environment has its own."""
    env = dict(os.environ)
    if method == "kvpress":
        env.pop("PYTHONPATH", None)
    else:
        env["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    return env


def main(argv: list[str] | None = None) -> int:
    """Run every series, then print the report."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.gpu", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), help="a file of JSON lines, appended to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="all", choices=["all", *SHAPES])
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of suites: table3, long, 'long 32768'")
    parser.add_argument("--memory", default="", help="bytes to use at most, such as 40GiB: a smaller card")
    parser.add_argument("--kvpress-python", default="", help="the Python of an environment with kvpress")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a case may take")
    parser.add_argument("--retry", action="store_true", help="run again what failed, but for lack of memory")
    parser.add_argument("--report", action="store_true", help="run nothing, and print what is there")
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'gpu'")
    args = parser.parse_args(argv)
    try:
        limit = bytes_of(args.memory) if args.memory else 0
        runner = Runner(args.results, args.device, limit, args.kvpress_python, args.timeout, args.retry)
        if not args.report:
            for series in plan_suites(args.shape):
                if series.suite.startswith(tuple(args.only)):
                    runner.run(series)
        text = report(runner.records)
        print("\n" + text)
        if args.fill:
            fill(args.fill, "gpu", text)
    except (ValueError, OSError) as error:
        print(f"kvpolicy_eval.gpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m kvpolicy_eval.gpu`: throughput and memory on one GPU, with random weights in the shapes of real models.

Nothing is downloaded: weights are random and created on the GPU. Each case has a separate process, so that running
out of memory ends that case alone. Results are appended to a file of JSON lines, and a second call continues where the
first one ended. `--device cpu --shape tiny` runs everything at a small size on a CPU, to try the command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpolicy.text.budget import bytes_of
from kvpolicy_eval.common.markdown import add_fill_argument, publish
from kvpolicy_eval.gpu import reads
from kvpolicy_eval.gpu.case import SHAPES
from kvpolicy_eval.gpu.runner import Runner
from kvpolicy_eval.gpu.suites import plan_suites
from kvpolicy_eval.gpu.tables import report


def main(argv: list[str] | None = None) -> int:
    """Run all series, then print the tables.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.gpu", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), help="file of JSON lines, appended to")
    parser.add_argument("--device", default="cuda", help="device to run on")
    parser.add_argument("--shape", default="all", choices=["all", *SHAPES], help="model whose shape is used")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="run only suites with these prefixes, such as table3, long, 'long 32768', reads",
    )
    parser.add_argument("--side", nargs="+", default=[""], help="run only sides with one of these texts, such as kivi")
    parser.add_argument("--batch", nargs="+", type=int, default=[], help="batch sizes, instead of growing ones")
    parser.add_argument("--memory", default="", help="limit such as 40GiB, which emulates a smaller GPU")
    parser.add_argument("--kvpress-python", default="", help="Python interpreter of an environment with kvpress")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per case")
    parser.add_argument("--retry", action="store_true", help="rerun cases that failed or timed out")
    parser.add_argument("--report", action="store_true", help="run nothing, and print the existing results")
    add_fill_argument(parser, "gpu")
    args = parser.parse_args(argv)
    try:
        limit = bytes_of(args.memory) if args.memory else 0
        runner = Runner(args.results, args.device, limit, args.kvpress_python, args.timeout, args.retry)
        if not args.report:
            for series in plan_suites(args.shape):
                if series.suite.startswith(tuple(args.only)) and any(text in series.side for text in args.side):
                    runner.run(series.at(args.batch))
            for case in reads.cases(args.device, args.shape) if reads.SUITE.startswith(tuple(args.only)) else ():
                if any(text in f"{case['codec']} {case['way']}" for text in args.side):
                    runner.run_here(case, reads.measure)
        print()
        publish(report(runner.records), "gpu", args.fill)
    except (ValueError, OSError) as error:
        print(f"kvpolicy_eval.gpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

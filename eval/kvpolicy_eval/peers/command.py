"""`python -m kvpolicy_eval.peers`: compare with kvpress and with transformers' QuantizedCache.

Both sides run in separate processes and environments. `make-env` creates the peers' environment with pip; `run`
measures both sides and writes JSON; `table` prints existing results as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from kvpolicy.text.formats import check_format, replace_file, stamp
from kvpolicy.text.output import check_is_file, check_output
from kvpolicy_eval.common.markdown import add_fill_argument, publish
from kvpolicy_eval.common.results import add_force_argument
from kvpolicy_eval.peers import env
from kvpolicy_eval.peers.generate import describe as describe_generate
from kvpolicy_eval.peers.pair import Options, Pair
from kvpolicy_eval.peers.process import Process
from kvpolicy_eval.peers.runs import RUNS
from kvpolicy_eval.peers.runs import run as run_all
from kvpolicy_eval.peers.tables import TABLES, text_of

FORMAT = 2
"""Version of the results; a reader refuses a newer one."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    default = Options()
    parser.add_argument("what", choices=["make-env", "run", "table"])
    parser.add_argument("--env", help="folder of the peers' environment; in the user's cache by default")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="all by default")
    parser.add_argument("--out", type=Path, default=Path("peers.json"), help="results; other results in it are kept")
    parser.add_argument("--n", type=int, default=default.n, help="prompts per task")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(default.lengths), help="timed prompt lengths")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="repetitions of each timing")
    parser.add_argument("--threads", type=int, default=default.threads, help="threads of torch, on each side")
    parser.add_argument("--layers", type=int, default=default.layers, help="layers of the random Llama that is timed")
    parser.add_argument("--hidden", type=int, default=default.hidden, help="its hidden size")
    parser.add_argument("--log", type=Path, help="new file for the output of both processes")
    add_force_argument(parser)
    add_fill_argument(parser, *(f"peers-{name}" for name in TABLES))


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    if args.what == "make-env":
        print(env.make(args.env))
        return 0
    if args.what == "run":
        _measure(args)
    results = read(args.out)
    for name in (name for name in args.only if name in results):
        publish(text_of(name, results), f"peers-{name}", args.fill)
        print()
    return 0


def read(path: Path) -> dict[str, Any]:
    """Results of an earlier run.

    Raises:
        ValueError: If the file holds none, or a newer kvpolicy wrote it.
    """
    advice = "run `python -m kvpolicy_eval.peers run` first."
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no results; {advice}") from error
    if not isinstance(results, dict) or "versions" not in results or not set(results) & set(TABLES):
        raise ValueError(f"{path} holds no results of a comparison; {advice}")
    check_format(results, FORMAT, path)
    return results


def _measure(args: argparse.Namespace) -> None:
    options = Options(
        n=args.n,
        lengths=tuple(args.lengths),
        rounds=args.rounds,
        threads=args.threads,
        layers=args.layers,
        hidden=args.hidden,
    )
    check_is_file(args.out)
    if args.log:
        check_output(args.log, inputs=[args.out, args.fill], force=args.force)
    results: dict[str, Any] = read(args.out) if args.out.exists() else {}
    python = env.find(args.env)
    with (
        (args.log or Path(os.devnull)).open("w", encoding="utf-8") as log,
        Process("kvpolicy_eval.peers.ours", log=log) as ours,
        Process("kvpolicy_eval.peers.theirs", python, log) as theirs,
    ):
        for name in args.only:
            measured = run_all([name], Pair(ours, theirs), options)
            results["versions"] = results.get("versions", {}) | {name: measured.pop("versions")}
            results |= measured
            results["options"] = results.get("options", {}) | {name: describe(name, options)}
            # Written after each part, so that an interrupted run keeps the finished ones.
            replace_file(args.out, (json.dumps(results | stamp(FORMAT), indent=1) + "\n").encode())


def describe(name: str, options: Options) -> str:
    """How a part was measured."""
    if name == "speed":
        return (
            f"kvpolicy/kvpress, with a random Llama of {options.layers} layers, hidden size {options.hidden}, heads of "
            f"64 and a quarter as many KV heads, fp32, CPU, {options.threads} thread(s) on each side; budget 20%; "
            f"medians of {options.rounds} rounds in turn, {options.steps} steps each. Peak: without the memory before "
            "the prompt. "
        )
    if name == "generate":
        return describe_generate(options)
    if name == "recall":
        return (
            f"Mean exact match of the embedded model in bf16 over five tasks, {options.n} prompts each of about 512 "
            "tokens. Held: bytes relative to the full cache. "
        )
    if name == "kept":
        return (
            "Mean overlap of the positions that a head keeps; in brackets, the share of heads with the same positions; "
            f"the embedded model in fp32, {2 * max(options.n // 4, 2)} prompts. "
        )
    return "The embedded model in fp32. "

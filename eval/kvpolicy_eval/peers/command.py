"""`python -m kvpolicy_eval.peers`: compare with kvpress and transformers' QuantizedCache, each in its environment.

`make-env` makes the peers' environment with pip; `run` asks both sides and writes JSON; `table` shows it as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from kvpolicy.spec.formats import check_format, stamp
from kvpolicy_eval.markdown import fill
from kvpolicy_eval.peers import env
from kvpolicy_eval.peers.process import Process
from kvpolicy_eval.peers.runs import RUNS, Options, Pair
from kvpolicy_eval.peers.runs import run as run_all
from kvpolicy_eval.peers.tables import TABLES, text_of

FORMAT = 2
"""Version of the results; a reader refuses a newer one."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    usual = Options()
    parser.add_argument("what", choices=["make-env", "run", "table"])
    parser.add_argument("--env", help="folder of the peers' environment; by default in the user's cache")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="all by default")
    parser.add_argument("--out", type=Path, default=Path("peers.json"), help="results; what is there is kept")
    parser.add_argument("--n", type=int, default=usual.n, help="prompts per task")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(usual.lengths), help="prompts that are timed")
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="times that each is timed, in turn")
    parser.add_argument("--threads", type=int, default=usual.threads, help="of torch, on each side")
    parser.add_argument("--layers", type=int, default=usual.layers, help="of the random Llama that is timed")
    parser.add_argument("--hidden", type=int, default=usual.hidden, help="its hidden size")
    parser.add_argument("--log", type=Path, help="where the sides' own output goes")
    parser.add_argument("--fill", type=Path, help="a page with places for the tables 'peers-...'")


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    if args.what == "make-env":
        print(env.make(args.env))
        return 0
    if args.what == "run":
        _measure(args)
    results = read(args.out)
    for name in (name for name in args.only if name in results):
        text = text_of(name, results)
        print(f"{text}\n")
        if args.fill:
            fill(args.fill, f"peers-{name}", text)
    return 0


def read(path: Path) -> dict[str, Any]:
    """Results of an earlier run.

    Raises:
        ValueError: Where there are none, or a newer kvpolicy wrote them.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no results: write it with `python -m kvpolicy_eval.peers run`.") from error
    if not isinstance(results, dict) or "versions" not in results or not set(results) & set(TABLES):
        raise ValueError(f"{path} holds no results of a comparison: `python -m kvpolicy_eval.peers run` writes them.")
    check_format(results, FORMAT, path)
    return results


def _measure(args: argparse.Namespace) -> None:
    options = Options(
        args.n, tuple(args.lengths), args.rounds, args.threads, args.layers, args.hidden
    )  # fmt: skip
    python = env.find(args.env)
    before: dict[str, Any] = read(args.out) if args.out.exists() else {}
    with (
        (args.log or Path(os.devnull)).open("w", encoding="utf-8") as log,
        Process("kvpolicy_eval.peers.ours", log=log) as ours,
        Process("kvpolicy_eval.peers.theirs", python, log) as theirs,
    ):
        for name in args.only:  # what is done stays, should the next be interrupted
            found = run_all([name], Pair(ours, theirs), options)
            before["versions"] = before.get("versions", {}) | {name: found.pop("versions")}
            before |= found
            before["options"] = before.get("options", {}) | {name: describe(name, options)}
            args.out.write_text(json.dumps(before | stamp(FORMAT), indent=1) + "\n", encoding="utf-8")


def describe(name: str, options: Options) -> str:
    """How something was measured, in a sentence."""
    if name == "speed":
        return (
            f"A random Llama of {options.layers} layers, hidden size {options.hidden}, heads of 64 and a quarter as "
            f"many KV heads, fp32, CPU, {options.threads} thread(s) on each side; budget 20%; medians of "
            f"{options.rounds} rounds in turn, {options.steps} steps each. Of theirs: our step over theirs. Peak is "
            "memory over what the process had before the prompt. "
        )
    if name == "recall":
        return (
            f"Mean exact match of the embedded model in bf16 over five tasks, {options.n} prompts each of about 512 "
            "tokens, one at a time; held is of the full cache's bytes when the answer is out. "
        )
    if name == "kept":
        return (
            "Mean overlap of a head's kept positions, and in brackets the share of heads that keep the same; the "
            f"embedded model in fp32, {2 * max(options.n // 4, 2)} prompts. "
        )
    return "The embedded model in fp32. "

"""`python -m kvpolicy_eval.families`: is a policy right on each class of the installed transformers?

Small random models of all causal and image-text classes run under policies and with their stock cache, whose attention
is given a mask of what a policy evicted: logits must be equal within rounding. The exit status is 1 if a model is
accepted and not right, if the page has no reason for a refusal, or if `plan` says something else than `attach`. A
result is kept in the file as soon as it is known: a command that is interrupted continues, and measures again what was
measured with other versions or other code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvpolicy_eval.common.markdown import add_fill_argument, publish
from kvpolicy_eval.common.results import Known, Result, check_results, keep_result, parse_checked, read_results
from kvpolicy_eval.families.check import RIGHT, check
from kvpolicy_eval.families.entries import Entry, counted, installed, named
from kvpolicy_eval.families.guard import guarded
from kvpolicy_eval.families.page import PLACES, faults, tables
from kvpolicy_eval.families.stamp import stamp


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicy_eval.families", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names such as llama; all by default")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("families.jsonl"),
        help="file of results, with which a run continues; families.jsonl by default",
    )
    parser.add_argument("--page-only", action="store_true", help="measure nothing, and show the results of the file")
    parser.add_argument("--jobs", type=int, default=1, help="models that are checked at a time, each on one core")
    parser.add_argument("--seconds", type=float, default=300.0, help="what a model may take; 300 by default")
    add_fill_argument(parser, *PLACES)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Check models, print the verdicts, and fill the page on request; the exit status."""
    args = parse_checked(_parser(), argv, _check)
    known = read_results(args.results)
    entries = named(args.names)
    if args.page_only:
        entries = [entry for entry in installed() if entry.key in known]
    else:
        _measure(args, entries, known)
    for entry in entries:
        print(line(entry, known[entry.key]))
    if args.fill:
        for place, text in tables(known).items():
            publish(text, place, args.fill)
    wrong = faults(entries, known)
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


def _check(args: argparse.Namespace) -> None:
    """Check the names, the file of results and the page, before anything is measured.

    Raises:
        ValueError: If a name is unknown, the page lacks a place, or it would be filled from some of the results.
    """
    named(args.names)
    check_results(args, *PLACES)
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}.")
    if args.fill and args.names:
        raise ValueError("--fill must be given without names, because the page lists all of them.")
    if args.fill and args.page_only:
        known = read_results(args.results)
        have = {*installed()}
        if lacking := [entry.key for entry in counted() if entry in have and entry.key not in known]:
            raise ValueError(f"--results must have all entries to fill the page, got none of {lacking[0]!r}.")


def _measure(args: argparse.Namespace, entries: list[Entry], known: Known) -> None:
    """Check the entries whose results are missing or of another state of the code."""
    made = stamp()
    missing = [entry for entry in entries if known.get(entry.key, {}).get("made") != made]
    for number, (entry, result) in enumerate(guarded(missing, check, args.jobs, args.seconds), 1):
        keep_result(args.results, known, entry.key, result | {"made": made})
        print(f"{number} of {len(missing)}: {line(entry, result)}", file=sys.stderr, flush=True)


def line(entry: Entry, result: Result) -> str:
    """A result in one line.

    >>> line(Entry("causal", "xlm"), {"verdict": "refused", "sentence": "The model must have layers."})
    'causal xlm: refused: The model must have layers.'
    """
    said = f"{entry.key}: {result['verdict']}"
    if result["verdict"] != RIGHT:
        return f"{said}: {result['sentence']}"
    policies = result["policies"].values()
    worst = max([result["full"], *(found.get("difference", 0.0) for found in policies)])
    least = min(found["unmasked"] for found in policies if "unmasked" in found)
    return f"{said}: differs by {worst:.0e}, without the mask by {least:.2g}"


if __name__ == "__main__":
    sys.exit(main())

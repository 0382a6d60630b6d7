"""Runs the parts of the comparison."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from kvpolicy_eval.peers.generate import generate
from kvpolicy_eval.peers.kept import kept
from kvpolicy_eval.peers.pair import Line, Options, Pair
from kvpolicy_eval.peers.recall import recall
from kvpolicy_eval.peers.speed import speed
from kvpolicy_eval.peers.traps import traps

RUNS: dict[str, Callable[[Pair, Options], Iterator[Line]]] = {
    "kept": kept,
    "recall": recall,
    "traps": traps,
    "speed": speed,
    "generate": generate,
}
"""Parts by name, in the order in which they run."""


def run(names: list[str], pair: Pair, options: Options) -> Line:
    """Run some parts.

    Returns:
        The lines of each part, and the versions of both sides.
    """
    results: Line = {"versions": {"ours": pair.ours.ask("versions"), "theirs": pair.theirs.ask("versions")}}
    for name in names:
        results[name] = []
        for line in RUNS[name](pair, options):
            print(f"{name}: {line}", file=sys.stderr, flush=True)
            results[name].append(line)
    return results

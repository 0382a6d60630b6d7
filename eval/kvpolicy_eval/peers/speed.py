"""Speed and peak memory of a random Llama, with both sides in alternation."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator

from kvpolicy_eval.peers.pair import Line, Options, Pair, attention_for
from kvpolicy_eval.peers.process import Failed
from kvpolicy_eval.peers.random_llama import save_random_llama

METHODS = [
    ("full cache", "full", "full"),
    ("SnapKV", "snapkv:window=64:kernel=5:decode=grow", "snapkv"),
    ("StreamingLLM", "streaming:decode=grow", "streaming"),
    ("Knorm", "knorm", "knorm"),
    ("H2O and ObservedAttention", "h2o:decode=grow", "observed"),
    ("SnapKV by heads (AdaKV)", "uniform/adakv+snapkv:window=64:kernel=5:decode=grow", "ada/snapkv"),
    ("SnapKV and 4 bits", "snapkv:window=64:kernel=5+kivi:bits=4", "snapkv+quanto-4"),
]
"""Name of the method, our spec, their press; empty if a side has no such method."""
SHARE = 0.2
"""Budget, as a share of the prompt."""
MAX_LENGTHS = {"observed": 4096}
"""Longest prompt of a method: the attention matrix of 16k tokens takes 8 GiB per layer."""


def speed(pair: Pair, options: Options) -> Iterator[Line]:
    """Times and memory of all methods at all lengths."""
    with tempfile.TemporaryDirectory() as path:
        save_random_llama(path, options, queries_per_head=4)
        for name, ours, theirs in METHODS:
            pair.ours.ask("load", path=path, threads=options.threads)
            pair.theirs.ask("load", path=path, threads=options.threads, attention=attention_for(theirs))
            for length in options.lengths:
                result = _alternate(pair, ours, theirs, length, options)
                yield {"method": name, "length": length, "share": SHARE, "threads": options.threads} | result


def _alternate(pair: Pair, ours: str, theirs: str, length: int, options: Options) -> Line:
    """Medians of both sides, measured alternately because the speed of a machine drifts."""
    times: dict[str, list[Line]] = {"ours": [], "theirs": []}
    errors: Line = {}
    sides = [("ours", pair.ours, ours), ("theirs", pair.theirs, theirs)]
    for number in range(options.rounds + 1):  # round 0 warms up
        for side, process, method in sides if number % 2 else sides[::-1]:
            if not method or side in errors or length > MAX_LENGTHS.get(method, length):
                continue
            try:
                result = process.ask("time", method=method, length=length, share=SHARE, steps=options.steps)
            except Failed as error:
                errors[side] = {"error": str(error)}
                continue
            if number:
                times[side].append(result)
    return {side: _median(results) for side, results in times.items() if results} | errors


def _median(results: list[Line]) -> Line:
    return {
        key: None if results[0][key] is None else statistics.median(result[key] for result in results)
        for key in results[0]
    }

"""Results of the comparison as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy_eval.common.markdown import table

Line = dict[str, Any]

REASONS = {
    "SnapKV": "our window shrinks to half the budget, theirs stays at 64 tokens",
    "SnapKV, window 16": "our pooling sees the window beside its last two neighbours, theirs sees zeros: "
    "{edge:.0%} of differences",
    "Knorm": "equal tokens have equal norms, we keep the earlier and they any: {ties:.0%} of differences",
    "H2O and ObservedAttention": "half of our budget is the newest tokens; they divide sums by the number of queries",
    "H2O without its window": "they divide sums by the number of queries",
}
"""Reasons for different positions, with measured shares."""


def kept(lines: list[Line]) -> str:
    """Agreement of kept positions."""
    methods = list(dict.fromkeys(line["method"] for line in lines))
    shares = sorted({line["share"] for line in lines}, reverse=True)
    rows: list[list[str]] = []
    for method in methods:
        by_share = {line["share"]: line for line in lines if line["method"] == method}
        cells = [_agreement(by_share.get(share)) for share in shares]
        least = min(by_share.values(), key=lambda line: line["overlap"])
        reason = "" if least["overlap"] == 1 else REASONS.get(method, "").format(**least)
        rows.append([method, f"`{least['ours']}`", f"`{least['theirs']}`", *cells, reason])
    return table(["method", "ours", "kvpress", *[f"budget {share:.0%}" for share in shares], "why not"], rows)


def _agreement(line: Line | None) -> str:
    return "" if line is None else f"{line['overlap']:.3f} ({line['same']:.0%})"


def recall(lines: list[Line]) -> str:
    """Accuracy at equal bytes."""
    rows: list[list[str]] = []
    for side, method in dict.fromkeys((line["side"], line["method"]) for line in lines):
        by_share = {line["share"]: line for line in lines if (line["side"], line["method"]) == (side, method)}
        cells = [_accuracy(by_share.get(share)) for share in (None, 0.3, 0.2, 0.1)]
        rows.append([_library(side, method), f"`{method}`", *cells])
    return table(["side", "method", "as it is", "30% of the bytes", "20%", "10%"], rows)


def _library(side: str, method: str) -> str:
    if side == "ours":
        return "kvpolicy"
    return "transformers" if method.startswith(("full", "quanto", "hqq")) else "kvpress"


def _accuracy(line: Line | None) -> str:
    if line is None:
        return ""
    return "fails" if "error" in line else f"{line['right']:.2f} (held {line['held']:.2f})"


def traps(lines: list[Line]) -> str:
    """Behaviour."""
    return table(
        ["question", "kvpolicy", "kvpress"],
        [[line["trap"], _trap(line.get("ours")), _trap(line.get("theirs"))] for line in lines],
    )


def _trap(answer: Line | None) -> str:
    if answer is None:
        return "has none"
    if "error" in answer:
        return f"fails: {answer['error'].partition(':')[0]}"
    value = answer["value"]
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value}, should be {answer['of']}" if answer["of"] < value else f"{value} of {answer['of']}"
    return str(value)


def speed(lines: list[Line]) -> str:
    """Times and memory, and our step time over theirs if both sides have the method."""
    rows: list[list[str]] = []
    for line in lines:
        steps = [line[side]["step"] for side in ("ours", "theirs") if "step" in line.get(side, {})]
        ratio = f"{steps[0] / steps[1]:.2f}" if len(steps) == 2 else ""
        for side, library, cell in (("ours", "kvpolicy", ratio), ("theirs", "kvpress", "")):
            if side in line:
                rows.append([line["method"], f"{line['length']:,}", library, *_times(line[side], cell)])
    return table(["method", "prompt", "side", "prefill, s", "step, ms", "of theirs", "peak, MiB", "held, MiB"], rows)


def _times(result: Line, ratio: str) -> list[str]:
    if "error" in result:
        return ["fails", "", "", "", ""]
    step = f"{result['step'] * 1e3:.1f}"
    return [f"{result['prefill']:.2f}", step, ratio, _mib(result["peak"]), _mib(result["held"])]


def generate(lines: list[Line]) -> str:
    """Times of `generate`, bytes and texts, each beside the stock cache of the same process."""
    rows: list[list[str]] = []
    for line in lines:
        rows.append([line["model"], f"`{line['method']}`", line["library"], *_generated(line)])
    names = ["model", "cache", "library", "prefill, ms", "step, ms", "held, MiB", "same answers", "same tokens"]
    return table(names, rows)


def _generated(line: Line) -> list[str]:
    for reason in ("error", "skipped"):
        if reason in line:
            return [f"{'fails' if reason == 'error' else reason}: {line[reason]}", "", "", "", ""]
    return [
        f"{line['prefill'] * 1e3:,.0f} ({line['prefill_ratio']:.2f})",
        f"{line['step'] * 1e3:.1f} ({line['step_ratio']:.2f})",
        f"{_mib(line['held'])} ({line['held_ratio']:.2f})",
        "" if line["same_answers"] is None else f"{line['same_answers']:.0%}",
        f"{line['same_tokens']:.0f} of {line['tokens']}",
    ]


def _mib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"


TABLES: dict[str, Callable[[list[Line]], str]] = {
    "kept": kept,
    "recall": recall,
    "traps": traps,
    "speed": speed,
    "generate": generate,
}


def text_of(name: str, results: Line) -> str:
    """A table, with the options and versions of its results below it."""
    versions = results["versions"].get(name, results["versions"])  # format 1 has one set of versions for all tables
    ours, theirs = (", ".join(f"{k} {v}" for k, v in versions[side].items()) for side in ("ours", "theirs"))
    options = results.get("options", {}).get(name, "")
    return f"{TABLES[name](results[name])}\n\n{options}Ours: {ours}. Theirs: {theirs}."

"""Results of the comparison as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.peers.generate import STOCK

Line = dict[str, Any]

REASONS = {
    "SnapKV": "our window shrinks to half the budget, theirs stays at 64 tokens",
    "SnapKV, window 16": "our pooling sees the window beside its last two neighbors, theirs sees zeros: "
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
    """Accuracy at equal bytes; what is held is shown where it is not what the column says."""
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
    if "error" in line:
        return "fails"
    held = "" if line["share"] and abs(line["held"] - line["share"]) < 0.02 else f" (bytes {line['held']:.2f})"
    return f"{line['right']:.2f}{held}"


def traps(lines: list[Line]) -> str:
    """Behavior."""
    return table(
        ["question", "kvpolicy", "kvpress"],
        [[line["trap"], _trap(line.get("ours")), _trap(line.get("theirs"))] for line in lines],
    )


def _trap(answer: Line | None) -> str:
    if answer is None:
        return "not measured"
    if "error" in answer:
        return f"fails: {answer['error'].partition(':')[0]}"
    value = answer["value"]
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int):
        return f"{value}, should be {answer['of']}" if answer["of"] < value else f"{value} of {answer['of']}"
    return str(value)


def speed(lines: list[Line]) -> str:
    """Times and memory of both sides, and our step time over theirs if both sides have the method."""
    rows: list[list[str]] = []
    for line in lines:
        sides = [line[side] for side in ("ours", "theirs") if side in line]
        both = [_times(line.get(side)) for side in ("ours", "theirs")]
        steps = [side["step"] for side in sides if "step" in side]
        ratio = f"{steps[0] / steps[1]:.2f}" if len(steps) == 2 else ""
        prefill, step, peak, held = ("/".join(cells) for cells in zip(*both, strict=True))
        rows.append([line["method"], f"{line['length']:,}", prefill, step, ratio, peak, held])
    return table(["method", "prompt", "prefill, s", "step, ms", "step over theirs", "peak, MiB", "cache, MiB"], rows)


def _times(result: Line | None) -> list[str]:
    """Cells of a side; a dash where it has no such method."""
    if result is None:
        return ["-"] * 4
    if "error" in result:
        return ["fails"] * 4
    return [f"{result['prefill']:.2f}", f"{result['step'] * 1e3:.1f}", _mib(result["peak"]), _mib(result["held"])]


def generate(lines: list[Line]) -> str:
    """Times of `generate`, bytes and texts, each over those of the stock cache of the same process.

    A cache is one row, with columns for each model. A stock cache of another process is another row.
    """
    models = list(dict.fromkeys(line["model"] for line in lines))
    found: dict[tuple[str, int], dict[str, Line]] = {}
    for model in models:
        counts: dict[str, int] = {}
        for line in (line for line in lines if line["model"] == model):
            number = counts[line["method"]] = counts.get(line["method"], 0) + 1
            found.setdefault((line["method"], number), {})[model] = line
    names = ["cache", *(f"{model}: {name}" for model in models for name in GENERATED)]
    rows = [
        [f"`{method}`", *(cell for model in models for cell in _generated(by_model.get(model)))]
        for (method, _), by_model in found.items()
    ]
    shown = [place for place in range(len(names)) if any(row[place] for row in rows)]
    return table([names[place] for place in shown], [[row[place] for place in shown] for row in rows])


GENERATED = ("prefill", "step", "held", "same answers", "same tokens")
"""Columns of a model."""


def _generated(line: Line | None) -> list[str]:
    if line is None:
        return [""] * len(GENERATED)
    if "error" in line:
        return [f"fails: {line['error'].partition(':')[0]}", "", "", "", ""]
    if "skipped" in line:
        return [f"skipped: {line['skipped']}", "", "", "", ""]
    if line["method"] == STOCK:
        costs = [f"{line['prefill'] * 1e3:,.0f} ms", f"{line['step'] * 1e3:.1f} ms", f"{_mib(line['held'])} MiB"]
    else:
        costs = [f"{line[name]:.2f}" for name in ("prefill_ratio", "step_ratio", "held_ratio")]
    answers = "" if line["same_answers"] is None else f"{line['same_answers']:.0%}"
    return [*costs, answers, f"{line['same_tokens']:.0f}"]


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
    """A table, with the options and versions of its results below it; of theirs, the versions that differ."""
    versions = results["versions"].get(name, results["versions"])  # format 1 has one set of versions for all tables
    differ = {k: v for k, v in versions["theirs"].items() if versions["ours"].get(k) != v}
    ours, theirs = (", ".join(f"{k} {v}" for k, v in side.items()) for side in (versions["ours"], differ))
    options = results.get("options", {}).get(name, "")
    return f"{TABLES[name](results[name])}\n\n{options}Ours: {ours}. Theirs: {theirs}."

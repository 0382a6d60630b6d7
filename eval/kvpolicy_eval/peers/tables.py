"""What was measured, as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpolicy_eval.markdown import table

Line = dict[str, Any]

WHY = {
    "SnapKV": "our window shrinks to half the budget, theirs stays at 64 tokens",
    "SnapKV, window 16": "our pooling sees the window beside its last two neighbours, theirs sees zeros: "
    "{edge:.0%} of differences",
    "Knorm": "equal tokens have equal norms, we keep the earlier and they any: {ties:.0%} of differences",
    "H2O and ObservedAttention": "half of our budget is the newest tokens; they divide sums by the number of queries",
    "H2O without its window": "they divide sums by the number of queries",
}
"""Why positions differ, where they do; numbers are measured."""


def kept(lines: list[Line]) -> str:
    """Agreement of kept positions."""
    methods = list(dict.fromkeys(line["method"] for line in lines))
    shares = sorted({line["share"] for line in lines}, reverse=True)
    rows: list[list[str]] = []
    for method in methods:
        own = {line["share"]: line for line in lines if line["method"] == method}
        cells = [f"{own[share]['overlap']:.3f} ({own[share]['same']:.0%})" if share in own else "" for share in shares]
        one = own[min(own, key=lambda share: own[share]["overlap"])]
        why = "" if one["overlap"] == 1 else WHY.get(method, "").format(**one)
        rows.append([method, f"`{one['ours']}`", f"`{one['theirs']}`", *cells, why])
    return table(["method", "ours", "kvpress", *[f"budget {share:.0%}" for share in shares], "why not"], rows)


def recall(lines: list[Line]) -> str:
    """Right answers at equal bytes."""
    names = {"ours": "kvpolicy", "theirs": "kvpress"}
    rows: list[list[str]] = []
    for side, method in dict.fromkeys((line["side"], line["method"]) for line in lines):
        own = {line["share"]: line for line in lines if (line["side"], line["method"]) == (side, method)}
        name = "transformers" if side == "theirs" and method.startswith(("full", "quanto", "hqq")) else names[side]
        rows.append([name, f"`{method}`", *[_mark(own.get(share)) for share in (None, 0.3, 0.2, 0.1)]])
    return table(["side", "method", "as it is", "30% of the bytes", "20%", "10%"], rows)


def _mark(line: Line | None) -> str:
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
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    text += f", should be {answer['of']}" if isinstance(value, int) and answer["of"] < value else ""
    return f"{text} of {answer['of']}" if isinstance(value, int) and answer["of"] >= value else text


def speed(lines: list[Line]) -> str:
    """Times and memory, and how long our steps take where both sides have the method."""
    rows: list[list[str]] = []
    for line in lines:
        steps = [line[side]["step"] for side in ("ours", "theirs") if "step" in line.get(side, {})]
        of_theirs = f"{steps[0] / steps[1]:.2f}" if len(steps) == 2 else ""
        for side, name, part in (("ours", "kvpolicy", of_theirs), ("theirs", "kvpress", "")):
            if side in line:
                rows.append([line["method"], f"{line['length']:,}", name, *_times(line[side], part)])
    return table(["method", "prompt", "side", "prefill, s", "step, ms", "of theirs", "peak, MiB", "held, MiB"], rows)


def _times(got: Line, of_theirs: str) -> list[str]:
    if "error" in got:
        return ["fails", "", "", "", ""]
    return [f"{got['prefill']:.2f}", f"{got['step'] * 1e3:.1f}", of_theirs, _mib(got["peak"]), _mib(got["held"])]


def _mib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f}"


TABLES: dict[str, Callable[[list[Line]], str]] = {"kept": kept, "recall": recall, "traps": traps, "speed": speed}


def text_of(name: str, results: Line) -> str:
    """A table and the versions under it."""
    versions = results["versions"].get(name, results["versions"])  # format 1 had one set for all of a file
    ours, theirs = (", ".join(f"{k} {v}" for k, v in versions[side].items()) for side in ("ours", "theirs"))
    options = results.get("options", {}).get(name, "")
    return f"{TABLES[name](results[name])}\n\n{options}Ours: {ours}. Theirs: {theirs}."

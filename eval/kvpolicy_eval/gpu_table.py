"""What `kvpolicy_eval.gpu` measured, as Markdown: throughput, memory, targets and what methods add."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpolicy_eval.markdown import table

Record = dict[str, Any]
Side = tuple[str, str, str]
"""Method, policy and mode."""

FASTER, LARGER = 2.5, 5.0
"""Targets at a fifth of the cache: throughput at the largest batch that both can run, and the largest batch."""


def report(records: list[Record]) -> str:
    """Every table, the newest record of a case counting."""
    newest = {str(record["case"]): record for record in records}
    every = list(newest.values())
    parts = [part for group in _groups(every) for part in _suite(group)]
    return "\n\n".join([*parts, _made_with(every)]) if every else "No results yet."


def _groups(records: list[Record]) -> list[list[Record]]:
    """Records that were measured alike, so that they may stand in one table."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        case = record["case"]
        names = ("suite", "shape", "prompt", "new", "device")
        found.setdefault((*(case[name] for name in names), case.get("limit", 0)), []).append(record)
    return list(found.values())


def _suite(records: list[Record]) -> list[str]:
    case = records[0]["case"]
    limit = f", {case['limit']:,} bytes of memory" if case.get("limit") else ""
    title = (
        f"**{case['shape']}, {case['prompt']:,} + {case['new']:,} tokens** ({case['suite']}, {case['device']}{limit})"
    )
    return [title, _throughput(records), *_targets(records), *_added(records), *_failures(records)]


def _side(record: Record) -> Side:
    case = record["case"]
    return case["method"], case["policy"], case["mode"]


def _name(side: Side) -> str:
    method, policy, mode = side
    if method == "policy":
        return f"`{policy}`, {mode}"
    return f"kvpress {policy}" if method == "kvpress" else f"stock {method}, {mode}"


def _sides(records: Iterable[Record]) -> dict[Side, dict[int, Record]]:
    found: dict[Side, dict[int, Record]] = {}
    for record in records:
        found.setdefault(_side(record), {})[record["case"]["batch"]] = record
    return found


def _ok(batches: dict[int, Record]) -> dict[int, Record]:
    return {batch: record for batch, record in sorted(batches.items()) if record["status"] == "ok"}


def _throughput(records: list[Record]) -> str:
    """Decoded tokens per second, peak memory and the largest batch."""
    sides = _sides(records)
    columns = sorted({record["case"]["batch"] for record in records})
    lines: list[list[str]] = []
    for side, batches in sides.items():
        cells = [_cell(batches.get(batch)) for batch in columns]
        lines.append([_name(side), *cells, str(max(_ok(batches), default="none"))])
    return table(["decoded tokens/s (peak GB) at batch", *map(str, columns), "largest batch"], lines)


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record["status"] == "ok":
        return f"{record['decode_tokens_per_s']:,.0f} ({record['peak_bytes'] / 1e9:.1f})"
    return str(record["status"])


def _best(sides: dict[Side, dict[int, Record]], batch: int) -> tuple[float, Side]:
    """The most tokens per second that any of the sides reaches at a batch."""
    return max((batches[batch]["decode_tokens_per_s"], side) for side, batches in sides.items() if batch in batches)


def _targets(records: list[Record]) -> list[str]:
    """Our best at a fifth of the cache against the best of the stock caches."""
    sides = {side: _ok(batches) for side, batches in _sides(records).items()}
    stock = {side: batches for side, batches in sides.items() if side[0] in ("dynamic", "static") and batches}
    ours = {side: batches for side, batches in sides.items() if "window" in side[1] and batches}
    if not stock or not ours:
        return []
    largest, most = ({s: max(b) for s, b in group.items()} for group in (stock, ours))
    common = {batch for b in stock.values() for batch in b} & {batch for b in ours.values() for batch in b}
    lines: list[list[str]] = []
    if common:
        batch = max(common)
        (before, their), (after, own) = _best(stock, batch), _best(ours, batch)
        what = f"decoded tokens/s at batch {batch}: {_name(own)} over {_name(their)}"
        lines.append(_line(what, after / before, FASTER))
    their, own = max(largest, key=lambda s: largest[s]), max(most, key=lambda s: most[s])
    what = f"largest batch: {_name(own)} ({most[own]}) over {_name(their)} ({largest[their]})"
    lines.append(_line(what, most[own] / largest[their], LARGER))
    return [table(["target at a budget of 20%", "measured", "bar", ""], lines)]


def _line(what: str, value: float, bar: float) -> list[str]:
    return [what, f"{value:.2f}x", f">= {bar}x", "pass" if value >= bar else "miss"]


def _added(records: list[Record]) -> list[str]:
    """Prefill and step time of KVCrush over its base, and of codecs over the stock cache, at each batch."""
    sides = {side: _ok(batches) for side, batches in _sides(records).items()}
    lines: list[list[str]] = []
    for side, batches in sides.items():
        method, policy, mode = side
        if method != "policy" or not any(name in policy for name in ("kvcrush", "kivi", "csr")):
            continue
        base: Side = ("static", "", "graphs") if mode == "graphs" else ("dynamic", "", "eager")
        if "kvcrush" in policy:
            base = (method, policy.replace("kvcrush/", ""), mode)
        for batch, record in batches.items():
            other = sides.get(base, {}).get(batch)
            if other is not None:
                ratios = (record[key] / other[key] for key in ("prefill_s", "step_ms", "kv_bytes"))
                lines.append([_name(side), _name(base), str(batch), *(f"{ratio:.3f}x" for ratio in ratios)])
    return [table(["method", "over", "batch", "prefill time", "step time", "KV bytes"], lines)] if lines else []


def _failures(records: list[Record]) -> list[str]:
    failed = [record for record in records if record["status"] not in ("ok", "out of memory")]
    lines = [
        f"- {_name(_side(record))}, batch {record['case']['batch']}: {record['status']}, {record['error']}"
        for record in failed
    ]
    return ["\n".join(lines)] if lines else []


def _made_with(records: list[Record]) -> str:
    made = [record for record in records if "versions" in record]
    dates = sorted(record["date"][:10] for record in made) or ["never"]
    found = {name: str(version) for record in made for name, version in record["versions"].items()}
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    cards = ", ".join(sorted({record["card"] for record in made}))
    return f"{cards}; {names}; {dates[0]} to {dates[-1]}. Random weights in bf16."

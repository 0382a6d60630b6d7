"""Results of `kvpolicy_eval.gpu` as Markdown: throughput, memory, targets, and the overhead of methods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.gpu import reads
from kvpolicy_eval.gpu.results import Record, case_key

Method = tuple[str, str, str]
"""Method, policy and mode of a case."""
ByBatch = dict[int, Record]
"""Records of one method by batch size."""

THROUGHPUT_TARGET = 2.5
"""Throughput over the stock caches' at a fifth of the cache, at the largest batch that both can run."""
BATCH_TARGET = 5.0
"""Largest batch over the stock caches', at a fifth of the cache."""


def report(records: list[Record]) -> str:
    """All tables; of several records of one case the newest counts."""
    newest = list({case_key(record["case"]): record for record in records}.values())
    of_reads = [record for record in newest if record["case"]["suite"] == reads.SUITE]
    of_models = [record for record in newest if record["case"]["suite"] != reads.SUITE]
    parts = [*(part for group in _groups(of_models) for part in _suite(group)), *reads.report(of_reads)]
    return "\n\n".join([*parts, _made_with(newest)]) if newest else "No results yet."


def _groups(records: list[Record]) -> list[list[Record]]:
    """Records that are comparable, so that they share a table."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        case = record["case"]
        names = ("suite", "shape", "prompt", "new", "device")
        groups.setdefault((*(case[name] for name in names), case.get("limit", 0)), []).append(record)
    return list(groups.values())


def _suite(records: list[Record]) -> list[str]:
    case = records[0]["case"]
    limit = f", {case['limit']:,} bytes of memory" if case.get("limit") else ""
    tokens = f"{case['prompt']:,} + {case['new']:,} tokens"
    title = f"**{case['shape']}, {tokens}** ({case['suite']}, {case['device']}{limit})"
    return [
        title,
        _throughput(records),
        *_peaks(records),
        *_targets(records),
        *_overheads(records),
        *_failures(records),
    ]


def _method(record: Record) -> Method:
    case = record["case"]
    return case["method"], case["policy"], case["mode"]


def _name(key: Method) -> str:
    method, policy, mode = key
    if method == "policy":
        return f"`{policy}`, {mode}"
    return f"kvpress {policy}" if method == "kvpress" else f"stock {method}, {mode}"


def _by_method(records: Iterable[Record]) -> dict[Method, ByBatch]:
    methods: dict[Method, ByBatch] = {}
    for record in records:
        methods.setdefault(_method(record), {})[record["case"]["batch"]] = record
    return methods


def _successful(batches: ByBatch) -> ByBatch:
    return {batch: record for batch, record in sorted(batches.items()) if record["status"] == "ok"}


def _throughput(records: list[Record]) -> str:
    """Decoded tokens per second, peak memory and the largest batch."""
    columns = sorted({record["case"]["batch"] for record in records})
    lines: list[list[str]] = []
    for key, batches in _by_method(records).items():
        cells = [_cell(batches.get(batch)) for batch in columns]
        lines.append([_name(key), *cells, str(max(_successful(batches), default="none"))])
    return table(["decoded tokens/s (peak GiB) at batch", *map(str, columns), "largest batch"], lines)


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record["status"] == "ok":
        return f"{record['decode_tokens_per_s']:,.0f} ({record['peak_bytes'] / 2**30:.1f})"
    return str(record["status"])


def _fastest(methods: dict[Method, ByBatch], batch: int) -> tuple[float, Method]:
    """The highest throughput at a batch size, and the method that reaches it."""
    return max((batches[batch]["decode_tokens_per_s"], key) for key, batches in methods.items() if batch in batches)


def _targets(records: list[Record]) -> list[str]:
    """Our best method at a fifth of the cache against the best stock cache."""
    methods = {key: _successful(batches) for key, batches in _by_method(records).items()}
    stock = {key: batches for key, batches in methods.items() if key[0] in ("dynamic", "static") and batches}
    ours = {key: batches for key, batches in methods.items() if "window" in key[1] and batches}
    if not stock or not ours:
        return []
    lines: list[list[str]] = []
    stock_sizes = {batch for batches in stock.values() for batch in batches}
    common_sizes = stock_sizes & {batch for batches in ours.values() for batch in batches}
    if common_sizes:
        batch = max(common_sizes)
        stock_rate, stock_key = _fastest(stock, batch)
        our_rate, our_key = _fastest(ours, batch)
        text = f"decoded tokens/s at batch {batch}: {_name(our_key)} over {_name(stock_key)}"
        lines.append(_target_row(text, our_rate / stock_rate, THROUGHPUT_TARGET))
    stock_key = max(stock, key=lambda key: max(stock[key]))
    our_key = max(ours, key=lambda key: max(ours[key]))
    stock_batch = max(stock[stock_key])
    our_batch = max(ours[our_key])
    text = f"largest batch: {_name(our_key)} ({our_batch}) over {_name(stock_key)} ({stock_batch})"
    lines.append(_target_row(text, our_batch / stock_batch, BATCH_TARGET))
    return [table(["target at a budget of 20%", "measured", "goal", ""], lines)]


def _target_row(text: str, value: float, target: float) -> list[str]:
    return [text, f"{value:.2f}x", f">= {target}x", "pass" if value >= target else "miss"]


def _overheads(records: list[Record]) -> list[str]:
    """Prefill and step time of KVCrush over its base, and of codecs over the stock cache, at each batch size."""
    methods = {key: _successful(batches) for key, batches in _by_method(records).items()}
    lines: list[list[str]] = []
    for key, batches in methods.items():
        method, policy, mode = key
        if method != "policy" or not any(name in policy for name in ("kvcrush", "kivi", "csr", "tokenwise")):
            continue
        base: Method = ("static", "", "graphs") if mode == "graphs" else ("dynamic", "", "eager")
        if "kvcrush" in policy:
            base = (method, policy.replace("kvcrush/", ""), mode)
        for batch, record in batches.items():
            other = methods.get(base, {}).get(batch)
            if other is not None:
                ratios = (record[name] / other[name] for name in ("prefill_s", "step_ms", "kv_bytes"))
                lines.append([_name(key), _name(base), str(batch), *(f"{ratio:.3f}x" for ratio in ratios)])
    return [table(["method", "over", "batch", "prefill time", "step time", "KV bytes"], lines)] if lines else []


def _peaks(records: list[Record]) -> list[str]:
    """Measured peaks of prompts in tiles over the planned ones."""
    lines: list[list[str]] = []
    for record in records:
        if record["status"] == "ok" and "planned_bytes" in record:
            measured = record["peak_bytes"]
            planned = record["planned_bytes"]
            gib = (f"{size / 2**30:.2f}" for size in (measured, planned))
            tile = f"{record['case']['tile']:,}"
            lines.append([_name(_method(record)), tile, *gib, f"{measured / planned:.3f}x"])
    return [table(["method", "tile", "peak, GiB", "planned, GiB", "measured over planned"], lines)] if lines else []


def _failures(records: list[Record]) -> list[str]:
    failed = [record for record in records if record["status"] not in ("ok", "out of memory")]
    lines = [
        f"- {_name(_method(record))}, batch {record['case']['batch']}: {record['status']}, {record['error']}"
        for record in failed
    ]
    return ["\n".join(lines)] if lines else []


def _made_with(records: list[Record]) -> str:
    """GPUs, versions and dates of the results."""
    made = [record for record in records if "versions" in record]
    dates = sorted(record["date"][:10] for record in made) or ["never"]
    versions = {name: str(version) for record in made for name, version in record["versions"].items()}
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    gpus = ", ".join(sorted({record["card"] for record in made}))
    return f"{gpus}; {names}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Random weights in bf16."

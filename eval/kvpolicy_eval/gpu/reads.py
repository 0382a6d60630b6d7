"""Time of one layer of a decode step to read its codes, beside dense keys and values and the memory.

A read is one score of every query against every coded token and one weighted sum of all of them. On a GPU it is
recorded as a CUDA graph and replayed, so that the time is that of the device and not of Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.state import tensors
from kvpolicy.kernels import compiled
from kvpolicy_eval.bench.codecs import Case, Dense
from kvpolicy_eval.common.markdown import table
from kvpolicy_eval.gpu.case import card, versions
from kvpolicy_eval.gpu.results import Record

SUITE = "reads"
HEADS = 8
"""KV heads of 128 channels."""
GROUP = 4
"""Query heads per KV head."""
SHAPES = {"tiny": ((2, 2048),)}
"""Rows, and tokens of each row, by name of the model's shape."""
LARGE = ((16, 8192), (1, 131072))
"""The same for real shapes: a batch, and one long prompt. The codes of either exceed the caches of a GPU."""
CODECS = (
    "tokenwise",
    "tokenwise:bits=8",
    "tokenwise:bits=2",
    "kivi:bits=4",
    "kivi:bits=2",
    "zipcache",
    "mikv",
    "bfp",
    "staircase",
    "turboquant:bits=4",
    "gear",
    "kvquant:bits=4",
    "rotate:bits=4",
    "csr:nnz=8",
)
WAYS = ("fused", "decoded")
"""Compiled functions that read codes, and codes that are decoded by chunks before they are read."""
ROUNDS = 20


def cases(device: str, shape: str, codecs: tuple[str, ...] = ()) -> list[Record]:
    """The arguments of all measurements, the dense ones first.

    Args:
        device: Such as `cuda`.
        shape: Name of the model's shape, or `all`.
        codecs: Specs of codecs; those of `CODECS` by default.
    """
    sides = [("", "bf16"), ("", "fp32"), *((codec, way) for codec in codecs or CODECS for way in WAYS)]
    return [
        {"suite": SUITE, "device": device, "codec": codec, "way": way, "batch": batch, "tokens": tokens}
        for batch, tokens in SHAPES.get(shape, LARGE)
        for codec, way in sides
    ]


def measure(case: Record) -> Record:
    """The result of one case; an error is a result, too."""
    try:
        with TemporaryDirectory() as folder, torch.inference_mode():
            result: Record = {"status": "ok", **_measure(case, Path(folder))}
    except Exception as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
    return {**result, "card": card(case["device"]), "versions": versions()}


def _measure(case: Record, folder: Path) -> Record:
    device = case["device"]
    codec = case["codec"] or CODECS[0]
    with compiled.switched(False):  # how codes are made does not matter here
        layer = Case(codec, case["tokens"], folder, device, GROUP, case["batch"], HEADS)
    if case["codec"]:
        nbytes = sum(t.nbytes for t in tensors(layer.layer.tensors.codes))
        del layer.keys, layer.values
        with compiled.switched(case["way"] == "fused"):
            return {**_times(layer, device), "nbytes": nbytes, "bytes_per_s": _bandwidth(device)}
    dense = Dense(layer, torch.bfloat16 if case["way"] == "bf16" else torch.float32)
    nbytes = dense.keys.nbytes + dense.values.nbytes
    return {**_times(dense, device), "nbytes": nbytes, "bytes_per_s": _bandwidth(device)}


def _times(side: Case | Dense, device: str) -> dict[str, float]:
    return {f"{name}_s": seconds(getattr(side, name), device) for name in ("score", "mix")}


def seconds(run: Callable[[], Any], device: str) -> float:
    """Median seconds of `run`, without the time that the host takes to start its kernels on a GPU."""
    for _ in range(3):
        run()
    if not device.startswith("cuda"):
        return _median(run, ROUNDS, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return _median(graph.replay, ROUNDS, device)


def _median(run: Callable[[], Any], rounds: int, device: str) -> float:
    times: list[float] = []
    for _ in range(rounds):
        if device.startswith("cuda"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _bandwidth(device: str) -> float:
    """Bytes per second of a copy within the memory, read and written."""
    source = torch.ones(1 << (30 if device.startswith("cuda") else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    return 2 * source.nbytes / _median(copy, ROUNDS, device)


def report(records: list[Record]) -> list[str]:
    """One table for each shape."""
    shapes = {(record["case"]["batch"], record["case"]["tokens"]): None for record in records}
    return [part for batch, tokens in shapes for part in _shape(records, batch, tokens)]


def _shape(records: list[Record], batch: int, tokens: int) -> list[str]:
    own = [record for record in records if (record["case"]["batch"], record["case"]["tokens"]) == (batch, tokens)]
    found = {(record["case"]["codec"], record["case"]["way"]): record for record in own if record["status"] == "ok"}
    order = [("", "bf16"), ("", "fp32"), *((codec, WAYS[0]) for codec in CODECS)]
    lines = [_row(key, found[key], found) for key in order if key in found]
    title = f"**One layer, {batch} x {tokens:,} tokens**: {HEADS} KV heads of 128, {GROUP} query heads each"
    columns = ["codes", "MiB", "score, us", "mix, us", "over dense bf16", "over the bytes", "decoded, over dense bf16"]
    failed = [
        f"- `{record['case']['codec']}`, {record['case']['way']}: {record['error']}"
        for record in own
        if record["status"] != "ok"
    ]
    if not any(line[-1] for line in lines):  # codes were not timed decoded
        columns = columns[:-1]
        lines = [line[:-1] for line in lines]
    return [title, table(columns, lines), *(["\n".join(failed)] if failed else [])]


def _row(key: tuple[str, str], record: Record, found: dict[tuple[str, str], Record]) -> list[str]:
    """The row of a side, with the time of reading its codes decoded."""
    codec, way = key
    total = _total(record)
    dense = found.get(("", "bf16"))
    ratios = [
        f"{_total(other) / _total(dense):.2f}" if dense and other else ""
        for other in (record, found.get((codec, WAYS[1])))
    ]
    floor = record["nbytes"] / record["bytes_per_s"]
    times = (f"{1e6 * record[name]:.0f}" for name in ("score_s", "mix_s"))
    name = f"`{codec}`" if codec else f"dense {way}"
    return [name, f"{record['nbytes'] / 2**20:,.0f}", *times, ratios[0], f"{total / floor:.1f}", ratios[1]]


def _total(record: Record) -> float:
    return record["score_s"] + record["mix_s"]

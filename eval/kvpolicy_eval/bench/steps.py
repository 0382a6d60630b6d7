"""Times of a decode step, eager and compiled, beside the bytes that it reads.

The first table is of one layer with random tokens, at several numbers of slots. The second one is of an eager step of a
whole model, beside the stock model with a dynamic cache of the size that is kept.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy import Policy
from kvpolicy.codecs._files import save
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prompt_statistics import PromptStatistics
from kvpolicy.engine.row_limits import RowBudget
from kvpolicy.hf.layer import make_store
from kvpolicy.statistics import AttentionSum
from kvpolicy.statistics.statistic import first_of
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.tables import format_bytes
from kvpolicy_eval.bench import decode
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.timing import Ratio, Row, compare
from kvpolicy_eval.common.table import (
    Grid,
    Option,
    Section,
    Table,
    collect,
    rounds,
    threads,
    torch_note,
    without_equal,
)

HEADS = 8
DIM = 64
LAYERS = 4
SLOTS = (1024, 8192, 65536)
KEPT = (1024, 4096)
STEPS = 32
"""Steps of one measurement of a model, so that KIVI's share of demoted blocks is in each."""
LOW_RANK = "window+lowrank:rank=16"
"""A quarter of the channels. Its directions are random ones, which take the same time as calibrated ones."""
LAYER_POLICIES = ("window", "h2o", "snapkv", "window+kivi", "window+tokenwise:bits=4", LOW_RANK)
MODEL_LIMITS = {"window": 1.2, "snapkv": 1.2, "h2o": 1.4, "kvcrush": 1.4, "window+kivi": 1.8}
"""The largest time of an eager step over the stock model's that passes."""
GROUP_LIMITS = {"window+tokenwise:bits=4": 0.7, "window+kivi:bits=4": 0.7}
"""The same where several query heads share a KV head, at 16,384 tokens."""
GROWTH = (8192, 1024, 10)
"""Slots, fewer slots, and the largest ratio of the compiled times that passes."""
LAYER_COLUMNS = [
    "policy",
    "slots",
    "bytes",
    "eager, ms",
    "compiled, ms",
    "compiled over eager",
    "time over bytes",
    "verdict",
]
MODEL_COLUMNS = ["policy", "slots", "step, stock, ms", "step, ours, ms", "ratio, median (quartiles)", "target"]

Run = Callable[[], object]


class LayerTimes(NamedTuple):
    """Times of one layer's step.

    Attributes:
        policy: Spec without the budget.
        slots: The budget.
        nbytes: Bytes of the layer, all of which a step reads.
        eager: Seconds of an eager step.
        compiled: Seconds of a compiled step.
    """

    policy: str
    slots: int
    nbytes: int
    eager: float
    compiled: float

    def misses(self, smallest: LayerTimes, others: Sequence[LayerTimes]) -> list[str]:
        """The targets that are not met."""
        found: list[str] = []
        if self.compiled > self.eager:
            found.append("slower than eager")
        if self.compiled / smallest.compiled > self.nbytes / smallest.nbytes:
            found.append("grows faster than bytes")
        slots, fewer, most = GROWTH
        base = [other for other in others if other.slots == fewer]
        if self.slots == slots and base and self.compiled > most * base[0].compiled:
            found.append(f"more than {most} times {fewer:,} slots")
        return found


class Layer:
    """One layer with a full budget, and its steps.

    Args:
        policy: Spec without the budget.
        slots: The budget.
        backend: Of `torch.compile`.
        prompt: Tokens of the prompt; as many as the budget by default.
    """

    def __init__(self, policy: str, slots: int, backend: str, prompt: int | None = None) -> None:
        """Fill the layer."""
        self.store = full_store(policy, slots, prompt)
        generator = torch.Generator().manual_seed(1)
        self._q, self._k, self._v = (torch.randn(1, HEADS, 1, DIM, generator=generator) for _ in range(3))
        self._transform = ScoreTransform(DIM**-0.5)
        self._compiled: Any = torch.compile(type(self.store).append, backend=backend, fullgraph=True, dynamic=False)

    def eager(self) -> None:
        """One eager step."""
        self.store.append(self._q, self._k, self._v, None, self._transform)

    def compiled(self) -> None:
        """One compiled step."""
        self._compiled(self.store, self._q, self._k, self._v, None, self._transform)


def full_store(policy: str, slots: int, prompt: int | None = None) -> LayerStore:
    """A layer whose budget is full; the statistics of its prompt are random, since computing them would take long.

    Args:
        policy: Spec without the budget; its layer allocator does not matter.
        slots: The budget.
        prompt: Tokens of the prompt; as many as the budget by default.
    """
    count = prompt or slots
    calibrated = f"{policy}:calibration={_directions()}" if policy == LOW_RANK else policy
    parts = Policy.parse(f"{calibrated}@{slots}")
    projection = torch.randn(HEADS * DIM, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    store = make_store(parts, 0, projection=lambda: projection)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, count, DIM, generator=generator) for _ in range(3))
    sums = first_of(AttentionSum, parts.selector.statistics)
    # The larger the power, the fewer tokens have much of a head's attention: heads differ.
    powers = torch.arange(1, HEADS + 1).view(1, HEADS, 1)
    attn_sum = torch.rand(1, HEADS, count, generator=generator) ** powers if sums else None
    budget = torch.tensor([slots])
    with torch.inference_mode(False), torch.no_grad():
        store.initialize(k)
        seen = PromptStatistics(store.contents, None, count)
        seen.add(q, k, 0)
        pending = seen.prompt(k, v, ScoreTransform(DIM**-0.5), None, attn_sum)
        store.tensors.columns.add_(count)
        store.compress(pending, RowBudget(budget, torch.zeros_like(budget), budget, torch.tensor([2 * count])))
    return store


@cache
def _directions() -> str:
    """The folder of a calibration of `lowrank` with random directions."""
    generator = torch.Generator().manual_seed(2)
    found: dict[str, Tensor] = {}
    for part in ("keys.pre", "keys.post", "values", "queries"):
        found[f"{part}.basis.0"] = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=generator)).Q.half()
        found[f"{part}.energy.0"] = torch.ones(HEADS, DIM)
        if part != "queries":
            found[f"{part}.mean.0"] = torch.zeros(HEADS, DIM)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save(folder, "lowrank", {"model": None, "head_dim": DIM}, found)
    return folder


def measure_layer(policy: str, sizes: Sequence[int], rounds: int, backend: str) -> list[LayerTimes]:
    """Time the steps of a layer at all sizes, in turn; nothing but the step is timed."""
    torch.compiler.reset()
    layers = [Layer(policy, slots, backend) for slots in sizes]
    times: list[dict[str, list[float]]] = [{"eager": [], "compiled": []} for _ in layers]
    with torch.no_grad():
        for number in range(rounds + 1):  # round 0 compiles
            for layer, own in zip(layers, times, strict=True):
                names = list(own)
                for name in names if number % 2 else reversed(names):
                    seconds = _second_call(getattr(layer, name), layer.store)
                    if number:
                        own[name].append(seconds)
    rows: list[LayerTimes] = []
    for layer, slots, own in zip(layers, sizes, times, strict=True):
        eager, compiled = (statistics.median(own[name]) for name in ("eager", "compiled"))
        rows.append(LayerTimes(policy, slots, layer.store.nbytes, eager, compiled))
    return rows


def _second_call(run: Run, store: LayerStore) -> float:
    """Seconds of the second of two calls: the first brings to the caches of the processor what fits there."""
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        store.count_step()  # demotes a block, if one is due
    return seconds


def layer_lines(policies: Sequence[str], sizes: Sequence[int], rounds: int, backend: str) -> Iterator[list[str]]:
    """Rows of the first table."""
    for policy in policies:
        rows = measure_layer(policy, sizes, rounds, backend)
        first = rows[0]
        for row in rows:
            more = row.nbytes / first.nbytes
            yield [
                f"`{row.policy}`",
                f"{row.slots:,}",
                format_bytes(row.nbytes),
                f"{1000 * row.eager:.3f}",
                f"{1000 * row.compiled:.3f}",
                f"{row.compiled / row.eager:.2f}x",
                f"{row.compiled / first.compiled / more:.2f}x",
                "; ".join(row.misses(first, rows)) or "pass",
            ]


def measure_model(policy: str, kept: int, rounds: int, steps: int = STEPS, kv_heads: int = HEADS) -> Ratio:
    """Time eager steps of a model with `kept` tokens, and of the stock model with a cache of that size."""
    stock, model = (llama(LAYERS, HEADS * DIM, HEADS, kv_heads=kv_heads) for _ in range(2))
    token = tokens(1)
    start = kept - steps // 2  # so that the stock cache has `kept` tokens on average
    stock_cache = DynamicCache(config=stock.config)
    for layer in range(LAYERS):
        stock_cache.update(torch.randn(1, kv_heads, start, DIM), torch.randn(1, kv_heads, start, DIM), layer)

    def run_stock() -> None:
        decode.steps(stock, token, stock_cache, steps)
        stock_cache.crop(-steps)

    with torch.inference_mode(), kvpolicy.attach(model, f"{policy}@{kept}"):
        cache = decode.filled(model, kept + steps)
        ratio = compare(run_stock, lambda: decode.steps(model, token, cache, steps), rounds)
    return ratio._replace(base=ratio.base / steps, ours=ratio.ours / steps)


def model_lines(args: argparse.Namespace, rounds: int) -> Iterator[list[str]]:
    """Rows of the second table."""
    for kept in (256,) if args.quick else args.kept:
        for policy in args.policies or MODEL_LIMITS:
            ratio = measure_model(policy, kept, rounds, 2 if args.quick else STEPS, args.kv_heads)
            limit = MODEL_LIMITS.get(policy) if args.kv_heads == HEADS else GROUP_LIMITS.get(policy)
            bar = Row("", policy, ratio, limit).judged
            milliseconds = [f"{1000 * ratio.base:.2f}", f"{1000 * ratio.ours:.2f}"]
            yield [f"`{policy}`", f"{kept:,}", *milliseconds, str(ratio), bar]


def measure(args: argparse.Namespace) -> Iterator[Section]:
    """The table of a layer, and that of a model."""
    repeats = 2 if args.quick else args.rounds
    if args.only != "model":
        sizes = (256, 512) if args.quick else SLOTS
        rows = collect(layer_lines(args.policies or LAYER_POLICIES, sizes, repeats, args.backend))
        grid, equal = without_equal(Grid(LAYER_COLUMNS, rows))
        yield Section("steps-layer", [grid], f"{equal}{torch_note()}.")
    if args.only != "layer":
        rows = collect(model_lines(args, repeats))
        heads = f"{HEADS} query heads, {args.kv_heads} KV heads"
        note = f"A Llama of {LAYERS} layers, hidden size {HEADS * DIM}, {heads}, fp32, eager; {torch_note()}."
        place = "steps-model" if args.kv_heads == HEADS else "steps-groups"
        yield Section(place, [Grid(MODEL_COLUMNS, rows)], note)


TABLE = Table(
    measure=measure,
    places={name: ["docs/benchmarks.md"] for name in ("steps-layer", "steps-model", "steps-groups")},
    options=[
        Option("--only", choices=["layer", "model"], help="measure one table"),
        Option("--policies", nargs="+", help="specs without a budget; those of the tables by default"),
        Option("--kept", nargs="+", type=int, default=KEPT, help="tokens that the model keeps"),
        Option("--kv-heads", type=int, default=HEADS, help="KV heads of the model; fewer fill a table of their own"),
        Option("--quick", action="store_true", help="few slots and rounds, to see that it runs"),
        rounds(15),
        Option("--backend", default="inductor", help="of torch.compile"),
        threads(),
    ],
)

"""Overhead of KVCrush over its base: of a whole generation, and of its code alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import kvpolicy
from kvpolicy.selectors.kvcrush import KVCrush
from kvpolicy_eval.bench.floor import Work, decode_work, prefill_work
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.timing import Ratio, Row, compare

LAYERS = 4
SIZES = ((512, 8, 30), (1024, 16, 12))
"""Hidden size, heads and rounds.

The overhead scales with the number of heads, the rest of the model with its width, so the relative overhead falls.
"""

LIMIT = 1.005
"""Ratio that the paper claims."""


def measure(length: int = 2048, new: int = 128) -> Iterator[Row]:
    """Time `generate` with SnapKV alone and with KVCrush over it."""
    for hidden, heads, rounds in SIZES:
        yield from _at_size(hidden, heads, rounds, length, new)


def _at_size(hidden: int, heads: int, rounds: int, length: int, new: int) -> Iterator[Row]:
    base = llama(LAYERS, hidden, heads)
    crushed = llama(LAYERS, hidden, heads)
    ids = tokens(length)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with kvpolicy.attach(base, "snapkv@0.2"), kvpolicy.attach(crushed, "kvcrush/snapkv@0.2"):
        ratio = compare(lambda: base.generate(ids, **options), lambda: crushed.generate(ids, **options), rounds)
        what = f"generate {length} + {new}, hidden {hidden}"
        yield Row(
            what,
            "kvcrush over snapkv",
            ratio,
            LIMIT,
            base_work=_work(base, length, new),
            work=_work(crushed, length, new),
        )
        overhead = statistics.median(_seconds_in_kvcrush(lambda: crushed.generate(ids, **options)) for _ in range(5))
        relative = 1 + overhead / ratio.base
        yield Row(what, "time in KVCrush's own code", Ratio(relative, relative, relative, ratio.base, overhead), LIMIT)


def _work(model: Any, length: int, new: int) -> Work:
    """Work of a prompt and the steps after it at a budget of a fifth; KVCrush must read no more than its base."""
    config = model.config
    plan = kvpolicy.plan(config, "snapkv@0.2", prompt=length, new=new)
    kept = 2 * config.hidden_size * sum(layer.tokens for layer in plan.layers)
    return prefill_work(model, length) + decode_work(model, plan.nbytes, kept).times(new - 1)


def _seconds_in_kvcrush(run: Any) -> float:
    """Seconds in KVCrush's methods during `run`, minus the seconds of the base's methods that they call."""
    seconds = 0.0
    marks = KVCrush._marks  # pyright: ignore[reportPrivateUsage]
    priority = KVCrush.priority

    def timed(method: Any, base: Any = None) -> Any:
        def call(self: KVCrush, *args: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            result = method(self, *args)
            seconds += time.perf_counter() - start
            if base is not None:  # call the base's method again to measure what it takes alone
                start = time.perf_counter()
                base(self, *args)
                seconds -= time.perf_counter() - start
            return result

        return call

    def base_priority(self: KVCrush, state: Any, view: Any) -> None:
        self.base.priority(state.base, view)

    with (
        mock.patch.object(KVCrush, "_marks", timed(marks)),
        mock.patch.object(KVCrush, "priority", timed(priority, base_priority)),
    ):
        run()
    return seconds

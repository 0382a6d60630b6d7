"""What KVCrush adds to its base: a whole generation, and the time spent in its own code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import kvpolicy
from kvpolicy.selectors.kvcrush import KVCrush
from kvpolicy_eval.bench.common import Ratio, Row, compare, llama, tokens
from kvpolicy_eval.bench.floor import Work, decode_work, prefill_work

SIZES = ((512, 8, 30), (1024, 16, 12))
"""Hidden size, heads and rounds: KVCrush's own work grows with the heads, its share falls with the weights."""

MOST = 1.005
"""The bar: what the paper claims."""


def measure(length: int = 2048, new: int = 128) -> Iterator[Row]:
    """Time `generate` with SnapKV alone and with KVCrush over it, in turn."""
    for hidden, heads, rounds in SIZES:
        yield from _at_size(hidden, heads, rounds, length, new)


def _at_size(hidden: int, heads: int, rounds: int, length: int, new: int) -> Iterator[Row]:
    base, crushed = llama(4, hidden, heads), llama(4, hidden, heads)
    ids = tokens(length)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with kvpolicy.attach(base, "snapkv@0.2"), kvpolicy.attach(crushed, "kvcrush/snapkv@0.2"):
        ratio = compare(lambda: base.generate(ids, **options), lambda: crushed.generate(ids, **options), rounds)
        works = (_work(base, length, new), _work(crushed, length, new))
        what = f"generate {length} + {new}, hidden {hidden}"
        yield Row(what, "kvcrush over snapkv", ratio, MOST, *works)
        own = statistics.median(_inside(lambda: crushed.generate(ids, **options)) for _ in range(5))
        added = 1 + own / ratio.theirs
        alone = Ratio(added, added, added, ratio.theirs, own)
        yield Row(what, "time in KVCrush's own code", alone, MOST)


def _work(model: Any, length: int, new: int) -> Work:
    """A prompt and the steps after it, at a budget of a fifth; KVCrush must read nothing that its base does not."""
    plan, config = kvpolicy.plan(model.config, "snapkv@0.2", prompt=length, new=new), model.config
    kept = 2 * config.hidden_size * sum(layer.tokens for layer in plan.layers)
    return prefill_work(model, length) + decode_work(model, plan.nbytes, kept).times(new - 1)


def _inside(run: Any) -> float:
    """Seconds in what KVCrush does beyond its base: choosing, and masking priorities."""
    spent = 0.0
    marks, priority = KVCrush._marks, KVCrush.priority  # pyright: ignore[reportPrivateUsage]

    def timed(fn: Any, base: Any = None) -> Any:
        def call(self: KVCrush, *args: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = fn(self, *args)
            spent += time.perf_counter() - start
            if base is not None:  # what the base alone would have taken is not ours
                start = time.perf_counter()
                base(self, *args)
                spent -= time.perf_counter() - start
            return result

        return call

    def inner(self: KVCrush, state: Any, view: Any) -> None:
        self.base.priority(state.base, view)

    with (
        mock.patch.object(KVCrush, "_marks", timed(marks)),
        mock.patch.object(KVCrush, "priority", timed(priority, inner)),
    ):
        run()
    return spent

"""Peak bytes of keys and values during a prefill, over the full cache's.

An allocator that measures layers must see all of them before it can divide the budget, unless a profile measured them
before. While they run, layers drop what no division to come can give them, as far as this is known.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

import kvpolicy
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.common.table import Grid, Section, Table

LAYERS = 16
WIDTH = 128
PROMPT = 2048
BUDGET = 0.2
ALLOCATORS = ("uniform", "squeeze", "zigzag", "cake", "d2olayers", "lava", "mass", "simlayer", "dynamickv")
SELECTORS = ("streaming", "snapkv", "kvcrush/snapkv")


def peak(model: Any, policy: str, ids: Tensor) -> tuple[int, int]:
    """Peak bytes after any layer's attention, and bytes after the prefill.

    Args:
        model: A model.
        policy: Spec of a policy.
        ids: Token ids of the prompt.
    """
    peak_bytes = 0
    attend = kvpolicy.PolicyCache.attend

    def watched(self: kvpolicy.PolicyCache, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        nonlocal peak_bytes
        out = attend(self, layer_idx, q, k, v, *rest)
        # Keys and values of this layer are alive too; if the layer holds all of them, the cache counts them.
        pending = self.policy_layers[layer_idx].pending
        is_counted = pending is not None and pending.keys.shape[2] == k.shape[2]
        prompt_bytes = 0 if is_counted else k.nbytes + v.nbytes
        peak_bytes = max(peak_bytes, self.nbytes + prompt_bytes)
        return out

    with mock.patch.object(kvpolicy.PolicyCache, "attend", watched):
        cache = run(model, policy, [ids]).cache
    return peak_bytes, cache.nbytes


def measure(_: argparse.Namespace) -> Iterator[Section]:
    """The table."""
    model = llama(layers=LAYERS, hidden=WIDTH)
    ids = tokens(PROMPT)
    full_bytes = 2 * LAYERS * PROMPT * WIDTH * 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        kvpolicy.profile(model, [ids], path)
        allocators = {name: name for name in ALLOCATORS} | {"squeeze, from a profile": f"squeeze:profile={path}"}
        measured = {
            (name, selector): peak(model, f"{allocator}+{selector}@{BUDGET}", ids)
            for name, allocator in allocators.items()
            for selector in SELECTORS
        }
    rows = [
        [name, *(f"{measured[name, selector][0] / full_bytes:.2f}" for selector in SELECTORS)] for name in allocators
    ]
    after = max(end for _, end in measured.values()) / full_bytes
    columns = ["allocator", *(f"peak over `{selector}@{BUDGET}`" for selector in SELECTORS)]
    yield Section("peak", [Grid(columns, rows)], f"After the prefill, every cache holds at most {after:.2f}.")


TABLE = Table(measure=measure, places={"peak": []})

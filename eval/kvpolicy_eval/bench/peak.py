"""`python -m kvpolicy_eval.bench.peak`: peak bytes of keys and values during a prefill, over the full cache's.

SqueezeAttention must see every layer before it can divide the budget, unless a profile measured the layers before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kvpolicy
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.common.markdown import add_fill_argument, publish, table

LAYERS = 16
WIDTH = 128
PROMPT = 1024


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
        # Keys and values of this layer are alive too; if the layer stores them until later, the cache counts them.
        layer: Any = self.layers[layer_idx]
        prompt_bytes = 0 if layer.pending is not None else k.nbytes + v.nbytes
        peak_bytes = max(peak_bytes, cache.nbytes + prompt_bytes)
        return out

    with (
        mock.patch.object(kvpolicy.PolicyCache, "attend", watched),
        torch.inference_mode(),
        kvpolicy.attach(model, policy),
    ):
        cache = kvpolicy.PolicyCache(model)
        model(ids, past_key_values=cache, logits_to_keep=1)
    return peak_bytes, cache.nbytes


def main() -> None:
    """Print the table, and fill a page with it on request."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.peak", description=__doc__)
    add_fill_argument(parser, "peak")
    args = parser.parse_args()
    model = llama(layers=LAYERS, hidden=WIDTH)
    ids = tokens(PROMPT)
    full_bytes = 2 * LAYERS * PROMPT * WIDTH * 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        kvpolicy.profile(model, [ids], path)
        policies = {
            "uniform": "snapkv@0.2",
            "squeeze, measured in the prompt": "squeeze+snapkv@0.2",
            "squeeze, from a profile": f"squeeze:profile={path}+snapkv@0.2",
        }
        measured = {name: peak(model, policy, ids) for name, policy in policies.items()}
    rows = [[name, f"{most / full_bytes:.2f}", f"{end / full_bytes:.2f}"] for name, (most, end) in measured.items()]
    publish(table(["allocator, over `snapkv@0.2`", "peak of the prefill", "after it"], rows), "peak", args.fill)


if __name__ == "__main__":
    main()

"""`python -m kvpolicy_eval.bench.peak`: the most bytes of keys and values alive in a prefill, of the full cache's.

SqueezeAttention has to see every layer before it can divide the budget, unless a profile did so before.
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
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy_eval.bench.common import llama, tokens
from kvpolicy_eval.markdown import fill, table


def peak(model: Any, policy: str, ids: Tensor) -> tuple[int, int]:
    """Most bytes alive after any layer's attention (its own prompt, and what the cache holds), and bytes in the end."""
    most = 0
    forward = PolicyLayer.forward

    def watched(self: PolicyLayer, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        nonlocal most
        out = forward(self, q, k, v, *rest)
        own = 0 if self.prompt is not None else k.nbytes + v.nbytes  # a prompt that waits is counted by the cache
        most = max(most, cache.nbytes + own)
        return out

    with mock.patch.object(PolicyLayer, "forward", watched), torch.inference_mode(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        model(ids, past_key_values=cache, logits_to_keep=1)
    return most, cache.nbytes


def main() -> None:
    """Print the table, and fill a page with it where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.bench.peak", description=__doc__)
    parser.add_argument("--fill", type=Path, help="a page with a place for the table 'peak'")
    args = parser.parse_args()
    model, ids = llama(layers=16, hidden=128), tokens(1024)
    full = 2 * 16 * 1024 * 128 * 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        kvpolicy.profile(model, [ids], path)
        words = {
            "uniform": "snapkv@0.2",
            "squeeze, measured in the prompt": "squeeze+snapkv@0.2",
            "squeeze, from a profile": f"squeeze:profile={path}+snapkv@0.2",
        }
        measured = {name: peak(model, policy, ids) for name, policy in words.items()}
    rows = [[name, f"{most / full:.2f}", f"{end / full:.2f}"] for name, (most, end) in measured.items()]
    text = table(["allocator, over `snapkv@0.2`", "peak of the prefill", "after it"], rows)
    print(text)
    if args.fill:
        fill(args.fill, "peak", text)


if __name__ == "__main__":
    main()

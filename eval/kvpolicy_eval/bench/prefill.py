"""Prefill time under a policy against plain SDPA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import kvpolicy
from kvpolicy_eval.bench.common import Ratio, compare, llama

POLICIES = {
    "window@0.2": 1.02, "streaming@0.2": 1.02, "snapkv@0.2": 1.06, "kvcrush@0.2": 1.06, "tova@0.2": 1.06,
    "h2o@0.2": 1.6, "squeeze+snapkv@0.2": None, "snapkv+kivi@0.2": None,
}  # fmt: skip
"""Policies, and the most that a prefill may take against the stock one (None: no bar)."""


def measure(tokens: int = 4096, rounds: int = 9, policies: list[str] | None = None) -> Iterator[tuple[str, Ratio]]:
    """Time prefills of one prompt, policy by policy."""
    model = llama(layers=4)
    ids = torch.randint(0, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))

    def plain() -> None:
        model(ids, logits_to_keep=1, use_cache=True)

    for policy in policies or list(POLICIES):
        handle = kvpolicy.attach(model, policy)

        def under_policy() -> None:
            model(ids, logits_to_keep=1, use_cache=True)

        def stock(handle: kvpolicy.Handle = handle) -> None:
            with handle.paused():
                plain()

        with torch.inference_mode():
            yield policy, compare(stock, under_policy, rounds)
        handle.detach()

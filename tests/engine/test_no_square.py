"""Rule 5: nothing in a prefill is as large as a full attention matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy_eval.bench.models import llama
from tests.conformance.policies import SELECTORS, words
from tests.sampling import product

HEADS = 4


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that an operator returned, and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.most:
                self.most = tensor.untyped_storage().nbytes()
                self.where = str(func)
        return out


def largest(policy: str, tokens: int, rows: list[int]) -> tuple[int, str]:
    """Of a prefill and of a continuation of half its size."""
    model = llama(1, 16, HEADS, kv_heads=2, vocabulary=8, positions=8192)
    ids = torch.randint(0, 8, (len(rows), tokens))
    mask = torch.ones_like(ids)
    for row, length in enumerate(rows):
        mask[row, : tokens - length] = 0
    with torch.no_grad(), kvpolicy.attach(model, policy), Largest() as seen:
        cache = PolicyCache(model)
        model(ids, attention_mask=mask, cache=cache)
        more = torch.ones(len(rows), tokens // 2, dtype=torch.int64)
        model(more, attention_mask=torch.cat([mask, more], 1), cache=cache)
    return seen.most, seen.where


METHODS = [
    *(words(selector) for selector in SELECTORS),
    "squeeze+window@0.5",
    "kvcrush:page=32/h2o@0.5",
    "kvcrush:buckets=distance:pick=best/window@0.5",
    "h2o+kivi@0.5",
    "full",
    "kvzip:chunk=128:sinks=2@0.5",
]
LOOKING = [
    *(words(name) for name in ("expected", "h2o", "kvcrush", "probe", "scissorhands")),
    "kvzip:chunk=128:sinks=2@0.5",
]
TURNS = [(policy, bool(number % 2)) for number, policy in enumerate([*LOOKING, "h2o+kivi@0.5"])]
"""What looks at attention in a way of its own, every other one with padding."""


@product("policy,padded", METHODS, [False, True], sample=TURNS)
def test_no_square(policy: str, padded: bool) -> None:
    """Less than one byte per pair of tokens, for all heads and rows together: not even a mask of bool fits in that."""
    most, where = largest(policy, 4096, [4096, 2700] if padded else [4096])
    assert most < 4096**2, where


def test_tiles_stay_small() -> None:
    """Doubling the prompt doubles what is held, and does not quadruple it."""
    small, large = (largest("h2o@0.25", tokens, [tokens])[0] for tokens in (2048, 4096))
    assert large <= 2.1 * small

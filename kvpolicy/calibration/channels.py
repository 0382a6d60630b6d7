"""Calibrate the channels of Double Sparsity for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.calibration.listener import check_finite
from kvpolicy.calibration.run import Run
from kvpolicy.hf.attach import attach
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import device_of
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.policy import Policy
from kvpolicy.protocols import ReaderTraits
from kvpolicy.readers.common import TokenReader
from kvpolicy.readers.labels import DoubleSparsity


def measure_salience(run: Run, tokens: int) -> dict[str, Tensor]:
    """The salience of each layer, [H, D] fp32, by its name in the file; of a text of `tokens` tokens."""
    model = run.model
    found: dict[str, Tensor] = {}
    device = device_of(model)
    with eval_mode(model), torch.no_grad(), attach(model, Policy(reader=_Recorder())):
        for ids in run.bar(run.windows, "channels"):
            cache = PolicyCache(model)
            _: Any = model(ids[None].to(device), **cache_argument(model, cache))
            for layer in cache.policy_layers:
                reads: Any = layer.store.tensors.reads
                part = reads.index.salience[0].double().cpu() * (len(ids) / tokens)
                key = f"salience.{layer.layer_idx}"
                found[key] = found[key] + part if key in found else part
    for key, salience in found.items():
        check_finite("measured numbers", key, salience)
    return {key: salience.float() for key, salience in found.items()}


class _Record(NamedTuple):
    """The salience of the channels in the first prompt, [B, H, D] fp32."""

    salience: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorder(TokenReader):
    """Reads everything, and keeps the salience that a reader may ask for."""

    read = 1.0

    @property
    def traits(self) -> ReaderTraits:
        return ReaderTraits(salience=DoubleSparsity())

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> _Record:
        return _Record(torch.zeros(batch, heads, head_dim, device=device, dtype=torch.float32))

    def fit(self, index: _Record, salience: Tensor, rows: Tensor) -> None:
        index.salience.copy_(salience)

    def score(self, index: _Record, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        return products(queries)

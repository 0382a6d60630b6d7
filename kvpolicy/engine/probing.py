"""Attention of a few probe queries, summed without an N x N matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.attention import (
    Past,
    QueryWindow,
    ScoreTransform,
    window_attention,
    window_tiles,
)
from kvpolicy.engine.statistic import Candidates, Coming, WindowStatistic
from kvpolicy.protocols import Probes


@dataclass(frozen=True)
class ProbeQueries(WindowStatistic):
    """Some queries of a prompt, and the sum of their attention to each candidate.

    Attributes:
        probes: How many, and which.
        window: The queries so far; None before a prompt.
    """

    probes: Probes
    window: QueryWindow | None = None

    def columns(self, coming: Coming) -> Tensor:
        """Columns that are drawn for each row."""
        return probe_columns(coming.valid, coming.shape, self.probes, coming.seen.device)

    def reduced(self, candidates: Candidates) -> Mapping[str, Any]:
        """Sums of the probes' attention, and how many probes could see each token."""
        assert self.window is not None
        keys, valid, transform, past = candidates[:4]
        total, count = probe_sums(self.window, keys, transform, past, valid)
        return {"probe_sum": total, "probe_count": count}


def draw_probes(length: int, probes: Probes) -> Tensor:
    """Indices of the probes among a row's `length` queries, ascending, int64."""
    recent = min(math.ceil(probes.recent * length), length)
    count = min(math.ceil(probes.random * length), length - recent)
    # From the row's own length, on the CPU: the draw depends neither on the batch nor on the device.
    generator = torch.Generator().manual_seed(probes.seed + length)
    drawn = torch.randperm(length - recent, generator=generator, device="cpu")[:count]
    return torch.cat([drawn, torch.arange(length - recent, length, device="cpu")]).sort().values


def probe_columns(valid: Tensor | None, shape: tuple[int, int], probes: Probes, device: torch.device) -> Tensor:
    """Columns of each row's probes, [B, W] int64, ascending, then -1 where a row has fewer.

    Args:
        valid: Which of P tokens are not padding, [B, P] bool; None if all are.
        shape: B and P.
        probes: How many, and which.
        device: Device of the result.
    """
    batch, new = shape
    rows = [torch.arange(new, device="cpu")] * batch if valid is None else [row.nonzero()[:, 0].cpu() for row in valid]
    chosen = [row[draw_probes(len(row), probes)] for row in rows]
    return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1).to(device)


def probe_sums(
    window: QueryWindow, k: Tensor, transform: ScoreTransform, past: Past | None, valid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum the attention of the probes over past slots and new tokens, and count how many probes could see each.

    Returns:
        Sums and counts, each [B, Hq, S + P] fp32.
    """
    batch, heads = window.queries.shape[:2]
    held = 0 if past is None else past.keys.shape[2]
    total = k.new_zeros(batch, heads, held + k.shape[2], dtype=torch.float32)
    for _, tile in window_tiles(window, total.shape[2]):
        total += window_attention(tile, k, transform, past, valid).sum(2)
    column = torch.arange(k.shape[2], device=k.device)
    seen = ((window.at[..., None] >= column) & (window.at >= 0)[..., None]).sum(1)  # [B, P]
    every = (window.at >= 0).sum(1, keepdim=True).expand(-1, held)
    count = torch.cat([every, seen], -1).to(total)
    return total, count[:, None].expand(-1, heads, -1)

"""Selectors that look at prompts and choose nothing, by which calibrations see the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.hf.attach import attach
from kvpolicy.hf.discovery import device_of, find_sites
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.policy import Policy
from kvpolicy.protocols import Selector, State, View
from kvpolicy.statistics import Results, Statistic
from kvpolicy.text.errors import KVPolicyError


@dataclass(frozen=True, slots=True, eq=False)
class Listener(Selector):
    """A selector that shows prompts to a function, and keeps the newest token.

    Attributes:
        asks: What it needs of a prompt.
        look: Called in each layer with what was seen, before the eviction.
    """

    asks: tuple[Statistic[Any], ...]
    look: Callable[[Results, View], object]

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        """See `asks`."""
        return self.asks

    def observe(self, state: State, seen: Results, view: View) -> State:
        """Show it."""
        self.look(seen, view)
        return state

    def priority(self, state: State, view: View) -> Tensor:
        """Its position."""
        return view.positions.float()


@dataclass(slots=True)
class Sums:
    """Sums of tensors over vectors of a layer.

    Attributes:
        count: The number of vectors.
        total: The sums, fp64 on the CPU; none before the first vectors.
    """

    count: int = 0
    total: tuple[Tensor, ...] = ()

    def add(self, count: int, *new: Tensor) -> None:
        """Add the sums over more vectors."""
        self.count += count
        self.total = tuple(before + more for before, more in zip(self.total, new, strict=True)) if self.total else new

    def means(self) -> tuple[Tensor, ...]:
        """The sums over the number of vectors."""
        return tuple(t / self.count for t in self.total)


@contextmanager
def listening(
    model: nn.Module, asks: tuple[Statistic[Any], ...], look: Callable[[Results, View], object], tile: TileSize = None
) -> Generator[Callable[[Tensor], object]]:
    """Look at prompts inside, in eval mode and without gradients; yields what runs token ids [n].

    Args:
        model: A causal language model without a policy attached.
        asks: What is looked at.
        look: Called in each layer with what was seen of a whole prompt, before the eviction.
        tile: The most tokens that a layer takes at a time, as for `attach`.

    Raises:
        KVPolicyError: If the model is not supported, or has a policy attached.
    """
    decoder = find_sites(model).decoder
    device = device_of(decoder)
    # The cache itself need not hold the prompt: a budget of one token saves memory.
    with eval_mode(model), torch.no_grad(), attach(model, Policy(selector=Listener(asks, look), budget=1), tile=tile):
        yield lambda ids: decoder(input_ids=ids[None].to(device), use_cache=True)


def check_finite(what: str, where: str, *found: Tensor) -> None:
    """Refuse numbers that are not finite.

    Raises:
        KVPolicyError: Naming `what` they are, and `where` they were found.
    """
    if not all(bool(t.isfinite().all()) for t in found):
        raise KVPolicyError(
            f"All {what} must be finite, got inf or NaN in {where}; try loading the model in bf16 or fp32."
        )

"""What an allocator and a selector must answer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kvpolicy.parallel.runtime import ALONE, Ranks

State = Any
"""A NamedTuple of per-slot tensors, each [B, H, S]; the empty tuple where a selector remembers nothing."""

DecodeMode = Literal["evict", "grow"]


class Probes(NamedTuple):
    """Which queries of a prompt are probes.

    Attributes:
        recent: Share of each row's own queries that are the newest, in [0, 1].
        random: Share of them that is drawn at random among the others, in [0, 1].
        seed: Of the draw.
    """

    recent: float
    random: float
    seed: int


class Needs(NamedTuple):
    """What of attention a selector must see; what is not asked for is not computed.

    Attributes:
        total: Attention summed over every query of a prefill, per query head.
        tail: How many of the newest queries' attention rows to keep for `Seen.recent`.
        row: The attention of each decoded token over the slots.
        probes: Which queries' attention to sum for `Seen.probed`, or None.
        forward: Whether to hand on what the attention module was called with, for `Seen.forward`, and the keys and
            values on offer.
    """

    total: bool = False
    tail: int = 0
    row: bool = False
    probes: Probes | None = None
    forward: bool = False

    def __or__(self, other: Needs) -> Needs:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The union of two needs, for a refiner and its base."""
        probes = self.probes or other.probes
        total, row, forward = self.total or other.total, self.row or other.row, self.forward or other.forward
        return Needs(total, max(self.tail, other.tail), row, probes, forward)


class Forward(NamedTuple):
    """What an attention module was called with, for a selector that computes scores of its own.

    Attributes:
        module: The attention module.
        hidden_states: Its input, [B, P, hidden].
        kwargs: Its other arguments, as the model's code gave them.
        rotary: The model's rotary embedding, where it has one.
        queries: As attention takes them, [B, Hq, P, D].
        valid: Which of the P tokens are no padding, [B, P] bool; None where all are.
        scale: What products of queries and keys are multiplied by.
        softcap: What they are then capped by, or None.
        sinks: Learned scores beside the tokens', [Hq], or None.
    """

    module: nn.Module
    hidden_states: Tensor
    kwargs: dict[str, Any]
    rotary: nn.Module | None = None
    queries: Tensor | None = None
    valid: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None


class Seen(NamedTuple):
    """Attention of one prefill (or chunk) over the tokens on offer, fp32, zero where a token is not valid.

    Attributes:
        total: [B, Hq, N], summed over the queries of this forward; None unless `Needs.total`.
        tail: [B, Hq, W, N], the newest W valid queries, the newest last, zero rows where a row has fewer;
            None unless `Needs.tail`.
        probed: [B, Hq, N], summed over the probes; None unless `Needs.probes`.
        probes: [B, Hq, N], how many probes could see the token, likewise.
        forward: What the attention module was called with; None unless `Needs.forward`.
        keys: [B, H, N, D], as attention takes them, likewise.
        values: [B, H, N, D], likewise.
    """

    total: Tensor | None
    tail: Tensor | None
    probed: Tensor | None = None
    probes: Tensor | None = None
    forward: Forward | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def recent(self, window: Tensor) -> Tensor:
        """Attention summed over each row's newest `window` [B] queries, [B, Hq, N]."""
        assert self.tail is not None, "the selector did not ask for the tail"
        width = self.tail.shape[2]
        age = torch.arange(width - 1, -1, -1, device=self.tail.device)
        weight = (age < window[:, None]).to(self.tail.dtype)  # [B, W]
        return (weight[:, None, None] @ self.tail).squeeze(2)


class View(NamedTuple):
    """The tokens on offer, as a selector may know them.

    Attributes:
        positions: [B, H, N] int32, the original position of each token, -1 where there is none. Ascending in a
            prefill (what is not valid first); in any order in decode.
        length: [B] int64, how many tokens each row has seen: the newest token's position + 1.
        budget: [B] int64, how many tokens of each row the layer may hold.
        layer_idx: Which layer.
        ranks: Who holds the model's other heads: what looks at all heads, or at all query heads of a KV head, asks it.
        alike: Whether all heads of all ranks are offered the same tokens, as in a first prompt.
    """

    positions: Tensor
    length: Tensor
    budget: Tensor
    layer_idx: int
    ranks: Ranks = ALONE
    alike: bool = False

    @property
    def valid(self) -> Tensor:
        """Whether there is a token, [B, H, N] bool."""
        return self.positions >= 0

    def newest(self, window: Tensor | int) -> Tensor:
        """Whether a token is among its row's `window` ([B] or int) newest positions, [B, H, N] bool."""
        first = (self.length - window).clamp_min(0)  # so that what is empty, at -1, is not among them
        return self.positions >= first[:, None, None]


@runtime_checkable
class Allocator(Protocol):
    """How many tokens may each layer keep?"""

    @property
    def measure(self) -> Literal["", "cosine"]:
        """What must be measured in every layer before budgets are known: nothing, or the attention cosine."""
        ...

    def budgets(self, measures: Tensor | None, total: Tensor, floor: int, ceiling: Tensor, layers: int) -> Tensor:
        """Tokens per layer and row, [B, L] int64.

        Args:
            measures: What `measure` asked for, [B, L] fp32, or None.
            total: Tokens of all layers together, [B] int64. The result's rows sum to it.
            floor: Fewest tokens that any layer may get.
            ceiling: Most tokens that any layer of a row can use, [B] int64.
            layers: L.
        """
        ...


@runtime_checkable
class Selector(Protocol):
    """Which tokens are kept?

    One ranking decides everything: a prefill keeps the `budget` tokens of highest priority, a decode step evicts
    the lowest. Ties stay with the earlier position.
    """

    @property
    def decode(self) -> DecodeMode:
        """Whether generated tokens compete for the budget (`evict`) or get room beside it (`grow`)."""
        ...

    @property
    def needs(self) -> Needs:
        """What of attention this selector must see."""
        ...

    @property
    def floor(self) -> int:
        """The smallest budget, in tokens, that this selector can work with."""
        ...

    def alloc(self, batch: int, heads: int, slots: int, device: torch.device | str) -> State:
        """A state of zeros for `slots` slots."""
        ...

    def observe(self, state: State, seen: Seen, view: View) -> State:
        """The state after a prefill or chunk, aligned to `view`; `state` is zero for the new tokens."""
        ...

    def step(self, state: State, row: Tensor, view: View) -> None:
        """Update the state in place with the newest token's attention `row`, [B, H, G, S] fp32."""
        ...

    def priority(self, state: State, view: View) -> Tensor:
        """What each token is worth, [B, H, N] fp32: inf is always kept, -inf never; of invalid tokens, anything."""
        ...

    def statistic(self, seen: Seen, view: View) -> Tensor | None:
        """Each query head's own score of each token, [B, Hq, N] fp32, for refiners; None where there is none."""
        ...

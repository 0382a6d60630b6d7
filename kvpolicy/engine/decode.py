"""One decode step behind its attention: what the selector is to see of the new token, and the update of its state."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_spec import LayerSpec
from kvpolicy.engine.state import map_state, select_rows, tensors
from kvpolicy.kernels.mixed_values import read_values
from kvpolicy.protocols import NewToken, Selector, State, StepMemo, View
from kvpolicy.statistics.query_moments import plain_queries

NO_SLOT = "the cache has no free slot: call cache.tick() between steps"
NO_PAGE = "a head has no page for its new token: its head allocator must give every head at least 1"
NO_ROOM = "the cache has no room left: call cache.tick() between steps"

assert_async: Callable[[Tensor, str], None] = torch._assert_async  # pyright: ignore
"""Fails if a condition on the device does not hold, without waiting for it; stays in a compiled graph."""

add_to_each: Callable[..., None] = torch._foreach_add_  # pyright: ignore
"""Adds a number, or one of as many tensors, to each of a list of tensors, in place and in few launches."""


def assert_compiled(condition: Callable[[], Tensor], message: str) -> None:
    """Fail in a compiled step if a condition does not hold; the host's counts answer for eager ones, without a launch.

    See `LayerStore.attend_step`.
    """
    if torch.compiler.is_compiling():
        assert_async(condition(), message)


@dataclass(eq=False)
class SharedStep:
    """An eager decode step of several layers, which have seen the same tokens: what is the same in all is made once.

    A compiled step has none: its graph would depend on objects that are new in every step.

    Attributes:
        memo: What layers compute alike.
        positions: Positions of the new tokens on each device, [B, 1, 1] int32.
        lengths: Tokens that each row has seen, the new one included, on each device, [B] int64.
        budgets: One of the equal budgets of layers, [B] int64, by its numbers.
        counters: Counters of the layers that attended, to each of which the end of the step adds one.
        lengths_with: Lengths of layers in rows of which some have no token, and what is added to each.
    """

    memo: StepMemo
    positions: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])
    lengths: dict[torch.device, Tensor] = field(default_factory=dict[torch.device, Tensor])
    budgets: dict[Hashable, Tensor] = field(default_factory=dict[Hashable, Tensor])
    counters: list[Tensor] = field(default_factory=list[Tensor])
    lengths_with: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])

    def count(self, length: Tensor, columns: Tensor, valid: Tensor | None) -> Tensor:
        """Let the end of the step count a token in the counters of a layer; its position, [B, 1, 1] int32.

        Args:
            length: Tokens that each row has seen, [B] int64.
            columns: Columns seen, [] int64.
            valid: Which rows have a token, [B, 1] bool; None if all have.
        """
        device = length.device
        by = None if valid is None else self.memo.once(Tensor.long, valid)[:, 0]
        if device not in self.positions:
            self.positions[device] = length.to(torch.int32)[:, None, None]  # as many came before it
            self.lengths[device] = length + (1 if by is None else by)
        self.counters.append(columns)
        if by is None:
            self.counters.append(length)
        else:
            self.lengths_with.append((length, by))
        return self.positions[device]

    def end(self) -> None:
        """Count the token in every layer that attended."""
        if self.counters:
            add_to_each(self.counters, 1)
        if self.lengths_with:
            add_to_each(*map(list, zip(*self.lengths_with, strict=True)))


class Step(NamedTuple):
    """A token of each row that has its slot.

    Attributes:
        token: The token as the selector sees it; None if it does not look at vectors.
        valid: Which rows have a token, [B, 1] bool; None if all have.
        view: The slots.
        weights: Attention of the token, [B, H, G, S] fp32; None if the selector does not look at it.
    """

    token: NewToken | None
    valid: Tensor | None
    view: View
    weights: Tensor | None

    def beside(self, weights: Tensor | None) -> Step:
        """The same with the weights [B, H, G', S] of a layer that reads the same keys; its queries are not taken.

        A selector may hold queries of each query head of the layer.
        """
        both = None if self.weights is None or weights is None else torch.cat([self.weights, weights], 2)
        return self._replace(weights=both)


def new_token(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scores: Tensor | None) -> NewToken:
    """The token of a decode step, for a selector that looks at it.

    Args:
        spec: The parts of the layer.
        q: Its queries, [B, Hq, 1, D].
        k: Its key, [B, H, 1, D].
        v: Its value, [B, H, 1, D].
        positions: Its position, [B, 1] int32.
        scores: Its scores by the input of the layer, [B, H, 1] fp32; None if the selector does not ask for them.
    """
    queries = q.detach()
    plain = plain_queries(queries, positions, spec.rope) if spec.step_moments else None
    taken, unrotated = (None if t is None else t.squeeze(2).unflatten(1, (k.shape[1], -1)) for t in (queries, plain))
    return NewToken(k.detach(), read_values(k, v, spec.latent).detach(), taken, unrotated, scores)


def update_state(selector: Selector, state: State, weights: Tensor | None, view: View, valid: Tensor | None) -> None:
    """Let the selector see the new token, in place, in the rows that have one.

    Args:
        selector: The selector.
        state: Its state.
        weights: Attention of the new token, [B, H, G, S] fp32, or None.
        view: The slots.
        valid: Which rows have a token, [B, 1] bool; None if all have.
    """
    before = None if valid is None else map_state(torch.clone, state)
    row = view.positions.new_empty(0, dtype=torch.float32) if weights is None else weights.detach()
    selector.step(state, row, view)
    if before is not None and valid is not None:
        assign_state(state, select_rows(valid[:, 0], state, before))


def assign_state(state: State, new: State) -> None:
    """Write every tensor of a state, in place: compiled steps refer to these tensors."""
    for now, then in zip(tensors(state), tensors(new), strict=True):
        now.copy_(then)

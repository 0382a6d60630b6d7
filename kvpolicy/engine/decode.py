"""One decode step: which slot the new token takes, what the selector is to see of it, and the update of its state."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.selection import finite_priority
from kvpolicy.engine.state import map_state, select_rows, tensors
from kvpolicy.protocols import Reranks, Selector, State, View
from kvpolicy.statistics import Results

NO_SLOT = "the cache has no free slot: call cache.tick() between steps"
NO_PAGE = "a head has no page for its new token: its head allocator must give every head at least 1"
NO_ROOM = "the cache has no room left: call cache.tick() between steps"


def eviction_scores(selector: Selector, state: State, view: View) -> Tensor:
    """The position of each token of lowest priority, -1 for all others, [B, H, S]: of ties the latest is evicted."""
    # The minimum is found by equality, and NaN equals nothing: without `finite_priority`, any slot could be the victim.
    # If all tokens are protected, empty slots tie with them at inf, but lose by their position of -1.
    priority = finite_priority(selector.priority(state, view)).masked_fill(~view.valid, torch.inf)
    return view.positions.masked_fill(priority != priority.amin(-1, keepdim=True), -1)


def assert_async(condition: Tensor, message: str) -> None:
    """Fail if a condition on the device does not hold, without waiting for it; stays in a compiled graph."""
    torch._assert_async(condition, message)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


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


def rank_again(selector: Selector, state: State, seen: Results, view: View) -> None:
    """Let the selector rank all slots together, in place."""
    assert isinstance(selector, Reranks)  # see `policy.combination.check_abilities`
    assign_state(state, selector.rerank(state, seen, view))


def assign_state(state: State, new: State) -> None:
    """Write every tensor of a state, in place: compiled steps refer to these tensors."""
    for now, then in zip(tensors(state), tensors(new), strict=True):
        now.copy_(then)

"""After a prompt: which of the slots and of the new tokens are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.state import empty_slots, join_states, map_slots, map_state, select_rows, tensors
from kvpolicy.protocols import (
    HeadAllocator,
    HeadRequest,
    HoldsAttention,
    Selector,
    State,
    View,
)
from kvpolicy.statistics import Context, RecentQueries, Results, WindowAttention
from kvpolicy.statistics.windows import Past
from kvpolicy.text.errors import KVPolicyError


class Selection(NamedTuple):
    """Selection among the candidates: the slots of a layer, then the new tokens.

    Attributes:
        positions: Position of each candidate, [B, H, S + P] int32, -1 for none.
        state: The selector's state of each candidate.
        chosen: Which candidates are kept, [B, H, S + P] bool.
        window: Attention of the newest queries over the candidates, if it was requested.
        priority: Priority of each candidate, [B, H, S + P] fp32.
        head_pages: Pages of each head, [B, H] int64; None without head budgets.
    """

    positions: Tensor
    state: State
    chosen: Tensor
    window: WindowAttention | None = None
    priority: Tensor | None = None
    head_pages: Tensor | None = None


class HeadBudgets(NamedTuple):
    """Divides pages among the heads of a layer; see `HeadRequest`.

    Attributes:
        allocator: Divides them.
        pages: Pages of the layer, [B] int64.
        size: Slots of a page, [B] int64.
        most: The most pages that a head can use, [B] int64.
    """

    allocator: HeadAllocator
    pages: Tensor
    size: Tensor
    most: Tensor

    def divide(self, priority: Tensor, view: View) -> Tensor:
        """Pages of each head, [B, H].

        Raises:
            KVPolicyError: If a head gets no page: its next token would be written into a page of another head.
        """
        ranked = priority.masked_fill(~view.valid, -torch.inf)
        pages = self.allocator.divide(HeadRequest(ranked, view, self.pages, self.size, self.most))
        # A growing cache has no pages for a row that has not begun, until its first token comes.
        if bool(((pages < 1) & (self.pages > 0)[:, None]).any()):
            raise KVPolicyError(
                f"{self.allocator} must give every head at least 1 page, got {pages.tolist()}; try "
                "kvpolicy.testing.check on it."
            )
        return pages


class Ranking(NamedTuple):
    """The candidates of a layer by ascending position, as its selector ranks them.

    Attributes:
        view: The candidates.
        before: The selector's state of each, before it saw the prompt.
        state: Its state.
        priority: Priority of each candidate, [B, H, S + P] fp32.
        order: Where each one is among the slots and the new tokens, [B, H, S + P] int64; None if they are in order.
        window: Attention of the newest queries over the slots and the new tokens, in their order, if requested.
    """

    view: View
    before: State
    state: State
    priority: Tensor
    order: Tensor | None
    window: WindowAttention | None


def rank_candidates(
    layer: LayerContents,
    held: tuple[Tensor, State],
    prompt: PendingPrompt,
    past: Past | None,
    seen_before: Tensor,
    keep: Tensor,
) -> Ranking:
    """Rank the slots of a layer and the tokens of a prompt.

    Args:
        layer: The layer.
        held: Positions of its slots, [B, H, S] int32, and the selector's state of them.
        prompt: The new tokens.
        past: Every slot, decoded, if `PendingPrompt.reads_past`; None without slots.
        seen_before: Tokens that each row had seen before the prompt, [B] int64.
        keep: The most tokens to keep of each row, [B] int64.
    """
    selector = layer.spec.selector
    positions, state = held
    slots = positions.shape[-1]
    new_positions = prompt.positions(seen_before)[:, None].expand(-1, positions.shape[1], -1)
    positions = torch.cat([positions, new_positions], -1)
    state = join_states(state, empty_slots(state, new_positions.shape[-1]))
    context = Context(
        keys=prompt.keys,
        values=prompt.values,
        valid=prompt.valid,
        transform=prompt.transform,
        past=past,
        positions=positions,
        layer_idx=layer.spec.layer_idx,
        ranks=layer.ranks,
        latent=layer.spec.latent,
        rotation=prompt.rotation,
        projection=layer.spec.projection,
        call=prompt.forward,
        replay=prompt.replay,
    )
    found = {type(each): each.reduced(context) for each in prompt.statistics}
    # From before the reordering below: mergers take it with the slots first, like all other fields of `Selection`.
    window = found.get(RecentQueries)
    order = None
    if slots or (prompt.valid is not None and not _is_left_padded(prompt.valid)):
        # Selectors see candidates by ascending position; slots are in any order.
        # A first prompt without padding, or with padding at the front (at -1), is in order already.
        order = positions.argsort(dim=-1, stable=True)
        positions = positions.gather(-1, order)
        state = map_slots(lambda t: t.gather(-1, order), state)
        found = {type(each): each.reordered(found[type(each)], order) for each in prompt.statistics}
    length = prompt.lengths(seen_before)
    view = View(positions, length, keep, layer.spec.layer_idx, layer.ranks, alike=not slots, added=length - seen_before)
    after = _in_dtypes_of(state, selector.observe(state, Results(found), view))
    priority = finite_priority(selector.priority(after, view))
    return Ranking(view, state, after, priority, order, window)


def select_tokens(ranking: Ranking, idle: Tensor | None = None, heads: HeadBudgets | None = None) -> Selection:
    """Select among the slots of a layer and the tokens of a prompt.

    Args:
        ranking: How its selector ranks them.
        idle: Rows without a token in the prompt, [B] bool, which keep what they hold; None if there are none.
        heads: How many tokens each head keeps; without it, all keep the budget of the ranking's view.
    """
    view, before, state, priority, order, window = ranking
    positions = view.positions
    head_pages = None if heads is None else heads.divide(priority, view)
    count = view.budget[:, None] if heads is None or head_pages is None else head_pages * heads.size[:, None]
    chosen = highest(priority, view, count)
    if idle is not None:  # alone, such a row would not have been selected from
        chosen = torch.where(idle[:, None, None], view.valid, chosen)
        state = select_rows(idle, before, state)
    if order is not None:
        # The inverse permutation: slots are not moved, so results return to their order.
        back = order.argsort(dim=-1)
        chosen = chosen.gather(-1, back)
        positions = positions.gather(-1, back)
        priority = priority.gather(-1, back)
        state = map_slots(lambda t: t.gather(-1, back), state)
    return Selection(positions, state, chosen, window, priority, head_pages)


def worth_of(selector: Selector, ranking: Ranking) -> Tensor:
    """The worth of each candidate beside those of other layers, [B, H, N] fp32; see `LayerAttention`."""
    priority = ranking.priority
    worth = selector.attention(ranking.state) if isinstance(selector, HoldsAttention) else priority
    return worth.masked_fill(priority == torch.inf, torch.inf).masked_fill(~ranking.view.valid, -torch.inf)


def finite_priority(priority: Tensor) -> Tensor:
    """A priority in which NaN ranks above every number and below inf, so that a broken token is not lost silently."""
    most = torch.finfo(priority.dtype).max
    if torch.compiler.is_compiling():  # inductor (torch 2.13) does not vectorize `nan_to_num`, which is one operation
        return priority.masked_fill(priority != priority, most)
    return priority.nan_to_num(most, torch.inf, -torch.inf)


def eviction_scores(selector: Selector, state: State, view: View, empty: Tensor | None) -> Tensor:
    """The position of each token of lowest priority, -1 for all others, [B, H, S]: of ties the latest is evicted.

    Args:
        selector: The selector.
        state: Its state.
        view: The slots.
        empty: Which of them hold no token, [B, H, S] bool; None if all hold one.
    """
    # The minimum is found by equality, and NaN equals nothing: without `finite_priority`, any slot could be the victim.
    # If all tokens are protected, empty slots tie with them at inf, but lose by their position of -1.
    priority = finite_priority(selector.priority(state, view))
    if empty is not None:
        priority = priority.masked_fill(empty, torch.inf)
    return view.positions.masked_fill(priority != priority.amin(-1, keepdim=True), -1)


def _in_dtypes_of(before: State, state: State) -> State:
    """A state in the dtypes that were allocated: a statistic may be computed in half precision."""
    dtypes = (t.dtype for t in tensors(before))
    return map_state(lambda t: t.to(next(dtypes)), state)


def highest(priority: Tensor, view: View, count: Tensor) -> Tensor:
    """The `count` [B, H or 1] tokens of highest priority, ties to the earlier position, [B, H, N] bool."""
    priority = priority.masked_fill(~view.valid, -torch.inf)
    # Not `topk`, which leaves open which of equal tokens it returns, and takes one count for all rows.
    order = priority.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device)
    top = torch.zeros_like(view.valid).scatter_(-1, order, (rank < count[..., None]).expand_as(order))
    # A row may have fewer candidates than `count`, and -inf also means that a token is never kept.
    return top & (priority > -torch.inf)


def _is_left_padded(valid: Tensor) -> bool:
    return bool((valid[:, 1:] >= valid[:, :-1]).all())

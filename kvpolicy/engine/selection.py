"""After a prompt: which of the slots and the new tokens stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpolicy.engine.attention import tail_rows
from kvpolicy.engine.prefill import Prompt
from kvpolicy.engine.probing import probe_sums
from kvpolicy.engine.slots import Loose, open_slots, without_nan
from kvpolicy.engine.state import join_states, map_state, tensors
from kvpolicy.protocols import Seen, State, View

if TYPE_CHECKING:
    from kvpolicy.hf.layer import PolicyLayer


def choose(layer: PolicyLayer, prompt: Prompt, keep: Tensor, seen_before: Tensor) -> Loose:
    """Choose among a layer's slots and a prompt's tokens.

    Chosen coded slots stay where they are. The exact slots' and the new tokens, chosen or not, are handed back: they
    must find new places.

    Args:
        layer: Whose slots; its `length` has counted the prompt already.
        prompt: The new tokens.
        keep: The most tokens to keep of each row, [B] int64.
        seen_before: Tokens that each row had seen before the prompt, [B] int64.
    """
    new = prompt.keys.shape[2]
    positions, state, seen = _on_offer(layer, prompt, seen_before)
    order = None
    if layer.layout.slots or (prompt.valid is not None and not _is_left_padded(prompt.valid)):
        order = positions.argsort(dim=-1, stable=True)
        positions, state, seen = _take(positions, state, seen, order)
    view = View(positions, layer.length, keep, layer.layer_idx, layer.ranks, alike=not layer.layout.slots)
    before, state = state, layer.policy.selector.observe(state, seen, view)
    chosen = _highest(without_nan(layer.policy.selector.priority(state, view)), view)
    if prompt.idle is not None:  # such a row alone would not have been called
        idle = prompt.idle[:, None, None]
        chosen = torch.where(idle, view.valid, chosen)
        unchanged = tensors(before)
        state = map_state(lambda t: torch.where(idle, next(unchanged), t), state)
    if order is not None:
        back = order.argsort(dim=-1)
        chosen, positions = chosen.gather(-1, back), positions.gather(-1, back)
        state = map_state(lambda t: t.gather(-1, back), state)
    return _split(layer, prompt, chosen, positions, state, positions.shape[-1] - new)


def _on_offer(layer: PolicyLayer, prompt: Prompt, seen_before: Tensor) -> tuple[Tensor, State, Seen]:
    """Positions [B, H, S + P], state and attention of the slots and the new tokens."""
    batch, heads, new, _ = prompt.keys.shape
    fresh = prompt.positions(seen_before)[:, None].expand(-1, heads, -1)
    zero = layer.policy.selector.alloc(batch, heads, new, fresh.device)
    state = join_states(layer.state, zero)
    rows = None
    if prompt.tail is not None:
        rows = tail_rows(prompt.tail, prompt.keys, prompt.transform, layer.past(), prompt.valid)
    probed = (None, None)
    if prompt.probes is not None:
        probed = probe_sums(prompt.probes, prompt.keys, prompt.transform, layer.past(), prompt.valid)
    seen = Seen(prompt.total, rows, *probed)
    if prompt.forward is not None:
        past = layer.past()
        pairs = [(prompt.keys, prompt.values)] if past is None else [past[:2], (prompt.keys, prompt.values)]
        keys, values = (torch.cat(parts, 2) for parts in zip(*pairs, strict=True))
        seen = seen._replace(forward=prompt.forward, keys=keys, values=values)
    return torch.cat([layer.positions, fresh], -1), state, seen


def _take(positions: Tensor, state: State, seen: Seen, order: Tensor) -> tuple[Tensor, State, Seen]:
    """Everything on offer in another order, [B, H, N]."""

    def heads(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = order.repeat_interleave(t.shape[1] // order.shape[1], 1)
        return t.gather(-1, wide if t.dim() == 3 else wide[:, :, None].expand(-1, -1, t.shape[2], -1))

    def tokens(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.gather(2, order[..., None].expand(-1, -1, -1, t.shape[-1]))

    sums = heads(seen.attn_sum), heads(seen.window_attn), heads(seen.probe_sum), heads(seen.probe_count)
    moved = Seen(*sums, seen.forward, tokens(seen.keys), tokens(seen.values))
    return positions.gather(-1, order), map_state(lambda t: t.gather(-1, order), state), moved


def _highest(priority: Tensor, view: View) -> Tensor:
    """The `view.budget` tokens of highest priority, ties to the earlier position, [B, H, N] bool."""
    priority = priority.masked_fill(~view.valid, -torch.inf)
    order = priority.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(order.shape[-1], device=order.device)
    top = torch.zeros_like(view.valid).scatter_(-1, order, (rank < view.budget[:, None, None]).expand_as(order))
    return top & (priority > -torch.inf)


def _split(
    layer: PolicyLayer, prompt: Prompt, chosen: Tensor, positions: Tensor, state: State, held: int
) -> Loose:  # fmt: skip
    """Empty the slots that were not chosen, and hand back what must find a place."""
    assert layer.keys is not None and layer.values is not None
    exact = layer.layout.exact

    def outer(t: Tensor) -> Tensor:
        return torch.cat([t[..., :exact], t[..., held:]], -1)

    layer.positions = positions[..., :held].masked_fill(~chosen[..., :held], -1)
    layer.state = map_state(lambda t: t[..., :held], state)
    keys, values = prompt.keys, prompt.values
    if layer.keys.shape[2]:  # a first prompt is not copied whole
        keys, values = torch.cat([layer.keys, keys], 2), torch.cat([layer.values, values], 2)
    loose = Loose(keys, values, outer(positions), map_state(outer, state), outer(chosen))
    if layer.frozen:  # these stay where they are
        loose.chosen[..., :exact] &= open_slots(layer)
    return loose


def _is_left_padded(valid: Tensor) -> bool:
    return bool((valid[:, 1:] >= valid[:, :-1]).all())

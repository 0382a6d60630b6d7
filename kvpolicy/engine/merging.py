"""Merging: what a merger is given of a prompt or of a decode step, and where its result goes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.columns import CodedColumns
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.engine.selection import Selection
from kvpolicy.engine.state import join_states, map_slots, select_state
from kvpolicy.engine.token_batch import SlotData, TokenBatch
from kvpolicy.kernels.slot_writes import gather_slots
from kvpolicy.protocols import Candidates, Merger, Ranks, State, Tokens
from kvpolicy.statistics.windows import Past


class Joined(NamedTuple):
    """Every token on offer after a prompt, the slots first: keys and values [B, H, S + P, D], counts [B, H, S + P]."""

    keys: Tensor
    values: Tensor
    counts: Tensor | None


def join_prompt(past: Past | None, prompt: PendingPrompt) -> Joined:
    """The slots of a layer, decoded, and the tokens of a prompt; counts are None unless the slots have some."""
    if past is None:
        return Joined(prompt.keys, prompt.values, None)
    counts = past.counts
    if counts is not None:
        counts = torch.cat([counts, counts.new_zeros(*counts.shape[:2], prompt.keys.shape[2])], -1)
    return Joined(torch.cat([past.keys, prompt.keys], 2), torch.cat([past.values, prompt.values], 2), counts)


def merge_prompt(
    merger: Merger,
    state: State,
    batch: TokenBatch,
    selected: Selection,
    joined: Joined,
    coded: slice,
    length: Tensor,
    ranks: Ranks,
    replayed: tuple[Tensor, Tensor | None] | None,
) -> TokenBatch:
    """Merge what a prompt evicts into the tokens that are kept and not coded.

    Args:
        merger: The merger.
        state: Its state of each head.
        batch: The tokens that are not coded; `chosen` says which are kept and may change.
        selected: The selection among all tokens, coded ones included.
        joined: Keys, values and counts of all tokens.
        coded: The coded slots among all tokens.
        length: Tokens that each row has seen, [B].
        ranks: The ranks that hold the layer's other heads.
        replayed: `Candidates.replay_attention` and `Candidates.replay_sinks`; None where nothing was replayed.

    Returns:
        The kept tokens by ascending position, merged: keys and values are copies.
    """
    most = max(int(batch.chosen.sum(-1).max()), 1)
    order = batch.by_position()[..., :most]
    kept = batch.take(order)
    # The batch lacks the coded slots, which stand between the full-precision buffer and the prompt.
    targets = torch.where(order < coded.start, order, order + (coded.stop - coded.start))
    counts = joined.counts
    if counts is None and merger.traits.counted:
        counts = torch.zeros_like(selected.positions, dtype=torch.float32)
    result = merger.merge_prompt(
        state,
        Candidates(
            keys=joined.keys,
            values=joined.values,
            positions=selected.positions,
            kept=selected.chosen,
            targets=targets,
            is_target=kept.chosen,
            counts=counts,
            attention=None if selected.window is None else selected.window.weights,
            length=length,
            priority=selected.priority if merger.traits.ranked else None,
            ranks=ranks,
            replay_attention=replayed[0] if replayed else None,
            sinks=None if selected.window is None else selected.window.sinks,
            replay_sinks=replayed[1] if replayed else None,
        ),
    )
    return kept._replace(
        keys=kept.keys if result.keys is None else result.keys.to(kept.keys.dtype),
        values=result.values.to(kept.values.dtype),
        counts=kept.counts if result.counts is None else result.counts,
    )


def merge_evicted(
    layer: LayerContents,
    batch: TokenBatch,
    selected: Selection,
    pending: PendingPrompt,
    past: Past | None,
    coded: slice,
) -> TokenBatch:
    """Merge what a layer evicts after a prompt; see `merge_prompt`, with the slots `past`, decoded."""
    joined = join_prompt(past, pending)
    replayed = None
    if pending.replayed is not None:
        there = selected.positions >= 0
        replayed = pending.replayed.attention(joined.keys, there, joined.counts, pending.transform)
    tensors = layer.tensors
    return merge_prompt(
        layer.spec.merger, tensors.merged, batch, selected, joined, coded, tensors.length, layer.ranks, replayed
    )


class SlotMerge(NamedTuple):
    """A slot of each head that takes in an evicted token.

    Attributes:
        slot: [B, H, 1] int64.
        written: Whether the token is merged, [B, H, 1] bool; elsewhere it is dropped.
        data: All that the slot holds then.
    """

    slot: Tensor
    written: Tensor
    data: SlotData


def merge_victim(layer: LayerContents, victim: Tokens, held: Tokens, state: State) -> SlotMerge:
    """Merge the victim of a decode step into one of the tokens that are held. Nothing is written.

    Args:
        layer: The layer.
        victim: The evicted token of each head; where it is not there, nothing is merged.
        held: The slots that may take it in.
        state: The selector's state of these, [B, H, n].
    """
    merge = layer.spec.merger.merge_token(layer.tensors.merged, victim, held)
    keys = gather_slots(held.keys, merge.slot) if merge.keys is None else merge.keys.to(held.keys.dtype)
    counts: State = () if held.counts is None else held.counts.gather(-1, merge.slot)
    data = SlotData(
        keys=keys,
        values=merge.values.to(held.values.dtype),
        positions=held.positions.gather(-1, merge.slot),
        state=map_slots(lambda t: t.gather(-1, merge.slot), state),
        counts=counts if merge.counts is None else merge.counts,
    )
    return SlotMerge(merge.slot, merge.write_mask & victim.there, data)


def with_merge(slot: Tensor, token: SlotData, merge: SlotMerge) -> tuple[Tensor, SlotData]:
    """The slot of a new token and that of a merge, with what is written to them. Traceable, no host sync.

    They are written at once, because inductor (torch 2.13) turns two writes to one buffer into two copies of it. Where
    nothing is merged, the new token is written twice to its slot.

    Args:
        slot: [B, H, 1] int64.
        token: The new token.
        merge: The merge, into another slot.
    """
    vector = merge.written[..., None]
    data = merge.data
    held = (token.state, token.counts)
    state, counts = join_states(held, select_state(merge.written, (data.state, data.counts), held))
    both = SlotData(
        keys=torch.cat([token.keys, torch.where(vector, data.keys, token.keys)], 2),
        values=torch.cat([token.values, torch.where(vector, data.values, token.values)], 2),
        positions=torch.cat([token.positions, torch.where(merge.written, data.positions, token.positions)], 2),
        state=state,
        counts=counts,
    )
    return torch.cat([slot, torch.where(merge.written, merge.slot, slot)], -1), both


def slot_tokens(
    slots: Tensor,
    there: Tensor,
    exact: tuple[Tensor, Tensor],
    coded: CodedColumns | None,
    positions: Tensor,
    counts: State,
) -> Tokens:
    """The token in one slot of each head, decoded if it is coded. Traceable, no host sync.

    Args:
        slots: Slot of each head, [B, H, 1] int64.
        there: Whether the slot holds a token, [B, H, 1] bool.
        exact: Keys and values of the full-precision buffer, [B, H, E, D].
        coded: The coded slots, which follow; None if there are none.
        positions: Positions of all slots, [B, H, S] int32.
        counts: Counts of all slots, [B, H, S] fp32, or ().
    """
    size = exact[0].shape[2]
    keys, values = (gather_slots(t, slots.clamp_max(max(size - 1, 0))) for t in exact)
    if coded is not None:
        # A head's token is in one part only, and every part is asked for one: which part, the host must not know.
        is_coded = (slots >= size)[..., None]
        keys = torch.where(is_coded, coded.keys_at(slots, keys.dtype), keys)
        values = torch.where(is_coded, coded.values_at(slots, values.dtype), values)
    own = counts.gather(-1, slots) if isinstance(counts, Tensor) else None
    return Tokens(keys, values, positions.gather(-1, slots), own, there)

"""Operations on pages, exact or coded: how many tokens they hold, evictions and writes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.decode import NO_PAGE, assert_async
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.pages import Owners, lowest_of_head, owned_by
from kvpolicy.engine.selection import finite_priority
from kvpolicy.engine.slot_writer import write_masked
from kvpolicy.engine.state import slot_tensors
from kvpolicy.engine.undo_log import Targets, UndoLog
from kvpolicy.kernels.slot_writes import flat_slots
from kvpolicy.protocols import State, View


def tokens_by_head(layer: LayerContents) -> Tensor:
    """Tokens that each head of a layer with pages holds, [B, H] int64."""
    owned = owned_by(layer.tensors.paged().owner, layer.shape.heads)
    return count_tokens(layer.tensors.positions >= 0, owned)


def count_tokens(occupied: Tensor, owned: Tensor) -> Tensor:
    """Tokens of each head, [B, H] int64.

    Args:
        occupied: Which slots hold a token, [B, NB, P] bool.
        owned: Which pages belong to each head, [B, H, NB] bool.
    """
    return (owned * occupied.sum(-1)[:, None]).sum(-1)


def victims(layer: LayerContents, view: View, empty: Tensor | None, owners: Owners) -> Tensor:
    """The position of each head's tokens of lowest priority, -1 for all others: of ties the latest is evicted.

    Args:
        layer: The layer.
        view: The slots.
        empty: Which of them hold no token, [B, NB, P] bool; None if all hold one.
        owners: The owners of the pages.
    """
    tensors = layer.tensors
    priority = finite_priority(layer.spec.selector.priority(tensors.state, view))
    if empty is not None:
        priority = priority.masked_fill(empty, torch.inf)
    low = lowest_of_head(priority, owners)
    return view.positions.masked_fill(priority != low[..., None], -1)


def per_slot(layer: LayerContents) -> State:
    """Tensors of each slot beside its token: the selector's state, and the counts."""
    return layer.tensors.state, layer.tensors.counts


def set_per_slot(layer: LayerContents, state: State) -> None:
    """Set what `per_slot` returns."""
    layer.tensors.state, layer.tensors.counts = state


def paged_targets(layer: LayerContents) -> Targets:
    """The tensors in pages that a decode step writes to, but for keys and values."""
    written = slots_per_step(layer) * layer.shape.heads
    paged = {f"state.{n}": t for n, t in enumerate(slot_tensors(per_slot(layer)))}
    return {name: (flat_pages(t), written) for name, t in (paged | {"positions": layer.tensors.positions}).items()}


def slots_per_step(layer: LayerContents) -> int:
    """Slots of each head that a step writes: that of the new token, and that of a merge."""
    return 2 if layer.spec.merges_in_steps else 1


def of_every_head(t: Tensor, heads: int) -> Tensor:
    """All slots of a row as if each head had them, [B, NB, P, ...] -> [B, H, NB * P, ...], without a copy."""
    return flat_pages(t).expand(-1, heads, *[-1] * (t.dim() - 2))


def require_pages(layer: LayerContents, owners: Owners, valid: Tensor | None) -> None:
    """Refuse a step if a head that gets a token has no page: it would write into a page of another head.

    Args:
        layer: The layer, which knows whether all heads have pages unless a row of it has not begun.
        owners: The owners of the pages.
        valid: Which rows have a token, [B, 1] bool; None if all have.
    """
    if layer.has_pages and not torch.compiler.is_compiling():
        return
    has_page = owners.owned.any(-1)
    assert_async((has_page if valid is None else has_page | ~valid).all(), NO_PAGE)


def flat_pages(target: Tensor) -> Tensor:
    """All pages of a row as one long row of slots, [B, NB, P, ...] -> [B, 1, NB * P, ...]."""
    return target.view(target.shape[0], 1, -1, *target.shape[3:])


def write_flat(
    name: str,
    target: Tensor,
    slots: Tensor,
    data: Tensor,
    mask: Tensor | None,
    undo: UndoLog | None,
    index: Tensor | None = None,
) -> None:
    """Write data of each head to slots of its pages; see `write_masked`.

    Args:
        name: The name of the tensor in the undo log.
        target: [B, NB, P, ...].
        slots: Slots counted over all pages, [B, H, n] int64.
        data: [B, H, n, ...].
        mask: Which of the slots are written, [B, H, n] bool; None for all.
        undo: The undo log of the layer, if it has one.
        index: `flat_index` of the slots, if it is known.
    """
    # All pages of a row are written as one head. Its slots are distinct, as they must be: heads share no page.
    flat_mask = None if mask is None else mask.flatten(1, 2)[:, None]
    flat = slots.flatten(1, 2)[:, None]
    write_masked(name, flat_pages(target), flat, data.flatten(1, 2)[:, None], flat_mask, undo, index)


def flat_index(layer: LayerContents, slots: Tensor) -> Tensor:
    """Slots [B, H, n], counted over all pages of a row, as indices into the slots of all rows."""
    _, pages, size = layer.tensors.positions.shape
    return flat_slots(slots.flatten(1, 2)[:, None], pages * size, layer.memo.once)

"""Operations on pages, exact or coded: how many tokens they hold, and evictions, writes and attention.

A token attends to slots in pages by a softmax over all pages of a head, computed page by page.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpolicy.engine.attention import ScoreTransform
from kvpolicy.engine.decode import NO_PAGE, assert_async
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.engine.pages import Owners, as_pages, buffer_pages, from_pages, lowest_of_head, owned_by
from kvpolicy.engine.selection import finite_priority
from kvpolicy.engine.slot_writer import write_masked
from kvpolicy.engine.state import slot_tensors
from kvpolicy.engine.undo_log import Targets, UndoLog
from kvpolicy.kernels.products import matmul
from kvpolicy.kernels.slot_writes import flat_slots
from kvpolicy.protocols import State, View


class StoredPages(Protocol):
    """Keys and values in pages, as a step attends to them."""

    def scores(self, queries: Tensor, transform: ScoreTransform) -> Tensor:
        """Scores of queries [B, NB, G, D] against the keys of each page, [B, NB, G, P] fp32."""
        ...

    def mix(self, weights: Tensor) -> Tensor:
        """Values of each page weighted by [B, NB, G, P] fp32, [B, NB, G, D] fp32."""
        ...


class ExactPages(NamedTuple):
    """Pages in full precision: keys and values, [B, NB, P, D] each."""

    keys: Tensor
    values: Tensor

    def scores(self, queries: Tensor, transform: ScoreTransform) -> Tensor:
        """See `StoredPages.scores`."""
        return transform.scores(queries, self.keys)

    def mix(self, weights: Tensor) -> Tensor:
        """See `StoredPages.mix`."""
        return matmul(weights.to(self.values.dtype), self.values).float()


def attend_pages(
    q: Tensor,
    pages: StoredPages,
    empty: Tensor | None,
    owners: Owners,
    transform: ScoreTransform,
    buffer: tuple[Tensor, Tensor] | None = None,
    counts: Tensor | None = None,
    *,
    want_weights: bool = True,
    none_alone: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend from one token per row to the pages of each head. Traceable, no host sync.

    Every page is scored and mixed on its own, as if it were a head. The softmax of a head needs the maxima and sums of
    its pages, which are small: no key or value is moved.

    Args:
        q: [B, Hq, 1, D].
        pages: NB pages of P slots.
        empty: Which slots hold no token, [B, NB, P] bool; not all of a head. The pages of the buffer follow.
            None if all hold one, which is so without a buffer only.
        owners: The owners of the pages; those of the buffer's pages follow.
        transform: From products to attention weights.
        buffer: Keys and values of each head's full-precision buffer besides, [B, H, E, D] each; None without.
        counts: Logarithm of the number of tokens that each slot stands for, [B, NB, P] fp32; None if it is always one.
            The pages of the buffer follow.
        want_weights: Whether to return more than the output.
        none_alone: Whether each head is known to attend to a slot; it is if no slot is empty.

    Returns:
        The output [B, Hq, 1, D], the attention weights [B, NB, G, P] fp32, those of the buffer's pages last, and the
        logarithm of the sum of the exponentials of the scores, [B, H, G] fp32.
    """
    heads = owners.member.shape[1]
    none_alone = none_alone or empty is None
    grouped = q.squeeze(2).unflatten(1, (heads, -1))
    size = 0
    behind: Tensor | None = None
    if buffer is not None:
        assert empty is not None, "a buffer has an empty slot"
        size = empty.shape[-1]
        slots = buffer[0].shape[2]
        number = owners.head.shape[1] - heads * buffer_pages(slots, size)
        of_buffer = None if counts is None else counts[:, number:]
        behind = _buffer_scores(grouped, buffer[0], transform, empty[:, number:], of_buffer)
        counts = None if counts is None else counts[:, :number]
        empty = empty[:, :number]
        owners = owners.first(number)
    # An unused page gets the queries of the last head, and weights of 0: none of its slots is occupied.
    score = pages.scores(owners.for_pages(grouped), transform)
    if counts is not None:  # after scale and softcap, as everywhere
        score = score + counts[:, :, None]
    if empty is not None:
        score = score.masked_fill(empty[:, :, None], -torch.inf)
    top = _largest_scores(score, behind, owners, transform.sinks)
    if not none_alone:  # a row without any token has no score but -inf, and -inf minus -inf is NaN
        top = top.clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(score - owners.for_pages(top)[..., None])
    member = owners.member
    total = member @ weights.sum(-1)  # [B, H, G]
    mixed = pages.mix(weights)
    # A product with ones and zeros, not a scatter: it adds the pages of a head in one order on every device.
    out = (member @ mixed.flatten(2)).unflatten(2, mixed.shape[2:])
    if behind is not None and buffer is not None:
        behind = torch.exp(behind - top[..., None])
        total = total + behind.sum(-1)
        out = out + matmul(behind.to(buffer[1].dtype), buffer[1]).float()
    if transform.sinks is not None:
        total = total + torch.exp(transform.sinks.float().view(heads, -1) - top)
    if not none_alone:
        total = total.clamp_min(torch.finfo(torch.float32).tiny)  # 1 or more, but for a row without any token
    attended = (out / total[..., None]).to(q.dtype).flatten(1, 2).unsqueeze(2)
    if not want_weights:
        return attended, None, None
    weights = weights / owners.for_pages(total)[..., None]
    if behind is not None:
        weights = torch.cat([weights, _grouped_pages(behind / total[..., None], size)], 1)
    return attended, weights, top + total.log()


def _buffer_scores(
    grouped: Tensor, keys: Tensor, transform: ScoreTransform, empty: Tensor, counts: Tensor | None
) -> Tensor:
    """Scores of queries [B, H, G, D] against the keys of each head's buffer, [B, H, G, E] fp32.

    Args:
        grouped: The queries.
        keys: [B, H, E, D].
        transform: From products to attention weights.
        empty: Which slots of the buffer's pages hold no token, [B, NB, P] bool.
        counts: Logarithm of the number of tokens that each of these slots stands for, [B, NB, P] fp32, or None.
    """
    heads, slots = keys.shape[1:3]
    scores = transform.scores(grouped, keys)
    if counts is not None:
        scores = scores + from_pages(counts, heads, slots)[:, :, None]
    return scores.masked_fill(from_pages(empty, heads, slots)[:, :, None], -torch.inf)


def _largest_scores(score: Tensor, behind: Tensor | None, owners: Owners, sinks: Tensor | None) -> Tensor:
    """The largest score of each query over its head's pages, its buffer and its sink, [B, H, G] fp32."""
    # [B, H, NB, G] is small beside the slots.
    top = score.amax(-1)[:, None].masked_fill(owners.others[..., None], -torch.inf).amax(2)
    if behind is not None:
        top = torch.maximum(top, behind.amax(-1))
    if sinks is not None:
        top = torch.maximum(top, sinks.float().view(top.shape[1], -1))
    return top


def _grouped_pages(x: Tensor, size: int) -> Tensor:
    """Numbers of each head's slots, [B, H, G, E], in pages of `size` slots, [B, H * n, G, P]."""
    heads, group = x.shape[1:3]
    # The group takes the place of the row while slots become pages.
    paged = as_pages(x.flatten(1, 2), size)
    return paged.unflatten(1, (heads, group, -1)).transpose(2, 3).flatten(1, 2)


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

"""Attention of a decode step to columns of one softmax: the full-precision buffer, and the stages of a codec.

They are scored and mixed part by part: joining keys would copy the whole cache in every step, and torch 2.13's inductor
then loses the write of the new token (eager and aot_eager do not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention_part import Part
from kvpolicy.kernels.products import matmul, products, thin_mix
from kvpolicy.kernels.rotary import SlotRotary
from kvpolicy.protocols import At, Estimated, Stage, StageStore
from kvpolicy.statistics.windows import ScoreTransform

Rest = Callable[[Tensor], Estimated]
"""Estimates the slots that are not read, from the normalizer of those that are; see `Read.rest`."""


class Columns(Protocol):
    """Slots that a step attends to."""

    def score(self, queries: Tensor) -> Tensor:
        """Products of queries [B, H, G, D] with every key, [B, H, G, n] fp32, which attention changes in place."""
        ...

    def mix(self, weights: Tensor) -> Tensor:
        """Values weighted by the attention weights [B, H, G, n], [B, H, G, D']."""
        ...


class ExactColumns(NamedTuple):
    """Slots in full precision.

    Attributes:
        keys: [B, H, n, D].
        values: [B, H, n, D'], where D' is D or another size, or 0: whole keys take their place then, as in
            `kvpolicy.kernels.mixed_values`.
        known: Products of the queries with the keys, [B, H, G, n] fp32, if they are known; changed in place.
    """

    keys: Tensor
    values: Tensor
    known: Tensor | None = None

    def score(self, queries: Tensor) -> Tensor:
        """See `Columns.score`."""
        return products(queries, self.keys) if self.known is None else self.known

    def scores(self, queries: Tensor, transform: ScoreTransform) -> Tensor:
        """Scores of queries [B, H, G, D] where there are no other columns, [B, H, G, n] fp32."""
        return transform.scores(queries, self.keys) if self.known is None else transform.finish(self.known)

    def mix(self, weights: Tensor) -> Tensor:
        """See `Columns.mix`; in the dtype of the weights."""
        return matmul(weights, self.values if self.values.shape[3] else self.keys)


class StageColumns(NamedTuple):
    """The slots of one stage of a codec.

    Attributes:
        stage: The stage of the codec.
        store: Its tensors.
        rope: The rotary embedding of its slots, if keys are coded unrotated.
        size: How many slots it has.
        start: Its first slot in the layer.
        known: Products of the queries with the keys, [B, H, G, size] fp32, if they are known; changed in place.
    """

    stage: Stage
    store: StageStore
    rope: SlotRotary | None
    size: int
    start: int = 0
    known: Tensor | None = None

    def score(self, queries: Tensor) -> Tensor:
        """See `Columns.score`."""
        return self.stage.score(self.store, queries, self.rope) if self.known is None else self.known

    def mix(self, weights: Tensor) -> Tensor:
        """See `Columns.mix`; in fp32."""
        return self.stage.mix(self.store, weights)

    def keys(self, at: At) -> Tensor:
        """Rotated keys of the slots `at`, in the order that `At` describes."""
        keys = self.stage.keys(self.store, at)
        return keys if self.rope is None else self.rope.keys(keys, at)


class CodedColumns(tuple[StageColumns, ...]):
    """Every coded slot of a layer, stage by stage."""

    __slots__ = ()

    def known(self, products: Tensor) -> CodedColumns:
        """The same, whose products [B, H, G, n] with the queries of a step are known."""
        parts = products.split([part.size for part in self], -1)
        return CodedColumns(part._replace(known=own) for part, own in zip(self, parts, strict=True))

    def read(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Rotated keys and values of every slot, [B, H, C, D] for each stage; for a prompt after another."""
        return [
            (part.keys(every).to(dtype), part.stage.values(part.store, every).to(dtype))
            for part in self
            for every in [slice(0, part.size)]
        ]

    def keys_at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotated keys of coded slots of the layer [B, H, n], [B, H, n, D]; no other slot is decoded."""
        return self._at(slots, StageColumns.keys).to(dtype)

    def values_at(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of coded slots of the layer [B, H, n], [B, H, n, D]; no other slot is decoded."""
        return self._at(slots, lambda part, at: part.stage.values(part.store, at)).to(dtype)

    def _at(self, slots: Tensor, decode: Callable[[StageColumns, Tensor], Tensor]) -> Tensor:
        # How many of the slots lie in which stage depends on data, so each stage decodes as many. A slot of another
        # stage stands for the stage's first or last one, and its result is not taken.
        found: Tensor | None = None
        for part in self:
            own = decode(part, (slots - part.start).clamp(0, part.size - 1))
            found = own if found is None else torch.where((slots >= part.start)[..., None], own, found)
        assert found is not None, "there are no coded slots"
        return found


def attend_columns(
    q: Tensor,
    buffer: ExactColumns,
    others: Sequence[Columns],
    empty: Tensor | None,
    transform: ScoreTransform,
    want_weights: bool,
    counts: Tensor | None = None,
    rest: Rest | None = None,
    beside: Part | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend from one token per row to slots.

    Args:
        q: [B, Hq, 1, D].
        buffer: The full-precision slots.
        others: The slots that follow them; S slots in all.
        empty: Which slots hold no token, or are not read, [B, H, S] bool; None if there are none.
        transform: From products to attention weights.
        want_weights: Whether to return the attention weights.
        counts: Logarithm of the number of tokens that each slot stands for, [B, H, S] fp32; None if it is always one.
        rest: Estimates what is not read, beside `others`, or beside all slots if there are none.
        beside: Attention of the queries [B, H, G, 1, D] to other keys, which takes part in the softmax, without `rest`.
        mask: The mask that hides `empty`, [B, H or 1, S] in the dtype of the queries, if it is known.

    Returns:
        The output [B, Hq, 1, D'], and the attention weights [B, H, G, S] fp32, or None.
    """
    grouped = q.squeeze(2).unflatten(1, (buffer.keys.shape[1], -1))  # [B, H, G, D]: the group takes the queries' place
    plain = not want_weights and transform.softcap is None and transform.sinks is None and not others
    plain = plain and buffer.known is None and rest is None and beside is None
    # The mask of the fused function has the dtype of the queries, in which bf16 would round the counts.
    if plain and (counts is None or q.dtype == torch.float32):
        keys, values, _ = buffer
        mask = _mask(empty, counts, mask)
        if mask is not None:
            mask = mask[:, :, None].expand(*grouped.shape[:3], -1)
        values = values if values.shape[3] else keys
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=transform.scale)
        return out.flatten(1, 2).unsqueeze(2), None
    if others:
        raw = [part.score(grouped) for part in (buffer, *others)]
        sizes = [part.shape[-1] for part in raw]
        score = transform.finish(torch.cat(raw, -1))
    else:
        score = buffer.scores(grouped, transform)
        sizes = [score.shape[-1]]
    if counts is not None:
        score = score + counts[:, :, None]
    if empty is not None:
        score = score.masked_fill(empty[:, :, None], -torch.inf)
    others_add: Tensor | None = None
    if rest is not None:
        start = buffer.keys.shape[2] if others else 0  # the buffer is always read, and no reader divides it
        weights, others_add = with_rest(score, score[..., start:], transform, rest)
    elif beside is not None:  # other keys are one more column, whose score is their normalizer
        every = transform.weights(torch.cat([score, beside.normalizer], -1))
        weights = every[..., :-1]
        others_add = every[..., -1:] * beside.output.squeeze(3)
    else:
        weights = transform.weights(score)
    dtype = buffer.values.dtype
    first, *parts = weights.to(dtype).split(sizes, -1)
    mixed = buffer.mix(first)
    if others:
        # Added in fp32 and rounded once.
        mixed = sum((part.mix(own) for part, own in zip(others, parts, strict=True)), mixed.float())
    if others_add is not None:
        mixed = mixed.float() + others_add
    return mixed.to(dtype).flatten(1, 2).unsqueeze(2), weights


def _mask(empty: Tensor | None, counts: Tensor | None, known: Tensor | None) -> Tensor | None:
    """The mask of the fused function, [B, H or 1, S]: which slots are seen, or numbers to add to their scores."""
    if counts is not None:
        return counts if empty is None else counts.masked_fill(empty, -torch.inf)
    return ~empty if known is None and empty is not None else known


def with_rest(score: Tensor, of_entries: Tensor, transform: ScoreTransform, rest: Rest) -> tuple[Tensor, Tensor]:
    """Attention weights of slots, and what the slots that stand for the others add to the output.

    Args:
        score: Scores of the slots that are read, [B, H, G, n] fp32.
        of_entries: Those of them that belong to entries of a reader.
        transform: From scores to attention weights.
        rest: Estimates what is not read.

    Returns:
        [B, H, G, n] and [B, H, G, D] fp32.
    """
    estimated = rest(of_entries.logsumexp(-1))
    # One softmax over both, so that learned sinks take part once.
    every = torch.cat([score, estimated.scores], -1)
    # Masked again, since the softmax of nothing is NaN.
    weights = transform.weights(every).masked_fill(every == -torch.inf, 0)
    own, others = weights.split([score.shape[-1], estimated.scores.shape[-1]], -1)
    return own, thin_mix(others, estimated.values)

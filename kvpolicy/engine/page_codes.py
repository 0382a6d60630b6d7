"""Codes in pages, and of a prompt that waits: a slot has [B, NB, P, ...], and a head [B, H, X, ...].

A stage encodes and decodes as if every page were a head, with the entries of the head that owns it. So the parameters
of a head are stored once, however many pages it has, and stay right when a page is given to another head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.common import CHUNK_SLOTS, chunks, token_ranges
from kvpolicy.engine.pages import Owners, PageTable, of_their_heads, sum_pages
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.kernels.compiled import is_compiled
from kvpolicy.protocols import Calibration, Codec, Codes, Stage, StageStore
from kvpolicy.statistics.windows import ScoreTransform


def by_field(
    codec: Codec, codes: Codes, slots: Callable[[str, Tensor], Tensor], heads: Callable[[str, Tensor], Tensor]
) -> Codes:
    """Codes with other tensors: `slots` makes those with one entry per slot, `heads` those with one per head.

    Both get the name of the field and the tensor that it has.
    """
    per_head = codec.traits.per_head or ()
    fields = zip(codes._fields, codes, strict=True)
    return type(codes)(*[(heads if name in per_head else slots)(name, tensor) for name, tensor in fields])


def alloc_codes(
    codec: Codec, batch: int, heads: int, pages: int, size: int, head_dim: int, device: torch.device | str
) -> Codes:
    """Empty codes of `pages` pages of `size` slots; on the device `meta` too."""
    stage = codec.stages[0]
    paged = stage.alloc(batch, pages, size, head_dim, device)
    # Allocated for no slots, only to have what belongs to a head.
    of_heads = stage.alloc(batch, heads, 0, head_dim, device)
    return by_field(codec, paged, lambda name, t: t, lambda name, t: getattr(of_heads, name))


def encode(
    codec: Codec,
    codes: Codes,
    calibration: Calibration,
    keys: Tensor,
    values: Tensor,
    write_mask: Tensor,
    has_codes: Tensor,
) -> Codes:
    """Encode tokens of each head outside of the pages. Traceable, no host sync.

    Args:
        codec: The codec.
        codes: Codes of the layer, in pages. The entries of heads without any code may be fitted again, in place.
        calibration: The calibrated tensors of the stage.
        keys: [B, H, n, D].
        values: [B, H, n, D].
        write_mask: Which tokens are encoded, [B, H, n] bool.
        has_codes: Which heads hold coded tokens that stay, [B, H] bool.

    Returns:
        Codes; tensors with one entry per slot are [B, H, n, ...].
    """
    batch, heads, count, dim = keys.shape
    stage = codec.stages[0]
    fresh = stage.alloc(batch, heads, count, dim, keys.device)
    # The head's own parameters, not copies: what the stage fits to the first tokens is kept.
    fresh = by_field(codec, fresh, lambda name, t: t, lambda name, t: getattr(codes, name))
    slots = torch.arange(count, device=keys.device).expand(batch, heads, count)
    occupied = has_codes[..., None].expand(batch, heads, count)
    stage.write(StageStore(fresh, calibration), keys, values, slots, write_mask, occupied)
    return fresh


def decode_heads(
    codec: Codec, codes: Codes, calibration: Calibration, table: PageTable, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of all slots of each head, [B, H, n * P, D]; undefined beyond the pages of a head."""
    store = StageStore(by_field(codec, codes, lambda name, t: table.slots(t), lambda name, t: t), calibration)
    stage = codec.stages[0]
    every = slice(0, table.page.shape[-1] * _page_slots(codec, codes))
    return stage.keys(store, every).to(dtype), stage.values(store, every).to(dtype)


class CodedPages:
    """Coded pages as a step attends to them; see `kvpolicy.engine.page_slots.StoredPages`.

    Args:
        codec: The codec.
        codes: Its codes, in pages.
        calibration: The calibrated tensors of its stage.
        head: The head of each page, [B, NB]; the last one for a page that a row does not use.
        heads: H.
        dtype: The dtype that values are summed in.
    """

    def __init__(
        self, codec: Codec, codes: Codes, calibration: Calibration, head: Tensor, heads: int, dtype: torch.dtype
    ) -> None:
        """Find how the pages are read."""
        self._codec = codec
        self._codes = codes
        self._calibration = calibration
        self._head = head
        self._dtype = dtype
        slots = _page_slots(codec, codes)
        self._head_slots = head.numel() * slots // heads  # of an average head in all rows
        # All pages are read at once by a compiled function, which has no use for chunks, and decodes no page. Else as
        # many slots of a head at a time as without pages.
        self._reads_rows = is_compiled(head[..., None], self._head_slots)
        self._ranges = chunks(head.shape[1], each=max(-(-CHUNK_SLOTS * heads // slots), 1))
        # Scores and sums share what the heads of pages have; of several ranges, each is asked for when it is read.
        self._whole = self._rows() if self._reads_rows else None
        if self._whole is None and len(self._ranges) == 1:
            self._whole = self._part(self._ranges[0])

    def scores(self, queries: Tensor, owners: Owners, transform: ScoreTransform) -> Tensor:
        """See `StoredPages.scores`."""
        return transform.finish(self._products(owners.for_pages(queries)))

    def _products(self, queries: Tensor) -> Tensor:
        if self._whole is None:
            return torch.cat([self._stage.score(self._part(at), queries[:, at], None) for at in self._ranges], 1)
        if not self._reads_rows:
            return self._stage.score(self._whole, queries, None)
        return self._stage.score(self._whole, _as_rows(queries), None).unflatten(0, self._head.shape).squeeze(2)

    def mix(self, weights: Tensor, share: Tensor) -> Tensor:
        """See `StoredPages.mix`."""
        return sum_pages(self._mix(weights.to(self._dtype)), share)

    def _mix(self, weights: Tensor) -> Tensor:
        """Weighted values of each page, [B, NB, G, D] fp32."""
        if self._whole is None:
            return torch.cat([self._stage.mix(self._part(at), weights[:, at]) for at in self._ranges], 1)
        if not self._reads_rows:
            return self._stage.mix(self._whole, weights)
        return self._stage.mix(self._whole, _as_rows(weights)).unflatten(0, self._head.shape).squeeze(2)

    @property
    def _stage(self) -> Stage:
        return self._codec.stages[0]

    def _rows(self) -> StageStore:
        """Every page as a row of one head: functions are compiled for a number of heads, and for any number of rows."""
        codes = by_field(self._codec, self._codes, lambda name, t: t, lambda name, t: of_their_heads(t, self._head))
        return StageStore(type(codes)(*map(_as_rows, codes)), self._calibration, page_slots=self._head_slots)

    def _part(self, at: slice) -> StageStore:
        """The pages of a range."""
        head = self._head[:, at]
        codes = by_field(self._codec, self._codes, lambda name, t: t[:, at], lambda name, t: of_their_heads(t, head))
        return StageStore(codes, self._calibration)


def _as_rows(t: Tensor) -> Tensor:
    """[B, NB, ...] as [B * NB, 1, ...]."""
    return t.flatten(0, 1).unsqueeze(1)


def _page_slots(codec: Codec, codes: Codes) -> int:
    """Slots of a page."""
    per_head = codec.traits.per_head or ()
    return next(t.shape[2] for name, t in zip(codes._fields, codes, strict=True) if name not in per_head)


class PromptCodes(NamedTuple):
    """The codes of P tokens of each head. The codec encodes every token by itself, see `fits_pages`.

    Attributes:
        codec: The codec, of one stage.
        calibration: The calibrated tensors of its stage.
        codes: Codes of P slots.
        columns: P.
    """

    codec: Codec
    calibration: Calibration
    codes: Codes
    columns: int

    @classmethod
    def empty(cls, codec: Codec, calibration: Calibration, like: Tensor) -> PromptCodes:
        """The codes of no tokens, for keys like `like` [B, H, P, D]."""
        batch, heads, _, dim = like.shape
        return cls(codec, calibration, codec.stages[0].alloc(batch, heads, 0, dim, like.device), 0)

    def extended(self, keys: Tensor, values: Tensor, valid: Tensor, begun: Tensor) -> PromptCodes:
        """The codes of these tokens and of later ones.

        Args:
            keys: Keys of the later tokens, [B, H, n, D].
            values: [B, H, n, D].
            valid: Which of them are not padding, [B, n] bool.
            begun: Which rows have tokens among the earlier ones, [B] bool: what is fitted to these stays.
        """
        heads = keys.shape[1]
        written = valid[:, None].expand(-1, heads, -1)
        has_codes = begun[:, None].expand(-1, heads)
        fresh = encode(self.codec, self.codes, self.calibration, keys, values, written, has_codes)

        def both(name: str, new: Tensor) -> Tensor:
            return torch.cat([getattr(self.codes, name), new], 2)

        codes = by_field(self.codec, fresh, both, lambda name, t: t)
        return self._replace(codes=codes, columns=self.columns + keys.shape[2])

    def decoded(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, P, D] in the dtype of `like` [B, H, ..., D]."""
        stage = self.codec.stages[0]
        store = StageStore(self.codes, self.calibration)
        shape = (*like.shape[:2], self.columns, like.shape[3])
        keys = like.new_empty(shape)
        values = like.new_empty(shape)
        # In ranges, since codes are decoded in fp32.
        for at in token_ranges(self.columns):
            keys[:, :, at] = stage.keys(store, at)
            values[:, :, at] = stage.values(store, at)
        return keys, values

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> PromptCodes:
        """The same with `fn` of every tensor, which selects or repeats rows."""
        return self._replace(codes=map_state(fn, self.codes))

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return sum(t.nbytes for t in tensors(self.codes))

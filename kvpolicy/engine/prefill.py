"""A prompt that was attended to: what is kept of it until the layer's budget is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.attention import Past, QueryWindow, ScoreTransform
from kvpolicy.engine.prompt_codes import PromptCodes
from kvpolicy.engine.reading import AbsoluteSums
from kvpolicy.protocols import Calibration, Codec, Forward, MeanRotation, QueryMoments


class PendingPrompt(NamedTuple):
    """A prefill or chunk that was attended to and awaits its budget. It holds no autograd graph.

    Attributes:
        keys: [B, H, P, D]; empty if there are codes.
        values: [B, H, P, D]; likewise.
        valid: Which tokens are not padding, [B, P] bool; None if all are.
        transform: From products to attention weights.
        attn_sum: Attention summed over the queries, [B, Hq, S + P], if the selector needs it.
        window: The newest queries, if the selector needs them.
        probes: The probe queries, if the selector needs them.
        below_mean: The newest queries to count those that attend to a token less than the mean, if needed.
        moments: Moments of the queries without their rotation, if the selector needs them.
        mean_rotation: The layer's rotary embedding at the mean of some positions, likewise.
        query_absmax: Largest absolute query of each channel, [B, H, D] fp32, if the codec needs it.
        forward: The arguments of the attention module, if the selector needs them.
        replay: Scores of the replayed context, [B, H, P] fp32, -1 for tokens that were not replayed; None if there was
            no replay.
        wants_vectors: Whether the selector needs keys and values.
        sums: Sums of its absolute queries and keys, if the reader needs the salience of their channels.
        codes: Its keys and values as codes, if it waits as such.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    transform: ScoreTransform
    attn_sum: Tensor | None = None
    window: QueryWindow | None = None
    probes: QueryWindow | None = None
    below_mean: QueryWindow | None = None
    moments: QueryMoments | None = None
    mean_rotation: MeanRotation | None = None
    query_absmax: Tensor | None = None
    forward: Forward | None = None
    wants_vectors: bool = False
    replay: Tensor | None = None
    sums: AbsoluteSums | None = None
    codes: PromptCodes | None = None

    @property
    def columns(self) -> int:
        """P."""
        return self.keys.shape[2] if self.codes is None else self.codes.columns

    def encoded(self, codec: Codec, calibration: Calibration) -> PendingPrompt:
        """The same with codes instead of keys and values, as it waits; its codec encodes every token by itself."""
        if self.codes is not None:
            return self
        none = PromptCodes.empty(codec, calibration, self.keys)
        flags = self.flags
        codes = none.extended(self.keys, self.values, flags, torch.zeros_like(flags[:, 0]))
        batch, heads, _, dim = self.keys.shape
        empty = self.keys.new_empty(batch, heads, 0, dim)  # a view would keep all keys alive
        return self._replace(keys=empty, values=empty, codes=codes)

    def decoded(self) -> PendingPrompt:
        """The same with keys and values instead of codes."""
        if self.codes is None:
            return self
        keys, values = self.codes.decoded(self.keys)
        return self._replace(keys=keys, values=values, codes=None)

    def lengths(self, seen: Tensor) -> Tensor:
        """Tokens that each row has seen with this prompt, [B] int64, after `seen` [B] tokens."""
        return seen + (self.columns if self.valid is None else self.valid.sum(-1))

    def positions(self, seen: Tensor) -> Tensor:
        """Position of each token in its row after `seen` [B] tokens, [B, P] int32, -1 for padding."""
        return token_positions(self.valid, self.columns, seen)

    @property
    def idle(self) -> Tensor | None:
        """Rows that have nothing but padding, [B] bool; None without padding."""
        return None if self.valid is None else ~self.valid.any(-1)

    @property
    def reads_past(self) -> bool:
        """Whether the statistics of this prompt need the keys of the slots before it."""
        return (
            self.window is not None
            or self.probes is not None
            or self.below_mean is not None
            or self.forward is not None
            or self.wants_vectors
        )

    @property
    def flags(self) -> Tensor:
        """Which tokens are not padding, [B, P] bool."""
        shape = self.keys.shape[0], self.columns
        return torch.ones(shape, dtype=torch.bool, device=self.keys.device) if self.valid is None else self.valid

    def after(self, past: Past | None) -> Past:
        """All its tokens as a past of the next chunk, behind the slots of its layer."""
        if self.codes is not None:
            return self.decoded().after(past)
        occupied = self.flags[:, None].expand(-1, self.keys.shape[1], -1)
        if past is None:
            return Past(self.keys, self.values, occupied)
        keys = torch.cat([past.keys, self.keys], 2)
        values = torch.cat([past.values, self.values], 2)
        counts = None if past.counts is None else F.pad(past.counts, (0, self.keys.shape[2]))
        return Past(keys, values, torch.cat([past.occupied, occupied], -1), counts)

    def joined(self, later: PendingPrompt, window: int, below_mean: int) -> PendingPrompt:
        """This prompt and the next chunk of it, which attended to it, as one.

        Args:
            later: The next chunk.
            window: The most queries to keep in `window`.
            below_mean: The same in `below_mean`.
        """
        both = self.valid is not None or later.valid is not None
        attn_sum = later.attn_sum
        if self.attn_sum is not None and attn_sum is not None:
            # The columns of the later sums begin with those of the earlier ones, which its queries had as a past.
            attn_sum = attn_sum + F.pad(self.attn_sum, (0, attn_sum.shape[-1] - self.attn_sum.shape[-1]))
        peaks = [peak for peak in (self.query_absmax, later.query_absmax) if peak is not None]
        before = self.columns
        if self.codes is None:
            keys, values = (torch.cat(pair, 2) for pair in zip(self[:2], later[:2], strict=True))
            codes = None
        else:
            keys, values = self[:2]
            codes = self.codes.extended(later.keys, later.values, later.flags, self.flags.any(-1))
        return later._replace(
            keys=keys,
            values=values,
            codes=codes,
            valid=torch.cat([self.flags, later.flags], 1) if both else None,
            attn_sum=attn_sum,
            window=_newest(self.window, later.window, before, window),
            probes=_both(self.probes, later.probes, before),
            below_mean=_newest(self.below_mean, later.below_mean, before, below_mean),
            moments=_added(self.moments, later.moments),
            query_absmax=torch.stack(peaks).amax(0) if peaks else None,
            sums=_added(self.sums, later.sums),
        )

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> PendingPrompt:
        """The same with `fn` of every per-row tensor, which selects or repeats rows."""

        def of_window(window: QueryWindow | None) -> QueryWindow | None:
            return None if window is None else QueryWindow(fn(window.queries), fn(window.at))

        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else fn(t)

        return self._replace(
            keys=fn(self.keys),
            values=fn(self.values),
            valid=of(self.valid),
            attn_sum=of(self.attn_sum),
            window=of_window(self.window),
            probes=of_window(self.probes),
            below_mean=of_window(self.below_mean),
            moments=None if self.moments is None else QueryMoments(*map(fn, self.moments)),
            query_absmax=of(self.query_absmax),
            replay=of(self.replay),
            sums=None if self.sums is None else AbsoluteSums(*map(fn, self.sums)),
            codes=None if self.codes is None else self.codes.map_rows(fn),
        )

    def owned(self) -> PendingPrompt:
        """The same with memory of its own, so that keys and values do not keep a larger tensor alive."""
        keys, values = (t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for t in self[:2])
        # A mask of bool is the caller's own tensor, who may use it again for the next chunk.
        return self._replace(keys=keys, values=values, valid=None if self.valid is None else self.valid.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = [self.keys, self.values, self.valid, self.attn_sum, *(self.window or ()), *(self.probes or ())]
        parts += [*(self.below_mean or ()), *(self.moments or ()), self.query_absmax, self.replay, *(self.sums or ())]
        if self.forward is not None:
            parts += [self.forward.hidden_states, self.forward.queries]
        codes = 0 if self.codes is None else self.codes.nbytes
        return codes + sum(t.nbytes for t in parts if t is not None)


def token_positions(valid: Tensor | None, columns: int, seen: Tensor) -> Tensor:
    """Position of each of `columns` tokens in its row after `seen` [B] tokens, [B, P] int32, -1 for padding."""
    if valid is None:
        return (seen[:, None] + torch.arange(columns, device=seen.device)).to(torch.int32)
    count = seen[:, None] + valid.long().cumsum(-1) - 1
    return count.where(valid, -1).to(torch.int32)


def _both(first: QueryWindow | None, second: QueryWindow | None, columns: int) -> QueryWindow | None:
    """Queries of two chunks, the second of which begins after `columns` columns."""
    if first is None or second is None:
        return first or second
    # An absent query stays at -1: if it were shifted, it would stand at the last column of the first chunk.
    at = torch.where(second.at < 0, -1, second.at + columns)
    return QueryWindow(torch.cat([first.queries, second.queries], 2), torch.cat([first.at, at], 1))


def _newest(first: QueryWindow | None, second: QueryWindow | None, columns: int, width: int) -> QueryWindow | None:
    """The newest `width` queries of two chunks, absent ones first."""
    both = _both(first, second, columns)
    if both is None:
        return None
    order = (both.at >= 0).to(torch.uint8).argsort(dim=-1, stable=True)[:, -width:]
    index = order[:, None, :, None].expand(-1, both.queries.shape[1], -1, both.queries.shape[-1])
    return QueryWindow(both.queries.gather(2, index), both.at.gather(1, order))


_Sums = TypeVar("_Sums", QueryMoments, AbsoluteSums)


def _added(first: _Sums | None, second: _Sums | None) -> _Sums | None:
    """The sums over the queries of both."""
    if first is None or second is None:
        return first or second
    return type(first)(*(a + b for a, b in zip(first, second, strict=True)))

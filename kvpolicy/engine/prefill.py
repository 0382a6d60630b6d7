"""A prompt that was attended to: what is kept of it until the layer's budget is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.engine.page_codes import PromptCodes
from kvpolicy.engine.replayed_queries import ReplayedQueries
from kvpolicy.engine.state import owned
from kvpolicy.engine.trimmed_tokens import TrimmedTokens
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import Calibration, Codec
from kvpolicy.statistics import Forward
from kvpolicy.statistics.statistic import Statistic, first_of
from kvpolicy.statistics.windows import Past, ScoreTransform, token_positions
from kvpolicy.text.errors import KVPolicyError


class PendingPrompt(NamedTuple):
    """A prefill or chunk that was attended to and awaits its budget. It holds no autograd graph.

    Attributes:
        keys: [B, H, P, D]; empty if there are codes.
        values: [B, H, P, D]; empty if there are codes.
        valid: Which tokens are not padding, [B, P] bool; None if all are.
        transform: From products to attention weights.
        statistics: Statistics of its queries, in the order of `prompt_statistics.wanted`.
        forward: The arguments of the attention module, if the selector needs them.
        replay: Scores of the replayed context, [B, H, P] fp32, -1 for tokens that were not replayed; None if there was
            no replay.
        codes: Its keys and values as codes, if it waits as such.
        rotation: How its keys are rotated, once its budget is known, if the selector needs them without it.
        replayed: Queries of the replay, if the merger asks for some.
        trimmed: What is known of the tokens that are left, if some were dropped: keys and values are theirs.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor | None
    transform: ScoreTransform
    statistics: tuple[Statistic[Any], ...] = ()
    forward: Forward | None = None
    replay: Tensor | None = None
    codes: PromptCodes | None = None
    rotation: KeyRotation | None = None
    replayed: ReplayedQueries | None = None
    trimmed: TrimmedTokens | None = None

    @property
    def columns(self) -> int:
        """P."""
        if self.trimmed is not None:
            return self.trimmed.columns
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
        return self.forward is not None or any(each.reads_past for each in self.statistics)

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

    def joined(self, later: PendingPrompt) -> PendingPrompt:
        """This prompt and the next chunk of it, which attended to it, as one."""
        both = self.valid is not None or later.valid is not None
        pairs: Any = zip(self.statistics, later.statistics, strict=True)
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
            statistics=tuple(first.joined(second, self.columns) for first, second in pairs),
        )

    def beside(self, reader: PendingPrompt) -> PendingPrompt:
        """This prompt with the statistics of a layer that reads its keys, of which each KV head then has more queries.

        Raises:
            KVPolicyError: If the layers make other weights of the same scores.
        """
        if reader.transform != self.transform or self.transform.sinks is not None:
            raise KVPolicyError(
                "Layers that read the same keys must turn scores into attention alike, and have no learned sinks, got "
                f"{self.transform} and {reader.transform}; try another model."
            )
        heads = self.values.shape[1]
        pairs = ((each, first_of(type(each), reader.statistics)) for each in self.statistics)
        found = (each if other is None else each.beside(other, heads) for each, other in pairs)
        return self._replace(statistics=tuple(found))

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> PendingPrompt:
        """The same with `fn` of every per-row tensor, which selects or repeats rows."""

        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else fn(t)

        return self._replace(
            keys=fn(self.keys),
            values=fn(self.values),
            valid=of(self.valid),
            statistics=tuple(each.map_rows(fn) for each in self.statistics),
            replay=of(self.replay),
            codes=None if self.codes is None else self.codes.map_rows(fn),
            replayed=None if self.replayed is None else ReplayedQueries(*map(fn, self.replayed)),
            trimmed=None if self.trimmed is None else self.trimmed.map_rows(fn),
        )

    def owned(self) -> PendingPrompt:
        """The same in separate memory, so that keys and values do not keep a larger tensor alive."""
        keys, values = map(owned, self[:2])
        # A mask of bool is the caller's own tensor, who may use it again for the next chunk.
        return self._replace(keys=keys, values=values, valid=None if self.valid is None else self.valid.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = [self.keys, self.values, self.valid, self.replay, *(self.replayed or ())]
        parts += [tensor for each in self.statistics for tensor in each.tensors]
        parts += [] if self.trimmed is None else self.trimmed.tensors
        if self.forward is not None:
            parts += [self.forward.hidden_states, self.forward.queries]
        codes = 0 if self.codes is None else self.codes.nbytes
        return codes + sum(t.nbytes for t in parts if t is not None)

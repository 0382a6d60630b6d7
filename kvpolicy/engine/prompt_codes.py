"""Keys and values of a prompt that waits, in the codes of its layer's codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.common import token_ranges
from kvpolicy.engine.page_codes import by_field, encode
from kvpolicy.engine.state import map_state, tensors
from kvpolicy.protocols import Calibration, Codec, Codes, StageStore


class PromptCodes(NamedTuple):
    """The codes of P tokens of each head. The codec encodes every token by itself, see `Traits.fits_pages`.

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

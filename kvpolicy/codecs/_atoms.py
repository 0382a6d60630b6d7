"""Keys or values of a layer as atoms and coefficients, in the bytes that a codec stores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _sparse
from kvpolicy.codecs._common import is_fresh, put, take
from kvpolicy.codecs._pursuit import Solver, pursue
from kvpolicy.codecs._sparse import Words, spell, unit
from kvpolicy.codecs.packing import pack, round_to_half, unpack
from kvpolicy.protocols import At

_FP16 = torch.finfo(torch.float16).max
_FP8 = torch.finfo(torch.float8_e4m3fn).max
_TINY = 2.0**-24  # the least that fp16 has


class Side(NamedTuple):
    """The codes of keys, or of values, and their dictionary.

    Attributes:
        numbers: [B, H, C, s] int16, or [B, H, C, bytes] uint8 where packed.
        coef: [B, H, C, s] fp16, or the bits of fp8 as uint8.
        scale: What coefficients in fp8 are multiplied by, [B, H, 1, 1] fp16; [B, H, 0, 1] with others.
        guard: Atoms taken from what was coded, [B, H, guard, d] fp16.
        shared: The dictionary, [N, d] fp32.
        online: More atoms of each head, [B, H, M, d] in any dtype and of any length.
        parts: Chunks of channels that a vector is coded in.
        bits: Of a packed number; 0 where numbers are int16.
    """

    numbers: Tensor
    coef: Tensor
    scale: Tensor
    guard: Tensor
    shared: Tensor
    online: Tensor
    parts: int
    bits: int

    @property
    def slots(self) -> int:
        """How many."""
        return self.numbers.shape[2]

    def words(self) -> Words:
        """The dictionary of each head. The guard comes first, so that atoms keep their numbers without online ones."""
        return self._words(self.guard)

    def read(self, at: At) -> tuple[Tensor, Tensor]:
        """Atoms, int64, and coefficients, fp32, of the slots `at`, each [B, H, n, parts, s / parts]."""
        coef, index = take(self.coef, at), take(self.numbers, at)
        if self.bits:
            index = unpack(index, self.bits, coef.shape[-1])
        if coef.dtype == torch.uint8:
            coef = coef.view(torch.float8_e4m3fn).float() * self.scale.float()
        return index.long().unflatten(-1, (self.parts, -1)), coef.float().unflatten(-1, (self.parts, -1))

    def spell(self, words: Words, table: Tensor, at: At) -> Tensor:
        """Vectors of the slots `at`, [B, H, n, D] fp32; see `_sparse.spell`."""
        return spell(words, table, *self.read(at)).flatten(-2)

    def score(self, words: Words, queries: Tensor) -> Tensor:
        """Products of queries with every slot's vector; see `_sparse.score`."""
        return _sparse.score(words, queries, self.read, self.slots)

    def mix(self, weights: Tensor) -> Tensor:
        """Every slot's vector, weighted and summed; see `_sparse.mix`."""
        return _sparse.mix(self.words(), weights, self.read, self.parts)

    def write(self, x: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor, solver: Solver) -> None:
        """Code vectors `x` [B, H, n, D] into slots, in place; see `Stage.write`."""
        vectors = torch.where(write_mask[..., None], x.float(), 0).reshape(*x.shape[:2], -1, self.shared.shape[1])
        pairs = self.coef.shape[-1] // self.parts
        if self.guard.shape[2]:
            self._renew_guard(vectors, pairs, write_mask, occupied)
        index, coef = pursue(vectors, self.words(), pairs, solver)
        index, coef = (t.reshape(*x.shape[:3], -1) for t in (index, coef))
        put(self.numbers, pack(index, self.bits) if self.bits else index.to(torch.int16), slots, write_mask)
        put(self.coef, self._small(coef, write_mask, occupied), slots, write_mask)

    def _words(self, guard: Tensor) -> Words:
        return Words(self.shared, torch.cat([unit(guard), unit(self.online)], 2))

    def _renew_guard(self, vectors: Tensor, pairs: int, write_mask: Tensor, occupied: Tensor) -> None:
        """In heads without an occupied slot, make atoms of the worst-coded vectors of [B, H, m, d]."""
        words = self._words(self.guard[:, :, :0])
        rest = vectors - spell(words, words.table(), *pursue(vectors, words, pairs))
        size, lost = (vectors * vectors).sum(-1), (rest * rest).sum(-1)
        worst = (lost / size.masked_fill(size == 0, 1)).argsort(dim=-1, descending=True, stable=True)
        taken = unit(take(vectors, worst[:, :, : self.guard.shape[2]]))
        renewed = is_fresh(write_mask, occupied)
        self.guard[:, :, : taken.shape[2]].copy_(torch.where(renewed, taken.half(), self.guard[:, :, : taken.shape[2]]))
        self.guard[:, :, taken.shape[2] :].masked_fill_(renewed, 0)

    def _small(self, coef: Tensor, write_mask: Tensor, occupied: Tensor) -> Tensor:
        """Coefficients [B, H, n, s] as they are stored; too large ones are clipped."""
        if self.coef.dtype == torch.float16:
            return coef.clamp(-_FP16, _FP16).half()
        most = coef.abs().amax((2, 3), keepdim=True) / _FP8
        renewed = is_fresh(write_mask, occupied)
        scale = torch.where(renewed, round_to_half(most.clamp(_TINY, _FP16)), self.scale.float())
        self.scale.copy_(scale.half())
        code = (coef / scale.masked_fill(scale == 0, 1)).clamp(-_FP8, _FP8)
        return code.to(torch.float8_e4m3fn).view(torch.uint8)

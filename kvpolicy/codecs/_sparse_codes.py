"""Keys or values of a layer as pairs of an atom and a coefficient, in the form in which a codec stores them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _sparse
from kvpolicy.codecs._common import is_empty_head, put, take
from kvpolicy.codecs._pursuit import Solver, pursue
from kvpolicy.codecs._sparse import Dictionary, reconstruct, unit
from kvpolicy.kernels.packing import pack, round_to_half, unpack
from kvpolicy.protocols import At

_FP16 = torch.finfo(torch.float16).max
_FP8 = torch.finfo(torch.float8_e4m3fn).max
_FP16_TINY = 2.0**-24
"""The smallest positive number of fp16."""


class SparseCodes(NamedTuple):
    """The codes of keys, or of values, with their dictionary.

    Attributes:
        atom_index: Atom indices, [B, H, C, nnz] int16, or [B, H, C, bytes] uint8 if packed.
        coef: Coefficients, [B, H, C, nnz] fp16, or the bits of fp8 as uint8.
        scale: The factor of coefficients in fp8, [B, H, 1, 1] fp16; [B, H, 0, 1] for fp16.
        outlier_atoms: Atoms taken from the encoded vectors, [B, H, outliers, d] fp16.
        shared: The dictionary of the model, [N, d] fp32.
        prompt_atoms: Additional atoms of each head, [B, H, M, d] in any dtype and of any length.
        parts: Chunks of channels into which a vector is split.
        bits: Bits of a packed index; 0 for int16.
    """

    atom_index: Tensor
    coef: Tensor
    scale: Tensor
    outlier_atoms: Tensor
    shared: Tensor
    prompt_atoms: Tensor
    parts: int
    bits: int

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.atom_index.shape[2]

    def dictionary(self) -> Dictionary:
        """The dictionary of each head.

        Outlier atoms come before prompt atoms, so that their indices do not depend on the number of prompt atoms.
        """
        return self._dictionary(self.outlier_atoms)

    def read(self, at: At) -> tuple[Tensor, Tensor]:
        """Atom indices, int64, and coefficients, fp32, of the slots `at`, each [B, H, n, parts, nnz / parts]."""
        coef = take(self.coef, at)
        index = take(self.atom_index, at)
        if self.bits:
            index = unpack(index, self.bits, coef.shape[-1])
        if coef.dtype == torch.uint8:
            coef = coef.view(torch.float8_e4m3fn).float() * self.scale.float()
        return index.long().unflatten(-1, (self.parts, -1)), coef.float().unflatten(-1, (self.parts, -1))

    def reconstruct(self, dictionary: Dictionary, table: Tensor, at: At) -> Tensor:
        """Vectors of the slots `at`, [B, H, n, D] fp32; see `_sparse.reconstruct`."""
        return reconstruct(dictionary, table, *self.read(at)).flatten(-2)

    def score(self, dictionary: Dictionary, queries: Tensor) -> Tensor:
        """Products of queries with the vectors of all slots; see `_sparse.score`."""
        return _sparse.score(dictionary, queries, self.read, self.slots)

    def mix(self, weights: Tensor) -> Tensor:
        """Weighted sum of the vectors of all slots; see `_sparse.mix`."""
        return _sparse.mix(self.dictionary(), weights, self.read, self.parts)

    def write(self, x: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor, solver: Solver) -> None:
        """Encode vectors `x` [B, H, n, D] into slots, in place; see `Stage.write`."""
        # Masked tokens must not count in a fitted scale or become outlier atoms: zero vectors have coefficients of 0.
        vectors = torch.where(write_mask[..., None], x.float(), 0).reshape(*x.shape[:2], -1, self.shared.shape[1])
        pairs = self.coef.shape[-1] // self.parts
        if self.outlier_atoms.shape[2]:
            # Before the pursuit, which may select the new atoms.
            self._fit_outlier_atoms(vectors, pairs, write_mask, occupied)
        index, coef = (t.reshape(*x.shape[:3], -1) for t in pursue(vectors, self.dictionary(), pairs, solver))
        put(self.atom_index, pack(index, self.bits) if self.bits else index.to(torch.int16), slots, write_mask)
        put(self.coef, self._stored(coef, write_mask, occupied), slots, write_mask)

    def _dictionary(self, outlier_atoms: Tensor) -> Dictionary:
        return Dictionary(self.shared, torch.cat([unit(outlier_atoms), unit(self.prompt_atoms)], 2))

    def _fit_outlier_atoms(self, vectors: Tensor, pairs: int, write_mask: Tensor, occupied: Tensor) -> None:
        """In heads without an occupied slot, make atoms of the vectors [B, H, m, d] with the largest relative error."""
        # Without outlier atoms, since those in store are replaced.
        dictionary = self._dictionary(self.outlier_atoms[:, :, :0])
        error = vectors - reconstruct(dictionary, dictionary.table(), *pursue(vectors, dictionary, pairs))
        size = (vectors * vectors).sum(-1)
        relative = (error * error).sum(-1) / size.masked_fill(size == 0, 1)
        worst = relative.argsort(dim=-1, descending=True, stable=True)
        atoms = unit(take(vectors, worst[:, :, : self.outlier_atoms.shape[2]]))
        # There may be fewer vectors than outlier atoms. The others become zero vectors, which are never selected.
        count = atoms.shape[2]
        is_fitted = is_empty_head(write_mask, occupied)
        stored = self.outlier_atoms[:, :, :count]
        stored.copy_(torch.where(is_fitted, atoms.half(), stored))
        self.outlier_atoms[:, :, count:].masked_fill_(is_fitted, 0)

    def _stored(self, coef: Tensor, write_mask: Tensor, occupied: Tensor) -> Tensor:
        """Coefficients [B, H, n, nnz] in the dtype in which they are stored, clipped to its range."""
        if self.coef.dtype == torch.float16:
            return coef.clamp(-_FP16, _FP16).half()
        # The scale is fitted to the first write of a head and stays until all of its tokens are gone, since the codes
        # of other slots refer to it.
        fitted = round_to_half((coef.abs().amax((2, 3), keepdim=True) / _FP8).clamp(_FP16_TINY, _FP16))
        scale = torch.where(is_empty_head(write_mask, occupied), fitted, self.scale.float())
        self.scale.copy_(scale.half())
        code = (coef / scale.masked_fill(scale == 0, 1)).clamp(-_FP8, _FP8)
        return code.to(torch.float8_e4m3fn).view(torch.uint8)

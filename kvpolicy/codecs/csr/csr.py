"""CSR: a few atoms of a dictionary per vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._files import check_model, load
from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import CHUNK_SLOTS, SingleStage, is_empty_head, put, score_by_chunks, take
from kvpolicy.codecs.csr import sparse
from kvpolicy.codecs.csr.dictionaries import dictionary, key_dictionary, size, value_dictionary, width
from kvpolicy.codecs.csr.pursuit import Solver, pursue
from kvpolicy.codecs.csr.sparse import Dictionary, reconstruct, unit
from kvpolicy.kernels.packing import pack, packed_width, round_to_half, unpack
from kvpolicy.kernels.products import products
from kvpolicy.protocols import ALL_HEADS, At, ModelInfo, Others, RotaryView, Search, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy

_FP16 = torch.finfo(torch.float16).max
_FP8 = torch.finfo(torch.float8_e4m3fn).max
_FP16_TINY = 2.0**-24
"""The smallest positive number of fp16."""


@dataclass(frozen=True, slots=True)
class ReadTop(Search):
    """A step reads the slots of the highest approximate scores; see `CSR.score`."""

    option: ClassVar[str] = "read_top_k"  # pyright: ignore[reportIncompatibleMethodOverride]


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
        """Vectors of the slots `at`, [B, H, n, D] fp32; see `sparse.reconstruct`."""
        return reconstruct(dictionary, table, *self.read(at)).flatten(-2)

    def score(self, dictionary: Dictionary, queries: Tensor) -> Tensor:
        """Products of queries with the vectors of all slots; see `sparse.score`."""
        return sparse.score(dictionary, queries, self.read, self.slots)

    def mix(self, weights: Tensor) -> Tensor:
        """Weighted sum of the vectors of all slots; see `sparse.mix`."""
        return sparse.mix(self.dictionary(), weights, self.read, self.parts)

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


class CSRDictionaries(NamedTuple):
    """The dictionaries of a layer, shared by its heads and by the layers of its group.

    Attributes:
        keys: [N, D] fp32, unit vectors; zero vectors pad a dictionary that is smaller than that of another group.
        values: [N, D / value_chunks] fp32, unit vectors, padded as `keys`.
    """

    keys: Tensor
    values: Tensor


class CSRCodes(NamedTuple):
    """The tensors of one layer; `x` is 1 with coefficients in fp8, and 0 otherwise.

    Attributes:
        key_index: Atom indices, [B, H, C, nnz] int16, or [B, H, C, bytes] uint8 if packed.
        key_coef: Coefficients, [B, H, C, nnz] fp16, or the bits of fp8 as uint8.
        key_scale: Scales of the coefficients, [B, H, x, 1] fp16.
        key_outlier_atoms: [B, H, outlier_atoms, D] fp16.
        value_index: Like `key_index`; the pairs of the first chunk of a value come first.
        value_coef: Like `key_coef`.
        value_scale: Like `key_scale`.
        value_outlier_atoms: [B, H, outlier_atoms, D / value_chunks] fp16.
    """

    key_index: Tensor
    key_coef: Tensor
    key_scale: Tensor
    key_outlier_atoms: Tensor
    value_index: Tensor
    value_coef: Tensor
    value_scale: Tensor
    value_outlier_atoms: Tensor


@strategy
class CSR(SingleStage):
    """Store each vector as a sum of a few atoms of a dictionary, found by matching pursuit.

    A key is stored as `nnz` pairs of an atom index and a coefficient. A value is split into `value_chunks` chunks of
    channels with `nnz / value_chunks` pairs each. The dictionary was learned once for a model and belongs to it. The
    newest tokens of the prompt stay in full precision and serve as additional atoms. With `nnz=8`, an element takes 2
    bits at a head dimension of 128.

    Args:
        nnz: Pairs per key and per value, a multiple of `value_chunks`.
        value_chunks: Chunks of a value: 1, 2 or 4.
        key_space: Whether keys are encoded without the rotary embedding (`unrotated`) or as attention sees them
            (`rotated`), which needs no reconstruction of keys.
        solver: How coefficients are computed: `mp` one at a time, `refit` all jointly at the end, `omp` all jointly in
            every step.
        coef: How coefficients are stored: `fp16`, or `fp8` with a scale per head.
        index: How atom indices are stored: `int16`, or `packed` in as many bits as the dictionary needs.
        prompt_atoms: How many of the newest prompt tokens stay in full precision and are atoms; 0 for none.
        outlier_atoms: How many of the vectors with the largest relative error become atoms, in each KV head, for keys
            and for values; 0 for none.
        read_top_k: How many slots with the highest approximate scores attention sees; 0 for all. Only if `key_space` is
            `unrotated`.
        approx_distance: The distance between query and keys that approximate scores assume, in tokens.
        residual_length: How many of the newest tokens always stay in full precision.
        block_size: How many tokens are encoded at a time. `auto`: one for every 32 tokens of the budget, at
            least 1 and at most 32.
        dictionary: The folder of the dictionaries, or the name of an embedded model, `tiny` or `tiny-4k`.

    Examples:
        >>> CSR(nnz=8, prompt_atoms=32, block_size=32).layout(1000)
        Layout(exact=64, coded=(1000,))

    Source:
        CSR (arXiv:2412.11741; AAAI-25), both versions; no code of its authors is known. Differences, besides those of
        the dictionaries (`kvpolicy.calibration.Dictionaries`):

        - A coefficient has its sign, which the printed `sup |R d|` loses.
        - The coefficients of an atom that is selected twice add up; with the printed `r[i] = c` the second replaces the
          first. So there are `nnz` pairs, but not always `nnz` atoms. The paper's sparse vector has as many zeros as
          channels, where it needs as many as atoms; here there is none.
        - `nnz`, the paper's s, counts the pairs of a whole value, as in the paper's names (CSR-8 is s=8 for keys and
          s=4 in two chunks for values).
        - `refit`, `omp`, `fp8`, `packed`, `rotated`, `read_top_k` and `residual_length` are not in the paper.
        - Prompt atoms (the paper's online part) are the newest tokens of the prompt, counted from its end (AAAI-25; the
          versions differ). They stay in full precision, so they take no bytes of their own; by default there are fewer
          than in the paper (128 to 256).
        - In the paper, prompt atoms serve a whole layer; here those of a KV head serve this head alone, so that its
          codes do not depend on the other heads, which another rank may have.
        - The paper does not describe its part for outliers: `outlier_atoms` is our interpretation, off by default. The
          vectors of largest relative error become atoms, and all are encoded again, when a head without encoded tokens
          encodes.
        - Tokens are encoded in blocks. Coefficients are rounded at the end and clipped to fp16. With `fp8`, the scale
          of a head fits its first write and clips later ones until no encoded token is left.
    """

    ALIASES: ClassVar[dict[str, str]] = {
        "s": "nnz",
        "sn": "value_chunks",
        "frame": "key_space",
        "online": "prompt_atoms",
        "guard": "outlier_atoms",
        "top": "read_top_k",
        "distance": "approx_distance",
    }
    VALUE_ALIASES: ClassVar[dict[str, dict[str, str]]] = {"key_space": {"pre": "unrotated", "post": "rotated"}}

    nnz: int = 8
    value_chunks: Literal[1, 2, 4] = 2
    key_space: Literal["unrotated", "rotated"] = "unrotated"
    solver: Solver = "mp"
    coef: Literal["fp16", "fp8"] = "fp16"
    index: Literal["int16", "packed"] = "int16"
    prompt_atoms: int = least(0, 32)
    outlier_atoms: int = least(0, 0)
    read_top_k: int = least(0, 0)
    approx_distance: int = least(0, 2048)
    residual_length: int = least(0, 0)
    block_size: AutoInt = least(1, "auto")
    dictionary: str = "tiny"

    def __post_init__(self) -> None:
        if self.nnz < 1 or self.nnz % self.value_chunks:
            raise KVPolicyError(
                f"CSR.nnz must be a positive multiple of value_chunks={self.value_chunks}, got {self.nnz}; try "
                f"{4 * self.value_chunks}."
            )
        if self.read_top_k and self.key_space == "rotated":
            raise KVPolicyError(
                f"CSR.read_top_k must be 0 with key_space='rotated', where all scores are exact, got "
                f"{self.read_top_k}; try omitting it."
            )

    @property
    def traits(self) -> Traits:
        """Tokens are encoded in blocks; the newest tokens of the prompt stay as atoms."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(
            block=block,
            residual=residual,
            key_space=self.key_space,
            pins="newest" if self.prompt_atoms else "none",
            pinned=self.prompt_atoms,
            search=ReadTop() if self.read_top_k else None,
        )

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> CSRDictionaries:
        """The dictionaries of a layer, shared by the layers of its group and by all caches."""
        keys, values = (dictionary(self.dictionary, name, layer_idx, str(device)) for name in self._names)
        return CSRDictionaries(keys, values)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the dictionaries are missing, of another model or too large."""
        if model.head_dim % self.value_chunks:
            raise KVPolicyError(
                f"The head dimension must be a multiple of CSR.value_chunks={self.value_chunks}, got "
                f"{model.head_dim}; try value_chunks=1."
            )
        check_model(load(self.dictionary, "csr"), self.dictionary, model)
        for name, chunks in zip(self._names, (1, self.value_chunks), strict=True):
            expected = model.head_dim // chunks
            for layer_idx in model.indices:
                actual = width(self.dictionary, name, layer_idx)
                if actual != expected:
                    raise KVPolicyError(
                        f"The dictionary {name} of {self.dictionary!r} must have vectors of {expected} elements, as "
                        f"the model has, got {actual}; try kvpolicy calibrate csr on this model."
                    )
            self._checked_count(name, chunks)

    def check_others(self, others: Others) -> None:
        """Refuse a reader if it chooses the slots that a step reads itself."""
        if self.read_top_k and not others.reads_all:
            raise KVPolicyError(
                f"The codec {self} must not choose the slots that a step reads itself, got the reader {others.reader}, "
                "which does so too; try one of them alone."
            )

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> CSRCodes:

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        tensors: list[Tensor] = []
        for name, chunks in zip(self._names, (1, self.value_chunks), strict=True):
            if self.index == "packed":
                bits = _index_bits(self._checked_count(name, chunks))
                tensors.append(zeros(slots, packed_width(self.nnz, bits), torch.uint8))
            else:
                tensors.append(zeros(slots, self.nnz, torch.int16))
            tensors.append(zeros(slots, self.nnz, torch.float16 if self.coef == "fp16" else torch.uint8))
            tensors.append(zeros(int(self.coef == "fp8"), 1, torch.float16))
            tensors.append(zeros(self.outlier_atoms, head_dim // chunks, torch.float16))
        return CSRCodes(*tensors)

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        if keys.shape[2] == 0 or store.codes.key_index.shape[2] == 0:
            return
        self._keys(store).write(keys, slots, write_mask, occupied, self.solver)
        self._values(store).write(values, slots, write_mask, occupied, self.solver)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, in the key space of the codec, [B, H, n, D] fp32."""
        codes = self._keys(store)
        atoms = codes.dictionary()
        return codes.reconstruct(atoms, atoms.table(), at)

    def values(self, store: StageStore, at: At) -> Tensor:
        codes = self._values(store)
        atoms = codes.dictionary()
        return codes.reconstruct(atoms, atoms.table(), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with the key of every slot; see `Stage.score`.

        Rotated keys are scored without reconstruction. Unrotated keys are reconstructed and rotated: all of them, or
        the `read_top_k` slots of each KV head with the highest approximate score; the other slots score -inf.
        """
        codes = self._keys(store)
        atoms = codes.dictionary()
        if rope is None:
            return codes.score(atoms, queries)
        table = atoms.table()
        if not 0 < self.read_top_k < codes.slots:
            return score_by_chunks(lambda _, at: codes.reconstruct(atoms, table, at), store, queries, rope, codes.slots)
        # The products of a query with all atoms are the same for all slots only if the query is rotated to one distance
        # from all of them, which makes these scores approximate.
        # The query heads of a KV head read the same slots, so the highest score of any of them counts.
        approximate = codes.score(atoms, rope.queries(queries, self.approx_distance)).amax(2)
        # An empty slot scores 0 and must not displace others.
        approximate = approximate.masked_fill(~rope.occupied, -torch.inf)
        best = approximate.topk(self.read_top_k, -1).indices  # [B, H, read_top_k]
        exact: list[Tensor] = []
        for at in best.split(CHUNK_SLOTS, -1):
            keys = rope.keys(codes.reconstruct(atoms, table, at), at)
            exact.append(products(queries, keys.to(queries.dtype)))
        # Slots that were not read score -inf, so that the softmax ignores them.
        hidden = torch.full((*queries.shape[:3], codes.slots), -torch.inf, dtype=torch.float32, device=queries.device)
        return hidden.scatter(-1, best[:, :, None].expand(-1, -1, queries.shape[2], -1), torch.cat(exact, -1))

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the values of all slots, without reconstructing them; see `Stage.mix`."""
        return self._values(store).mix(weights)

    @property
    def _names(self) -> tuple[str, str]:
        """Names of the dictionaries of keys and of values in a calibration file."""
        return key_dictionary(self.key_space), value_dictionary(self.value_chunks)

    def _count(self, shared: int, chunks: int) -> int:
        """The number of atoms of a KV head, given the number of shared ones."""
        return shared + self.outlier_atoms + self.prompt_atoms * chunks

    def _checked_count(self, name: str, chunks: int) -> int:
        """The number of atoms of a KV head; raises KVPolicyError if the index cannot address them."""
        count = self._count(size(self.dictionary, name), chunks)
        limit = 2**15 if self.index == "int16" else 2**16
        if count > limit:
            raise KVPolicyError(
                f"CSR must have at most {limit} atoms with index={self.index!r}, got {count} for {name}, including "
                f"those of {self.prompt_atoms} prompt tokens and {self.outlier_atoms} outliers; try fewer prompt_atoms "
                "or outlier_atoms."
            )
        return count

    def _keys(self, store: StageStore) -> SparseCodes:
        atoms = None if store.atoms is None else store.atoms[0]
        return self._sparse_codes(store.codes[:4], store.calibration.keys, atoms, 1)

    def _values(self, store: StageStore) -> SparseCodes:
        atoms = None if store.atoms is None else store.atoms[1]
        return self._sparse_codes(store.codes[4:], store.calibration.values, atoms, self.value_chunks)

    def _sparse_codes(
        self, codes: tuple[Tensor, ...], shared: Tensor, atoms: Tensor | None, chunks: int
    ) -> SparseCodes:
        index, coef, scale, outlier_atoms = codes
        # The chunks of a value are separate atoms.
        if atoms is None:
            prompt_atoms = outlier_atoms[:, :, :0]
        else:
            prompt_atoms = atoms.reshape(*outlier_atoms.shape[:2], -1, outlier_atoms.shape[-1])
        # As in `alloc`, prompt atoms count even before any is in place: the width of a packed index must not change.
        bits = _index_bits(self._count(len(shared), chunks)) if self.index == "packed" else 0
        return SparseCodes(index, coef, scale, outlier_atoms, shared, prompt_atoms, chunks, bits)


def _index_bits(count: int) -> int:
    """The number of bits of an index into `count` atoms."""
    return max((count - 1).bit_length(), 1)

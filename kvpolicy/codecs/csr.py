"""A few atoms of a dictionary per vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._atoms import Side
from kvpolicy.codecs._common import CHUNK, check_least, ordinary_layout, score_by_chunks
from kvpolicy.codecs._dictionaries import dictionary, size, width
from kvpolicy.codecs._files import check_model, load
from kvpolicy.codecs._pursuit import Solver
from kvpolicy.codecs.packing import packed_width
from kvpolicy.kernels.products import products
from kvpolicy.protocols import ALL_HEADS, At, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class CSRBook(NamedTuple):
    """A layer's dictionaries, shared by its heads and by the layers of its group.

    Attributes:
        keys: [N, D] fp32, unit vectors; zero vectors fill up a dictionary that is smaller than another group's.
        values: [N, D / sn] fp32, likewise.
    """

    keys: Tensor
    values: Tensor


class CSRCodes(NamedTuple):
    """What CSR stores of one layer; `x` is 1 with coefficients in fp8, and 0 otherwise.

    Attributes:
        key_index: Atoms, [B, H, C, s] int16, or [B, H, C, bytes] uint8 where packed.
        key_coef: [B, H, C, s] fp16, or the bits of fp8 as uint8.
        key_scale: [B, H, x, 1] fp16.
        key_guard: [B, H, guard, D] fp16.
        value_index: As of keys; the pairs of a value's first chunk come first.
        value_coef: As of keys.
        value_scale: As of keys.
        value_guard: [B, H, guard, D / sn] fp16.
    """

    key_index: Tensor
    key_coef: Tensor
    key_scale: Tensor
    key_guard: Tensor
    value_index: Tensor
    value_coef: Tensor
    value_scale: Tensor
    value_guard: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CSR:
    """Write each vector as a sum of a few atoms of a dictionary, found by matching pursuit.

    A key is `s` pairs of an atom's number and a coefficient. A value is cut into `sn` chunks of channels with `s / sn`
    pairs each. The dictionary was learned once for a model, and belongs to it; to it come the newest tokens of the
    prompt, which stay exact. At `s=8` a number takes 2 bits where the head dimension is 128.

    Args:
        s: Pairs per key and per value, a multiple of `sn`.
        sn: Chunks of a value: 1, 2 or 4.
        frame: Whether keys are coded with the rotary embedding undone (`pre`) or as attention sees them (`post`), where
            scores need no key read back.
        solver: How coefficients are found: `mp` one by one, `refit` all together at the end, `omp` all together in
            every step.
        coef: How coefficients are stored: `fp16`, or `fp8` with a scale per head.
        index: How atoms' numbers are stored: `int16`, or `packed` in as many bits as the dictionary needs.
        online: How many of the prompt's newest tokens stay exact and are atoms; 0 for none.
        guard: How many vectors that are coded badly become atoms themselves, in each KV head, for keys and for values.
        top: How many slots of the highest approximate scores attention sees; 0 for all. Only where `frame` is `pre`.
        distance: How far before the query keys are taken to stand in approximate scores, in tokens.
        residual_length: How many of the newest tokens always stay exact.
        block_size: How many tokens are coded at a time.
        dictionary: The folder of the dictionaries, or `tiny` for those of the embedded model.

    Examples:
        >>> CSR(s=8, online=32, block_size=32).layout(1000)
        Layout(exact=64, coded=(1000,))

    Source: CSR (arXiv:2412.11741; AAAI-25), both versions; no code of its authors is known.
    Differences: a coefficient has its sign, which the printed `sup |R d|` loses. An atom that is taken twice adds up,
    where the printed `r[i] = c` forgets the first one; so there are `s` pairs, but not always `s` atoms. `s` counts the
    pairs of a whole value, as in the paper's names (CSR-8 is s=8 for keys and s=4 in two chunks for values). `refit`,
    `omp`, `fp8`, `packed`, `post`, `top`, `residual_length` are not in the paper. Online atoms are the tokens that stay
    exact, so they take no bytes of their own; there are by default fewer than in the paper (128 to 256). In the paper
    they serve a whole layer; here those of a KV head serve this head alone, so that its codes are the same whatever
    heads are beside it. The paper's part for outliers is not described: `guard` is our reading, off by default. Tokens
    are coded in blocks. The dictionary's own differences are those of its calibration.
    """

    s: int = 8
    sn: Literal[1, 2, 4] = 2
    frame: Literal["pre", "post"] = "pre"
    solver: Solver = "mp"
    coef: Literal["fp16", "fp8"] = "fp16"
    index: Literal["int16", "packed"] = "int16"
    online: int = 32
    guard: int = 0
    top: int = 0
    distance: int = 2048
    residual_length: int = 0
    block_size: int = 32
    dictionary: str = "tiny"

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        choices = {"sn": (1, 2, 4), "frame": ("pre", "post"), "solver": ("mp", "refit", "omp")}
        for field, allowed in {**choices, "coef": ("fp16", "fp8"), "index": ("int16", "packed")}.items():
            if getattr(self, field) not in allowed:
                *most, last = map(str, allowed)
                raise KVPolicyError(f"CSR's {field} is {getattr(self, field)!r}: give {', '.join(most)} or {last}.")
        for field in ("online", "guard", "top", "distance", "residual_length"):
            if getattr(self, field) < 0:
                raise KVPolicyError(f"CSR's {field} is {getattr(self, field)}: give at least 0.")
        check_least(self, block_size=(1, 32))
        if self.s < 1 or self.s % self.sn:
            raise KVPolicyError(
                f"CSR's s is {self.s}: give a multiple of sn, which is {self.sn}, such as {4 * self.sn}."
            )
        if self.top and self.frame == "post":
            raise KVPolicyError(f"CSR's top is {self.top}, and with frame=post all scores are exact: leave it out.")

    @property
    def traits(self) -> Traits:
        """A block is coded at a time; the prompt's newest tokens stay as atoms."""
        return Traits(
            block=self.block_size,
            residual=self.residual_length,
            key_space="unrotated" if self.frame == "pre" else "rotated",
            pins="newest" if self.online else "none",
            pinned=self.online,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Room for atoms, the residual and one block exact, and all else coded."""
        return ordinary_layout(self.traits, tokens)

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> CSRBook:
        """A layer's dictionaries; layers of a group and all caches share them."""
        found = [dictionary(self.dictionary, name, layer_idx, str(device)) for name in self._names]
        return CSRBook(*found)

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError where the dictionaries are missing, of another model or too large."""
        if model.head_dim % self.sn:
            raise KVPolicyError(
                f"CSR cuts a value into {self.sn} chunks, and the head dimension {model.head_dim} is no multiple of "
                f"{self.sn}: use sn=1."
            )
        check_model(load(self.dictionary, "csr"), self.dictionary, model)
        for name, chunks in zip(self._names, (1, self.sn), strict=True):
            for layer_idx in model.indices:
                its = width(self.dictionary, name, layer_idx)
                if its != model.head_dim // chunks:
                    raise KVPolicyError(
                        f"The dictionary {name} of {self.dictionary!r} has vectors of {its} numbers, and the model's "
                        f"have {model.head_dim // chunks}: make one for it with kvpolicy calibrate csr."
                    )
            self._checked(name, chunks)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> CSRCodes:
        """Empty codes for `slots` slots."""

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        parts: list[Tensor] = []
        for name, chunks in zip(self._names, (1, self.sn), strict=True):
            if self.index == "packed":
                bits = _bits(self._checked(name, chunks))
                parts.append(zeros(slots, packed_width(self.s, bits), torch.uint8))
            else:
                parts.append(zeros(slots, self.s, torch.int16))
            parts.append(zeros(slots, self.s, torch.float16 if self.coef == "fp16" else torch.uint8))
            parts.append(zeros(int(self.coef == "fp8"), 1, torch.float16))
            parts.append(zeros(self.guard, head_dim // chunks, torch.float16))
        return CSRCodes(*parts)

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        if keys.shape[2] == 0 or store.codes.key_index.shape[2] == 0:
            return
        self._keys(store).write(keys, slots, write_mask, occupied, self.solver)
        self._values(store).write(values, slots, write_mask, occupied, self.solver)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, in the codec's frame, [B, H, n, D] fp32."""
        side = self._keys(store)
        words = side.words()
        return side.spell(words, words.table(), at)

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        side = self._values(store)
        words = side.words()
        return side.spell(words, words.table(), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; -inf where `top` leaves a slot out. See `Stage.score`."""
        side = self._keys(store)
        words = side.words()
        if rope is None:
            return side.score(words, queries)
        table = words.table()
        if not 0 < self.top < side.slots:
            return score_by_chunks(lambda _, at: side.spell(words, table, at), store, queries, rope, side.slots)
        near = rope.queries(queries, self.distance)
        rough = side.score(words, near).amax(2)
        rough = rough.masked_fill(~rope.occupied, -torch.inf)  # an empty slot must not displace others
        best = rough.topk(self.top, -1).indices  # [B, H, top]
        exact: list[Tensor] = []
        for at in best.split(CHUNK, -1):
            some = rope.keys(side.spell(words, table, at), at)
            exact.append(products(queries, some.to(queries.dtype)))
        hidden = torch.full((*queries.shape[:3], side.slots), -torch.inf, device=queries.device)
        return hidden.scatter(-1, best[:, :, None].expand(-1, -1, queries.shape[2], -1), torch.cat(exact, -1))

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed without being read back; see `Stage.mix`."""
        return self._values(store).mix(weights)

    @property
    def _names(self) -> tuple[str, str]:
        return f"keys.{self.frame}", f"values.sn{self.sn}"

    def _count(self, shared: int, parts: int) -> int:
        """Atoms of a KV head."""
        return shared + self.guard + self.online * parts

    def _checked(self, name: str, parts: int) -> int:
        """Atoms of a KV head; ValueError where they are more than can be numbered."""
        count = self._count(size(self.dictionary, name), parts)
        most = 2**15 - 1 if self.index == "int16" else 2**16
        if count > most:
            raise KVPolicyError(
                f"CSR numbers at most {most} atoms with index={self.index}, and {name} has {count} with {self.guard} "
                f"of the guard and {self.online} online tokens: lower guard or online."
            )
        return count

    def _keys(self, store: StageStore) -> Side:
        atoms = None if store.atoms is None else store.atoms[0]
        return self._side(store.codes[:4], store.calibration.keys, atoms, 1)

    def _values(self, store: StageStore) -> Side:
        atoms = None if store.atoms is None else store.atoms[1]
        return self._side(store.codes[4:], store.calibration.values, atoms, self.sn)

    def _side(self, codes: tuple[Tensor, ...], shared: Tensor, atoms: Tensor | None, parts: int) -> Side:
        index, coef, scale, guard = codes
        online = guard[:, :, :0] if atoms is None else atoms.reshape(*guard.shape[:2], -1, guard.shape[-1])
        bits = _bits(self._count(len(shared), parts)) if self.index == "packed" else 0
        return Side(index, coef, scale, guard, shared, online, parts, bits)


def _bits(count: int) -> int:
    """Bits that number `count` atoms."""
    return max((count - 1).bit_length(), 1)

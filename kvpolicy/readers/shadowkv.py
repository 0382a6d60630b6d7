"""ShadowKV: rebuild the keys of the chosen pages from a low rank, and copy only their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvpolicy.kernels.products import coordinates, of_tokens, thin_products
from kvpolicy.kernels.slot_writes import flat_slots, write_slots
from kvpolicy.protocols import Changed, ModelInfo, Read, ReaderTraits, SlotAccess
from kvpolicy.readers.common import Amount, TokenReader, amount, page_means
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, least, strategy

_TILE = 512
"""Slots of each head whose keys are unrotated at a time to find a basis."""


class ShadowIndex(NamedTuple):
    """The index of one layer, in the dtype of the keys.

    Attributes:
        landmarks: The mean key of each page, as attention sees keys, [B, H, X, D]; 0 for a page without a token.
        coefficients: The coefficients of the unrotated keys of each page in the basis, [B, H, X, page * r], or of the
            tokens in all heads, [B, 1, X, page * r]; 0 for an empty slot.
        vectors: The basis of the unrotated keys of each head, [B, H, D, r], or of all of them, [B, 1, H * D, r], in
            orthonormal columns; 0 before a prompt.
    """

    landmarks: Tensor
    coefficients: Tensor
    vectors: Tensor


@strategy
class ShadowKV(TokenReader):
    """Rebuild the keys of the chosen pages from a low rank, and copy only their values.

    Without their rotary embedding, the keys of a prompt lie close to a space of few dimensions. After each prompt, a
    singular value decomposition finds this space, for every KV head or for all of a layer together, and the index holds
    a few coefficients of each key. It also holds the mean key of each page, as attention sees keys: its landmark. A
    step reads the pages whose landmarks have the largest products with the query. It rebuilds their keys from the
    coefficients, rotates them to their positions, and attends to them and to the stored values. So with `host`, it
    copies values, and hardly any key.

    Pages are useful if they hold neighboring tokens. So a cache that evicts sorts its slots every `rebuild` steps.

    Args:
        read: How many tokens each KV head reads in a step (int), or the fraction of the layer's slots (float); rounded
            up to whole pages.
        rank: Coefficients of a key, at most the head dimension, or with `joint` of a token, at most those of all heads;
            `auto`: half of the head dimension, or with `joint` 5/32 of those of all heads, 160 of 1,024.
        joint: Whether the KV heads of a layer share a basis, as in the paper. They must keep the same tokens then, as
            without a selector and with `window` and `streaming`.
        page: Slots of a page.
        dense: How many of the model's first layers read everything, as it is stored.
        sinks: Tokens at the first positions whose pages are always read, with their own keys.
        recent: The newest tokens whose pages are always read, with their own keys; the pages of the newest one and of
            the first kept one always are.
        rebuild: After how many steps the decomposition is computed again, of all kept keys.
        host: Whether keys and values lie in host memory, from where a step copies the values that it reads. The index,
            and everything of the layers that read everything, stay on the device.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range.

    Examples:
        >>> ShadowKV(read=0.05).count(1000)
        56
        >>> ShadowKV(rank=4).alloc(1, 2, 10, 16, torch.float32, "meta").coefficients.shape
        torch.Size([1, 2, 10, 32])

    Source:
        ShadowKV (Sun et al., ICML 2025, arXiv:2410.21465), Algorithms 1 and 2, and its authors' code, commit e51904c.
        Differences:

        - By default there is a decomposition for each KV head, so that heads may keep different tokens; as many
          coefficients then leave out more. That of the authors is of the keys of all heads of a layer together,
          `joint`, with rank 160. Of a model that is sharded over several ranks, it is that of the heads of a rank.
        - It is found from the second moments of the keys that are kept, whose eigenvectors are the singular vectors,
          and again after each later prompt and every `rebuild` steps; that of the authors is computed once.
        - No pages are kept as outliers: the authors hold the 48 pages of each head whose keys are least like their
          landmark on the device, and always read them. Here the first `sinks` and the newest `recent` tokens are read
          with their own keys.
        - Generated tokens compete with those of the prompt, and have coefficients in the same basis; the authors hold
          all of them on the device, and read them all.
        - Keys are held in host memory too, besides values: for later prompts, for the decompositions, for shifts and
          for files. Steps copy those of the first and newest tokens, and of the page that is written.
        - Nothing is cached between steps on the device; the authors copy only values that the step before did not read.
        - Keys are rebuilt even where all tokens are read, so that a short row gives what it gives alone.
        - Values and keys are in the model's dtype: there is no codec, and `reuse` does not take this reader.
        - There is one set of pages per KV head, by the largest weight of a landmark after a softmax over landmarks, as
          the authors have it. Ties go to the earlier position.
    """

    read: Amount = amount(256)
    rank: AutoInt = least(1, "auto")
    joint: bool = False
    page: int = least(1, 8)
    dense: int = least(0, 0)
    sinks: int = least(0, 4)
    recent: int = least(1, 32)
    rebuild: int = least(1, 256)
    host: bool = False

    @property
    def traits(self) -> ReaderTraits:
        """Pages of neighbors, unless a page is one slot, whose keys are rebuilt."""
        return ReaderTraits(
            dense=self.dense,
            recent=self.recent,
            ordered=self.page != 1,
            resort=self.rebuild,
            fitted=self,
            rebuilds=self,
            host=self.host,
        )

    @property
    def joint_heads(self) -> bool:
        """As `joint` says."""
        return self.joint

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a key, or those of a token, have fewer channels than coefficients."""
        heads, width = self._size(model.heads, model.head_dim)
        if self.rank != "auto" and self.rank > width:
            whose = "the head dimension" if heads == model.heads else "the channels of all heads"
            raise KVPolicyError(
                f"ShadowKV.rank must be at most {whose}, {width}, got {self.rank}; try {self._auto_rank(width)}."
            )

    def page_size(self, slots: int) -> int:
        return self.page

    def alloc(
        self, batch: int, heads: int, entries: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> ShadowIndex:
        """No basis, and landmarks and coefficients of zero."""
        bases, width = self._size(heads, head_dim)
        # A rank of a sharded model may have fewer heads than `check` was told.
        rank = min(self._auto_rank(width) if self.rank == "auto" else self.rank, width)
        sizes = ((heads, entries, head_dim), (bases, entries, self.page * rank), (bases, width, rank))
        return ShadowIndex(*(torch.zeros(batch, *size, dtype=dtype, device=device) for size in sizes))

    def fit_basis(self, index: ShadowIndex, moments: Tensor, rows: Tensor) -> None:
        """Find the basis of `rows` [B] bool, in place: the eigenvectors of `moments` with the largest eigenvalues.

        These are sums of outer products of unrotated keys, [B, H, D, D] fp64, or [B, 1, H * D, H * D] with `joint`.
        """
        rank = index.vectors.shape[-1]
        # Ascending; they are the right singular vectors of the keys.
        found = torch.linalg.eigh(moments).eigenvectors[..., -rank:]
        index.vectors.copy_(torch.where(rows[:, None, None, None], found.to(index.vectors.dtype), index.vectors))

    def has_basis(self, index: ShadowIndex) -> Tensor:
        """Whether the basis of a row was found, [B] bool."""
        return index.vectors.flatten(1).any(-1)

    def is_missing(self, index: ShadowIndex, slots: SlotAccess, steps: int) -> bool:
        """Whether a row has no basis, as one that begins in a step: its first `recent` tokens are read as stored."""
        return steps > 0 and steps % self.recent == 0 and bool(slots.missing(self.has_basis(index), None).any())

    def update(self, index: ShadowIndex, slots: SlotAccess, changed: Changed) -> None:
        """Find the basis if the index is made again, and compute landmarks and coefficients of what changed."""
        if changed.emptied is not None:
            return
        if changed.entries is None:
            rows = slots.missing(self.has_basis(index), changed.placed)
            if bool(rows.any()):
                self.fit_basis(index, self._moments(slots), rows)
        for entries in slots.tiles(changed.entries):
            at, occupied = slots.of_entries(entries)
            keys = slots.keys(at)
            self.refresh(index, entries, keys.unflatten(2, occupied.shape[2:]), occupied)
            slots.whole(index.vectors)
            plain = slots.unrotated(keys, slots.positions.gather(-1, at))
            self.project(index, entries, plain.unflatten(2, occupied.shape[2:]), occupied)

    def _moments(self, slots: SlotAccess) -> Tensor:
        """Sums of the outer products of the unrotated keys of each head, or of all heads together, as `fit_basis`."""
        every = torch.arange(slots.positions.shape[-1], device=slots.positions.device)
        total: Tensor | int = 0
        for at in every.expand(slots.positions.shape).split(_TILE, -1):
            positions = slots.positions.gather(-1, at)
            # In fp64, so that the sum does not depend on the order of the slots.
            keys = slots.unrotated(slots.keys(at), positions).double().masked_fill((positions < 0)[..., None], 0)
            keys = of_tokens(keys) if self.joint else keys
            total = keys.mT @ keys + total
        assert isinstance(total, Tensor)
        return total

    def refresh(self, index: ShadowIndex, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Compute the landmarks of some pages; see `Reader.refresh`."""
        write_slots(index.landmarks, entries, page_means(keys, occupied).to(index.landmarks.dtype))

    def project(self, index: ShadowIndex, entries: Tensor, keys: Tensor, occupied: Tensor) -> None:
        """Compute the coefficients of some pages, in place, as `refresh`, from fp32 keys without rotary embedding."""
        plain = keys.masked_fill(~occupied[..., None], 0).flatten(2, 3)
        if self.joint:  # whose entries are those of every head
            plain = of_tokens(plain)
            entries = entries[:, :1]
        found = coordinates(plain, index.vectors).unflatten(2, keys.shape[2:4])
        write_slots(index.coefficients, entries, found.flatten(3).to(index.coefficients.dtype))

    def rebuild_keys(self, index: ShadowIndex, slots: Tensor) -> Tensor:
        """The unrotated keys of slots [B, H, n] int64, [B, H, n, D] fp32; undefined for empty slots."""
        held = self.coefficients(index)
        batch, heads, _ = slots.shape
        # Heads that share coefficients choose slots of their own.
        flat = flat_slots(slots.reshape(batch, held.shape[1], -1), held.shape[2])
        of_slots = held.flatten(0, 2).index_select(0, flat).view(*slots.shape, -1)
        return of_slots.float() @ index.vectors.reshape(batch, heads, -1, of_slots.shape[-1]).float().mT

    def coefficients(self, index: ShadowIndex) -> Tensor:
        """The coefficients of each slot, [B, H or 1, S, r]."""
        batch, heads, entries, _ = index.coefficients.shape
        # -1 would be ambiguous without entries.
        return index.coefficients.view(batch, heads, entries * self.page, index.vectors.shape[-1])

    def score(self, index: ShadowIndex, queries: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor:
        """The products with the landmarks, [B, H, G, X] fp32."""
        return thin_products(queries, index.landmarks)

    def choose(self, index: ShadowIndex, slots: SlotAccess, queries: Tensor) -> Read:
        """Read the pages of the best landmarks, with rebuilt keys."""
        slots.whole(index.landmarks)
        read = slots.best(slots.scores(self.score(index, queries, slots.products)), self.sinks)
        return read._replace(keys=partial(self._keys, index, slots, read))

    def _keys(self, index: ShadowIndex, slots: SlotAccess, read: Read) -> Tensor:
        """The keys of the slots that a step reads, [B, H, n, D], in the dtype of the keys.

        The newest tokens and those at the first positions have their own keys, and the others have rebuilt ones.
        """
        self._count_keys(index, slots)
        positions = slots.positions.gather(-1, read.slots)
        keys = slots.rotated(self.rebuild_keys(index, read.slots), positions).to(index.landmarks.dtype)
        last = slots.length.int()[:, None, None] - 1
        stored = ((positions > last - self.recent) | (positions < self.sinks)) & read.chosen & (positions >= 0)
        # Without slots that are named twice, no head has more of them, so that all are among these.
        at = stored.float().topk(self._stored(slots), -1).indices
        vectors = at[..., None].expand(*at.shape, keys.shape[-1])
        own = slots.keys(read.slots.gather(-1, at))
        return keys.scatter(2, vectors, torch.where(stored.gather(-1, at)[..., None], own, keys.gather(2, vectors)))

    def count_step(self, index: ShadowIndex, slots: SlotAccess) -> None:
        slots.whole(index.landmarks)
        slots.written(index.vectors)
        self._count_keys(index, slots)
        slots.stored_keys(self._stored(slots))

    def _count_keys(self, index: ShadowIndex, slots: SlotAccess) -> None:
        """Count what a step reads to rebuild keys."""
        slots.whole(index.vectors)
        held = self.coefficients(index)
        # Heads that share coefficients choose slots of their own.
        slots.rows(held, slots.slots_read * (index.landmarks.shape[1] // held.shape[1]))

    def _stored(self, slots: SlotAccess) -> int:
        """How many keys of each head a step reads as they are stored."""
        return min(self.recent + self.sinks, slots.slots_read)

    def _size(self, heads: int, head_dim: int) -> tuple[int, int]:
        """Number of bases for a number of heads, and the channels of each."""
        return (1, heads * head_dim) if self.joint else (heads, head_dim)

    def _auto_rank(self, width: int) -> int:
        """Coefficients of `width` channels with `rank="auto"`."""
        return max(1, width * 5 // 32 if self.joint else width // 2)

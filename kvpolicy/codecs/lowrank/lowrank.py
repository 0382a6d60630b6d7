"""LowRank: keys and values as products with few calibrated directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs import projection as _projection
from kvpolicy.codecs.base import check_base, inner_of, keys_of, keys_only, values_of, values_only, wrapper_traits
from kvpolicy.codecs.common import SingleStage, score_by_chunks, token_ranges
from kvpolicy.codecs.lowrank import ranks as _ranks
from kvpolicy.codecs.lowrank.ranks import Ranks
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.projection import Basis, Projection
from kvpolicy.protocols import ALL_HEADS, At, Codec, ModelInfo, Others, RotaryView, StageStore, Traits
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.strategy import AutoInt, checked, least, strategy, tiny_or


class LowRankCalibration(NamedTuple):
    """The calibrated tensors of one layer, the fields of two `Projection`.

    Attributes:
        key_mean: [1, H, 1, D] fp32.
        key_encode: [1, H, D, r] fp32, where r counts the directions of a group of heads.
        key_decode: [1, H, r, D] fp32.
        value_mean: [1, H, 1, D] fp32.
        value_encode: [1, H, D, s] fp32.
        value_decode: [1, H, s, D] fp32.
    """

    key_mean: Tensor
    key_encode: Tensor
    key_decode: Tensor
    value_mean: Tensor
    value_encode: Tensor
    value_decode: Tensor

    @property
    def keys(self) -> Projection:
        """The projection of keys."""
        return Projection(*self[:3])

    @property
    def values(self) -> Projection:
        """The projection of values."""
        return Projection(*self[3:])


class LowRankCodes(NamedTuple):
    """The tensors of one layer.

    Attributes:
        keys: Latent keys as the base stores vectors of `rank` channels; its fields of values have no slots.
        values: Latent values likewise, of `value_rank` channels.
    """

    keys: Any
    values: Any


@strategy
class LowRank(SingleStage):
    """Store the products of keys and values with a few calibrated directions of each head.

    The keys of a head vary little in most directions, and so do its values. `kvpolicy calibrate lowrank` finds the
    directions in which they vary most, by principal components. A token is stored as its latent vectors, the
    coordinates along the first `rank` of them, so that its bytes fall with the rank. Values are summed as latent
    vectors, and only the sum is decoded. So are scores of rotated keys: the query is projected instead of the keys.
    Unrotated keys need fewer directions, but each of them is decoded and rotated in every step.

    Args:
        base: The codec that stores latent vectors: `plain`, which stores them in fp16, or one that encodes keys and
            values apart, such as `tokenwise`.
        rank: Directions of keys for each KV head, at most the head dimension; of layers with different ranks, the mean.
            `auto`: half the head dimension.
        value_rank: Directions of values likewise. `auto`: as many as of keys.
        ranks: `same`: all layers have `rank` and `value_rank`. Otherwise the total of both over all layers is divided.
            `energy`: so that the energies left out, as shares of the energy of the keys or values of a layer, have the
            least sum. `threshold`: so that the least share that is kept is the largest. `fisher`: in proportion to the
            root of the Fisher information, which `kvpolicy calibrate lowrank --fisher` collects. Anything else is a
            JSON file with the ranks of every layer, `{"keys": [...], "values": [...]}`.
        rank_multiple: Ranks that are divided are multiples of it, such as a base may need.
        head_group: How many KV heads have directions, and latent vectors, together: `rank` times as many. More than 1
            needs a selector that keeps the same tokens in all heads, such as `window` or `streaming`.
        key_space: Whether keys are projected as attention sees them (`rotated`) or with the rotary embedding undone
            (`unrotated`).
        basis: `keys`: the directions in which keys vary most. `scores`: directions that leave the least error in the
            products with calibrated queries, for rotated keys.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32. With another base than `plain`, that
            of the base is used.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32. With another base than `plain`, that of the base is used.
        calibration: Folder of the calibration, or the name of an embedded model, `tiny` or `tiny-4k`.

    Raises:
        KVPolicyError: If a parameter is out of range, `basis` is `scores` for unrotated keys, or ranks are given both
            in a file and as numbers.

    Examples:
        >>> LowRank(rank=8).layout(1000)
        Layout(exact=31, coded=(1000,))
        >>> from kvpolicy import Policy
        >>> str(Policy.parse("snapkv+lowrank:rank=16/tokenwise:bits=2@0.5"))
        'snapkv+lowrank:rank=16/tokenwise:bits=2@0.5'

    Source:
        One codec for methods whose compressed keys and values are their projections onto a calibrated basis: Palu
        (arXiv:2407.21118), EigenAttention (arXiv:2408.05646), MatryoshkaKV (arXiv:2410.14731) without its training by
        distillation, and SVD, ASVD (arXiv:2312.05821) and SVD-LLM (arXiv:2403.07378) of the key and value projections.
        A truncated SVD of W S, followed by the inverse of S, is a projection of the outputs of W, and with whitened
        inputs it is the one with the least error: the principal components. The papers were read in part (unverified in
        full). "Effectively Compress KV Heads" (arXiv:2406.07056) is `head_group=g:rank=D/g:key_space=unrotated` at run
        time, without its fine-tuning. Differences:

        - Directions are those of each KV head alone by default, since the heads of a selector may keep different
          tokens; Palu's are of groups of 4 heads, and EigenAttention's are the same for the keys of all heads.
        - The mean is subtracted first, which takes no rank.
        - All layers have the same rank by default.
        - `ranks=fisher` takes gradients of keys and values, and not of the weights that make them as Palu does, and the
          root of their mean square over all heads; ranks sum to the total, and are not rounded to multiples of 32.
        - `ranks=threshold` compares energies, the squares of the singular values that EigenAttention sums, meets a
          total instead of an output error, and is one threshold for all layers (EigenAttention lowers one for each).
        - `ranks=energy` and `basis=scores` are in none of them; EigenAttention stacks keys and queries.
        - Weights stay as they are: queries are projected in each step instead of by folded weights.
        - Latent vectors are fp16, or codes of the base without a Hadamard transform (Palu folds one into the weights;
          `turboquant` as the base has its own).
        - Vectors are projected in fp64, so that codes do not depend on the batch.
    """

    WRAPS_ITSELF: ClassVar[bool] = False

    base: Codec = checked(check_base, Plain)
    rank: AutoInt = least(1, "auto")
    value_rank: AutoInt = least(1, "auto")
    ranks: str = _ranks.SAME
    rank_multiple: int = least(1, 1)
    head_group: int = least(1, 1)
    key_space: Literal["rotated", "unrotated"] = "rotated"
    basis: Literal["keys", "scores"] = "keys"
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")
    calibration: str = tiny_or("a folder")

    def __post_init__(self) -> None:
        if self.basis == "scores" and self.key_space == "unrotated":
            raise KVPolicyError(
                "LowRank.basis must be 'keys' with key_space='unrotated', whose scores depend on positions, got "
                "'scores'; try key_space=rotated."
            )
        if not isinstance(self.base, Plain) and (self.residual_length, self.block_size) != ("auto", "auto"):
            raise KVPolicyError(
                f"LowRank.residual_length and block_size must be auto over {type(self.base).__name__}, whose own are "
                f"used, got {self.residual_length} and {self.block_size}; try giving them to the base."
            )
        if not isinstance(self.ranks, str) or not self.ranks:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise KVPolicyTypeError(
                f"LowRank.ranks must be same, {', '.join(_ranks.DIVIDED)} or a file, got {self.ranks!r}; try energy."
            )
        if not self.differs_by_layer and self.rank_multiple != 1:
            raise KVPolicyError(
                f"LowRank.rank_multiple must be 1 with ranks='same', which divides none, got {self.rank_multiple}; try "
                "ranks=energy."
            )
        if self._has_file and (self.rank, self.value_rank, self.rank_multiple) != ("auto", "auto", 1):
            raise KVPolicyError(
                f"LowRank.rank, value_rank and rank_multiple must not be given with a file of ranks, got {self.rank}, "
                f"{self.value_rank} and {self.rank_multiple} with ranks={self.ranks!r}; try ranks=energy."
            )

    @property
    def traits(self) -> Traits:
        """The code of a token does not depend on other tokens."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        own = wrapper_traits(self.base, tokens, self.residual_length, self.block_size)
        return own._replace(key_space=self.key_space, by_layer=self if self.differs_by_layer else None)

    @property
    def differs_by_layer(self) -> bool:
        """Whether layers may have different ranks."""
        return self.ranks != _ranks.SAME

    def by_layer(self, model: ModelInfo) -> dict[int, Codec]:
        """The codec of each layer, with its ranks; see `DiffersByLayer`."""
        self._check_ranks(model)
        self._check_calibration(model)
        if self._has_file:
            ranks = _ranks.load_ranks(self.ranks, model)
        else:
            file = _files.load(self.calibration, "lowrank")
            total = model.layers * sum(self._ranks(model.head_dim)) // self.rank_multiple
            ranks = _ranks.divided(file, self._basis, self.ranks, total, self.rank_multiple, model)
        return {
            index: replace(self, rank=own.keys, value_rank=own.values, ranks=_ranks.SAME, rank_multiple=1)
            for index, own in ranks.items()
        }

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if a rank is too large, or the calibration is missing, incomplete or of another model."""
        self._check_ranks(model)
        for own in {*self.by_layer(model).values()} if self.differs_by_layer else {self}:
            assert isinstance(own, LowRank)
            for rank in {*own._ranks(model.head_dim)}:
                self.base.check(model._replace(head_dim=rank * self.head_group))
        self._check_calibration(model)

    def check_others(self, others: Others) -> None:
        """Refuse parts that may keep or read other tokens in one head than in the next, where heads share codes."""
        if self.head_group == 1:
            return
        if not others.same_in_heads:
            raise KVPolicyError(
                f"The selector must keep the same tokens in every head to be combined with {self}, whose heads share "
                f"latent vectors, got {others.selector}; try full, window, streaming or tova, or head_group=1."
            )
        if not others.reads_all:
            raise KVPolicyError(
                f"The reader must read every token to be combined with {self}, whose heads share latent vectors, got "
                f"{others.reader}; try all, or head_group=1."
            )

    def load_calibration(
        self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS
    ) -> LowRankCalibration:
        """The projections of a layer."""
        _, width = _projection.shape_of(self._basis, layer_idx)
        rank, value_rank = self._ranks(width)
        of_keys = _projection.of_keys(self._basis, rank, layer_idx, device, heads)
        return LowRankCalibration(*of_keys, *_projection.of_values(self._basis, value_rank, layer_idx, device, heads))

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> LowRankCodes:
        inner = inner_of(self.base)
        ranks = (rank * self.head_group for rank in self._ranks(head_dim))
        keys, values = (inner.alloc(batch, heads // self.head_group, slots, rank, device) for rank in ranks)
        return LowRankCodes(keys_only(keys), values_only(values))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        inner = inner_of(self.base)
        # The heads of a group hold the same tokens in the same slots.
        group = self.head_group
        where = [t[:, ::group] for t in (slots, write_mask, occupied)]
        inner.write_keys(keys_of(store), _latents(store.calibration.keys, keys, group), *where)
        inner.write_values(values_of(store), _latents(store.calibration.values, values, group), *where)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at` in the key space of the codec, [B, H, n, D] fp32."""
        return store.calibration.keys.decoded(self._read(inner_of(self.base).keys, keys_of(store), at))

    def values(self, store: StageStore, at: At) -> Tensor:
        return store.calibration.values.decoded(self._read(inner_of(self.base).values, values_of(store), at))

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with the key of every slot, of latent vectors where keys are rotated; see `Stage`."""
        if rope is not None:
            slots = rope.occupied.shape[2]
            return score_by_chunks(self._rough_keys, store, queries, rope, slots, self.traits.group_size)
        projection = store.calibration.keys
        own = queries.float()
        projected = self._by_group(own @ projection.decode.mT)
        scores = self._by_head(inner_of(self.base).score(keys_of(store), projected, None))
        return scores + own @ projection.mean.mT

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the values of all slots, of which only the sum is decoded; see `Stage.mix`."""
        projection = store.calibration.values
        own = weights.float()
        mixed = self._by_head(inner_of(self.base).mix(values_of(store), self._by_group(own)))
        return mixed @ projection.decode + own.sum(-1, keepdim=True) * projection.mean

    def _rough_keys(self, store: StageStore, at: At) -> Tensor:
        latents = self._read(inner_of(self.base).keys, keys_of(store), at)
        return store.calibration.keys.roughly_decoded(latents)

    def _read(self, read: Callable[[StageStore, At], Tensor], store: StageStore, at: At) -> Tensor:
        """The latent vectors that each head reads of slots, [B, H, n, r]: those of its group."""
        group = self.head_group
        if group == 1:
            return read(store, at)
        if isinstance(at, slice):
            return read(store, at).repeat_interleave(group, 1)
        return read(store, self._by_group(at[..., None])[..., 0]).unflatten(2, (group, -1)).flatten(1, 2)

    def _by_group(self, x: Tensor) -> Tensor:
        """Vectors of the heads of a group, one behind the other: [B, H, n, ...] as [B, H / g, g n, ...]."""
        return x if self.head_group == 1 else x.unflatten(1, (-1, self.head_group)).flatten(2, 3)

    def _by_head(self, x: Tensor) -> Tensor:
        """The inverse of `_by_group`."""
        return x if self.head_group == 1 else x.unflatten(2, (self.head_group, -1)).flatten(1, 2)

    @property
    def _basis(self) -> Basis:
        return Basis(self.calibration, self.key_space, self.basis, self.head_group)

    @property
    def _has_file(self) -> bool:
        return self.ranks not in (_ranks.SAME, *_ranks.DIVIDED)

    def _ranks(self, head_dim: int) -> Ranks:
        """Directions of keys and of values, of layers with different ranks the mean."""
        keys = max(1, head_dim // 2) if self.rank == "auto" else self.rank
        return Ranks(keys, keys if self.value_rank == "auto" else self.value_rank)

    def _check_ranks(self, model: ModelInfo) -> None:
        ranks = self._ranks(model.head_dim)
        for name, rank in zip(("rank", "value_rank"), ranks, strict=True):
            if rank > model.head_dim:
                raise KVPolicyError(
                    f"LowRank.{name} must be at most the head dimension, {model.head_dim}, got {rank}; try "
                    f"{name}={max(1, model.head_dim // 2)}."
                )
        if model.heads % self.head_group:
            raise KVPolicyError(
                f"LowRank.head_group must divide the model's {model.heads} KV heads, got {self.head_group}; try "
                f"head_group={math.gcd(model.heads, self.head_group)}."
            )
        if model.head_dim % self.rank_multiple or sum(ranks) < 2 * self.rank_multiple:
            raise KVPolicyError(
                f"LowRank.rank_multiple must divide the head dimension, {model.head_dim}, and be at most the mean "
                f"rank, got {self.rank_multiple}; try rank_multiple=1."
            )

    def _check_calibration(self, model: ModelInfo) -> None:
        _files.check_model(_files.load(self.calibration, "lowrank"), self.calibration, model)
        for layer_idx in model.indices:
            heads, width = _projection.shape_of(self._basis, layer_idx)
            is_alone = self.head_group == 1
            _files.check_heads(self.calibration, "lowrank", heads, width, model, may_be_shared=is_alone)


def _latents(projection: Projection, x: Tensor, group: int) -> Tensor:
    """Latent vectors of all tokens, of which few pass through fp64 at a time, [B, H / group, n, r] fp32."""
    found = [projection.latents(x[:, :, at], group) for at in token_ranges(x.shape[2])]
    if found:
        return torch.cat(found, 2)
    return x.new_zeros(x.shape[0], x.shape[1] // group, x.shape[2], projection.encode.shape[-1]).float()

"""ThinK: fewer channels of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs.base import check_base, inner_of, keys_of, keys_only, values_of, values_only, wrapper_traits
from kvpolicy.codecs.common import SingleStage, is_empty_head, sum_tokens
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.uniform import FP16
from kvpolicy.protocols import At, Codec, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.statistics import KeptStatistic
from kvpolicy.statistics.channel_sums import QuerySquares
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.strategy import AutoInt, between, checked, least, strategy

_MOST_CHANNELS = 256
"""The largest head dimension of which an index of a channel is a byte."""

_MULTIPLE = 8
"""A base stores a multiple of this many channels of a key, so that codes of any number of bits fill whole bytes."""


class ThinKCodes(NamedTuple):
    """The tensors of one layer; `K` is the number of channels that are kept.

    Attributes:
        channels: The kept channels of each head, ascending, [B, H, 1, K] uint8.
        keys: Codes of the base for keys of `K` channels; its fields of values have no slots.
        values: Codes of the base for values of `D` channels; its fields of keys have no slots.
    """

    channels: Tensor
    keys: Any
    values: Any


@strategy
class ThinK(SingleStage):
    """Store fewer channels of keys, those that contribute most to the scores of the newest queries.

    A channel adds the product of its query and key elements to a score. Where queries or keys are small in a channel,
    scores hardly change without it. So each KV head keeps the channels of the largest mean square of the last queries
    times the mean square of the keys, and stores only these of every key. Values are stored whole. Scores are products
    in the kept channels. Which channels are kept is decided by the first tokens that are encoded in a head, and stays
    until all of its encoded tokens are gone. The newest tokens stay whole, in full precision.

    Args:
        base: How the kept channels and the values are stored: in fp16, or by a codec that encodes keys and values apart
            (`tokenwise`, `kivi`, `turboquant` or `bfp`).
        ratio: The fraction of the channels that is not stored, at least 0 and less than 1; rounded down, with a base to
            a number that leaves a multiple of 8.
        window: How many of the newest queries of the prompt determine which channels are kept.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32. A base has its own.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32. A base has its own.

    Raises:
        KVPolicyTypeError: If a value is of another type.
        KVPolicyError: If a value is out of range, or the base cannot have keys of fewer channels than values.

    Examples:
        >>> from kvpolicy import Policy
        >>> Policy.parse("snapkv+think/kivi:bits=4@0.2").codec.base.bits
        4
        >>> ThinK().kept(128), Policy.parse("think/tokenwise").codec.kept(128)
        (77, 80)

    Source:
        ThinK (arXiv:2407.21018), and its authors' code, commit d200577. Differences:

        - Channels are chosen for each KV head, by the mean square over its query heads, as in kvpress; the authors'
          code repeats keys and chooses for each query head.
        - The squares of keys are those of the tokens that are encoded first, which the selector has kept, instead of
          the whole prompt, as the authors and kvpress have it.
        - The authors store the prompt's newest 32 tokens and all generated ones with all channels; here, the
          full-precision buffer holds the newest tokens, and older ones lose the channels that were chosen at the
          prompt.
        - kvpress sets channels to zero, which gives the same scores and saves no memory.
        - Kept channels and values are rounded to fp16: a model in bf16 loses no digit between 0.00006 and 65504.
        - With a base, a multiple of 8 channels is kept: 48 of 128 are dropped, where the default fraction is 51.
    """

    base: Codec = checked(check_base, Plain)
    ratio: float = between(0, 1, 0.4)
    window: int = least(1, 32)
    residual_length: AutoInt = least(0, "auto")
    block_size: AutoInt = least(1, "auto")

    def __post_init__(self) -> None:
        if self.ratio == 1:
            raise KVPolicyError("ThinK.ratio must be less than 1, got 1.0; try 0.4.")
        for name in ("residual_length", "block_size"):
            if getattr(self, name) != "auto" and not isinstance(self.base, Plain):
                raise KVPolicyError(
                    f"ThinK.{name} must be auto with a base, which has its own, got {getattr(self, name)}; try it as "
                    "an option of the base."
                )

    @property
    def traits(self) -> Traits:
        """The traits of the base; heads share channels that depend on queries."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        return wrapper_traits(self.base, tokens, self.residual_length, self.block_size)

    @property
    def statistics(self) -> tuple[KeptStatistic, ...]:
        """The squares of the newest queries, by which channels are chosen."""
        return (*self.base.statistics, QuerySquares(self.window))

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if channels are too many for a byte, or the base cannot store such keys or values."""
        if model.head_dim > _MOST_CHANNELS:
            raise KVPolicyError(
                f"The head dimension must be at most {_MOST_CHANNELS} for ThinK, got {model.head_dim}; try tokenwise."
            )
        for width in (self.kept(model.head_dim), model.head_dim):
            self.base.check(model._replace(head_dim=width))

    def kept(self, head_dim: int) -> int:
        """How many channels of a key of `head_dim` channels are stored, at least 1."""
        kept = max(head_dim - int(self.ratio * head_dim), 1)
        return kept if isinstance(self.base, Plain) else min(-(-kept // _MULTIPLE) * _MULTIPLE, head_dim)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> ThinKCodes:
        inner = inner_of(self.base)
        kept = self.kept(head_dim)
        return ThinKCodes(
            channels=torch.zeros(batch, heads, 1, kept, dtype=torch.uint8, device=device),
            keys=keys_only(inner.alloc(batch, heads, slots, kept, device)),
            values=values_only(inner.alloc(batch, heads, slots, head_dim, device)),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: ThinKCodes = store.codes
        if keys.shape[2] == 0 or occupied.shape[-1] == 0:
            return
        _fit(codes.channels, store.statistics[QuerySquares], keys, write_mask, occupied)
        inner = inner_of(self.base)
        few = _take_channels(keys, codes.channels)
        inner.write_keys(keys_of(store), few, slots, write_mask, occupied)
        inner.write_values(values_of(store), values, slots, write_mask, occupied)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at`, 0 in the channels that are not stored, [B, H, n, D] fp32."""
        few = inner_of(self.base).keys(keys_of(store), at)
        whole = few.new_zeros(*few.shape[:3], store.statistics[QuerySquares].shape[-1])
        return whole.scatter(-1, store.codes.channels.long().expand_as(few), few)

    def values(self, store: StageStore, at: At) -> Tensor:
        return inner_of(self.base).values(values_of(store), at)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with the key of every slot, in the kept channels; see `Stage.score`."""
        assert rope is None, "keys are encoded as attention sees them"
        return inner_of(self.base).score(keys_of(store), _take_channels(queries, store.codes.channels), None)

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        return inner_of(self.base).mix(values_of(store), weights)


def _take_channels(x: Tensor, channels: Tensor) -> Tensor:
    """The channels [B, H, 1, K] of vectors [B, H, n, D], [B, H, n, K]."""
    return x.gather(-1, channels.long().expand(*x.shape[:3], -1))


def _fit(channels: Tensor, query_square: Tensor, keys: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
    """Choose the channels of heads without an occupied slot, in place."""
    # Channels are ranked by keys alone where no query was seen. Keys are clipped as fp16 is, so that no square is inf.
    queries = query_square.double()[:, :, None]
    queries = queries.masked_fill((queries == 0).all(-1, keepdim=True), 1)
    score = queries * sum_tokens(keys, write_mask, lambda x: x.clamp(-FP16, FP16).square())
    # As fp32, in which the last bits of a sum do not matter. Of equal channels, the first ones are kept.
    order = score.float().argsort(dim=-1, descending=True, stable=True)
    chosen = order[..., : channels.shape[-1]].sort(-1).values.to(channels.dtype)
    channels.copy_(torch.where(is_empty_head(write_mask, occupied), chosen, channels))

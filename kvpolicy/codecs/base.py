"""Codecs that wrap another one, their base, as in `think/tokenwise:bits=4`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import (
    ENCODED_AT_ONCE,
    TwoSides,
    add_rest,
    mix_by_chunks,
    put,
    score_by_chunks,
    take,
    token_ranges,
)
from kvpolicy.codecs.plain import Plain
from kvpolicy.codecs.uniform import FP16
from kvpolicy.kernels.compiled import call
from kvpolicy.kernels.fused_elements import is_read_whole, mix_half, score_half
from kvpolicy.kernels.fused_read import in_blocks
from kvpolicy.protocols import At, Codec, RotaryView, StageStore, Traits, traits_for
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.validation import AutoInt


class HalfCodes(NamedTuple):
    """Vectors in fp16.

    Attributes:
        keys: [B, H, C, D] fp16.
        values: [B, H, C, D] fp16.
    """

    keys: Tensor
    values: Tensor


class Half(TwoSides):
    """Store vectors in fp16, clipped to its range: what a wrapper uses where its base is `Plain`."""

    __slots__ = ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> HalfCodes:
        keys = torch.zeros(batch, heads, slots, head_dim, dtype=torch.float16, device=device)
        return HalfCodes(keys, torch.zeros(keys.shape, dtype=keys.dtype, device=device))

    def write_keys(self, store: StageStore, keys: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor) -> None:
        _put(store.codes.keys, keys, slots, write_mask)

    def write_values(
        self, store: StageStore, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        _put(store.codes.values, values, slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        return take(store.codes.keys, at).float()

    def values(self, store: StageStore, at: At) -> Tensor:
        return take(store.codes.values, at).float()

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        keys = store.codes.keys
        if rope is not None or not is_read_whole(keys):
            return score_by_chunks(_half_keys, store, queries, rope, keys.shape[2])
        return call(score_half, keys, queries.float())

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        held = store.codes.values
        if not is_read_whole(held):
            return mix_by_chunks(_half_values, store, weights)
        mixed = call(mix_half, in_blocks(held), in_blocks(weights.float(), 3))
        return add_rest(mixed, lambda at: self.values(store, at), weights)


def _half_keys(store: StageStore, at: At) -> Tensor:
    """Keys as they are stored: a model in fp16 multiplies them without a copy."""
    return take(store.codes.keys, at)


def _half_values(store: StageStore, at: At) -> Tensor:
    """Values as they are stored."""
    return take(store.codes.values, at)


def _put(target: Tensor, x: Tensor, slots: Tensor, write_mask: Tensor) -> None:
    if target.shape[2] == 0:
        return
    for at in token_ranges(x.shape[2]):
        put(target, x[:, :, at].float().clamp(-FP16, FP16).half(), slots[:, :, at], write_mask[:, :, at])


_HALF = Half()


def check_base(name: str, base: object) -> None:
    """Refuse what a codec cannot wrap: it wraps `Plain` and codecs with two sides.

    Raises:
        KVPolicyTypeError: If it is no codec.
        KVPolicyError: If it is a codec whose keys and values cannot have different widths.
    """
    if not isinstance(base, Codec):
        raise KVPolicyTypeError(f"{name} must be a codec, got {base!r}; try TokenWise().")
    if not isinstance(base, Plain | TwoSides):
        raise KVPolicyError(
            f"{name} must encode keys and values separately, got {base}; try tokenwise, kivi, turboquant or bfp."
        )


def inner_of(base: Codec) -> TwoSides:
    """The stage that stores what a wrapper passes on: the base itself, or fp16 where it is `Plain`."""
    # Not asked whether it has two sides, which a compiler would have to trace: `check_base` did.
    return _HALF if isinstance(base, Plain) else cast(TwoSides, base)


def wrapper_traits(base: Codec, tokens: int | None, residual: AutoInt, block: AutoInt) -> Traits:
    """The traits of a codec over a base for rows of `tokens` tokens; its codes do not fit pages.

    Args:
        base: The base.
        tokens: See `SizedCodec`.
        residual: The residual of the wrapper, if the base is `Plain`, which has none.
        block: The block of the wrapper likewise.
    """
    if isinstance(base, Plain):
        residual, block = buffer_sizes(tokens, residual=residual, block=block)
        return Traits(block=block, residual=residual, at_once=ENCODED_AT_ONCE)
    return (base.traits if tokens is None else traits_for(base, tokens))._replace(
        per_head=None, by_layer=None, groups=None
    )


def keys_of(store: StageStore) -> StageStore:
    """The tensors of keys in the store of a wrapper, as the base takes them."""
    return store._replace(codes=store.codes.keys, calibration=())


def values_of(store: StageStore) -> StageStore:
    """The tensors of values likewise."""
    return store._replace(codes=store.codes.values, calibration=())


def keys_only(codes: Any) -> Any:
    """Codes of which the fields of values have no slots, and take no bytes."""
    return _side(codes, lambda name: "value" not in name)


def values_only(codes: Any) -> Any:
    """Codes of which the fields of keys have no slots, and take no bytes."""
    return _side(codes, lambda name: "value" in name)


def _side(codes: Any, stays: Callable[[str], bool]) -> Any:
    # Contiguous, so that the memory of the tensor that is left out is not held.
    parts = zip(codes._fields, codes, strict=True)
    return type(codes)(*[t if stays(name) else t[:, :, :0].clone() for name, t in parts])

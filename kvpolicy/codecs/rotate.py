"""Few bits per number after every channel is mixed with all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs._common import check_least, is_fresh, mix_by_chunks, ordinary_layout, put, score_by_chunks, take
from kvpolicy.codecs._rotation import mix, mixing, unmix
from kvpolicy.codecs._uniform import FP16, largest_divisor
from kvpolicy.codecs.packing import pack, packed_width, round_to_half, unpack
from kvpolicy.protocols import ALL_HEADS, At, Calibration, Layout, ModelInfo, RotaryView, Stage, StageStore, Traits
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.validation import check_fields


class RotateCodes(NamedTuple):
    """What RotateKV stores of one layer; `D'` is the bytes of D packed codes, `g` the groups of a token.

    Attributes:
        keys: Codes of mixed, reordered keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, g] fp16.
        key_zero: The code that stands for 0, [B, H, C, g] uint8.
        place: Where each mixed channel of a key stands, [B, H, 1, D] int16; all 0, and unused, where `g` is 1.
        values: Codes of mixed values, [B, H, C, D'] uint8.
        value_scale: [B, H, C, g] fp16.
        value_zero: [B, H, C, g] uint8.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    place: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RotateKV:
    """Quantize each token on its own, after a Hadamard transform has spread its outliers over all channels.

    Keys are coded without their rotary embedding. Their mixed channels are sorted by size, so that channels of one
    group are alike. A group has a scale in fp16 and a zero that is itself a code. Tokens that hold a massive
    activation, which become attention sinks, stay exact, and so do the newest.

    Args:
        bits: Bits per code: 2, 3 or 4.
        group_size: The most channels of a group (the largest divisor of the head dimension that is not above it).
        sinks: The most tokens that stay exact for their massive activations.
        residual_length: How many of the newest tokens always stay exact.
        block_size: How many tokens are coded at a time in decode.

    Examples:
        >>> RotateKV().layout(1000)
        Layout(exact=84, coded=(948,))

    Source: RotateKV (arXiv:2501.16383), by its code, which only simulates the codes; the paper was not read in full
    (unverified).
    Differences: every KV head is mixed alone (the code mixes four together), because each head may hold other tokens. A
    head dimension that is no power of two is mixed by a Hadamard matrix and a cosine transform. Nothing is folded into
    the model's weights: values too are mixed and mixed back here. The order of channels is fitted to the first tokens
    that a head's coded part receives (to a calibration set in the paper), and there is none where there is one group.
    The zero of a group is one byte, and 0 is always inside a group's range. There are 2^bits - 1 steps (the code has
    bits^2 - 1, which is wrong at 3 bits). A group whose numbers are all equal is exact, up to fp16. The newest tokens
    stay exact, and tokens that leave the exact part go in blocks.
    """

    bits: Literal[2, 3, 4] = 2
    group_size: int = 128
    sinks: int = 20
    residual_length: int = 32
    block_size: int = 32

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_fields(self)
        if self.bits not in (2, 3, 4):
            raise KVPolicyError(f"RotateKV's bits is {self.bits!r}: give 2, 3 or 4.")
        if self.sinks >= 2**15:
            raise KVPolicyError(f"RotateKV's sinks is {self.sinks}: give at most 32767, such as 20.")
        check_least(self, group_size=(1, 128), sinks=(0, 20), residual_length=(0, 32), block_size=(1, 32))

    @property
    def traits(self) -> Traits:
        """A slot's code depends on its own token alone; massive activations are pinned."""
        return Traits(
            block=self.block_size,
            residual=self.residual_length,
            key_space="unrotated",
            pins="massive",
            pinned=self.sinks,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """One."""
        return (self,)

    def layout(self, tokens: int) -> Layout:
        """Room for sinks, the residual and one block exact, and all else coded."""
        return ordinary_layout(self.traits, tokens)

    def check(self, model: ModelInfo) -> None:
        """Every head dimension that fits an order in int16 can be coded."""
        if model.head_dim >= 2**15:
            raise KVPolicyError(
                f"RotateKV orders channels in int16, and the head dimension is {model.head_dim}: use KIVI."
            )

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> Calibration:
        """Nothing is calibrated."""
        return ()

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> RotateCodes:
        """Empty codes for `slots` slots."""

        def zeros(count: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, heads, count, width, dtype=dtype, device=device)

        packed, groups = packed_width(head_dim, self.bits), head_dim // largest_divisor(head_dim, self.group_size)
        return RotateCodes(
            zeros(slots, packed, torch.uint8),
            zeros(slots, groups, torch.float16),
            zeros(slots, groups, torch.uint8),
            zeros(1, head_dim, torch.int16),
            zeros(slots, packed, torch.uint8),
            zeros(slots, groups, torch.float16),
            zeros(slots, groups, torch.uint8),
        )

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        """Encode tokens into slots, in place; see `Stage.write`."""
        codes: RotateCodes = store.codes
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        mixed = mix(keys.float())
        if codes.key_scale.shape[-1] > 1:  # an order inside one group changes nothing
            fresh = is_fresh(write_mask, occupied)
            codes.place.copy_(torch.where(fresh, _places(mixed, write_mask), codes.place))
            order = codes.place.argsort(-1).expand_as(mixed)
            mixed = mixed.gather(-1, order)
        self._put((codes.keys, codes.key_scale, codes.key_zero), mixed, slots, write_mask)
        self._put((codes.values, codes.value_scale, codes.value_zero), mix(values.float()), slots, write_mask)

    def keys(self, store: StageStore, at: At) -> Tensor:
        """Keys of the slots `at` without rotary embedding, [B, H, n, D] fp32."""
        return unmix(self._mixed_keys(store, at))

    def values(self, store: StageStore, at: At) -> Tensor:
        """Values of the slots `at`, [B, H, n, D] fp32."""
        return unmix(self._mixed_values(store, at))

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of queries with every slot's key; see `Stage.score`."""
        matrix = mixing(queries.shape[-1], None, queries.device)

        def keys(store: StageStore, at: At) -> Tensor:
            return self._mixed_keys(store, at) @ matrix

        return score_by_chunks(keys, store, queries, rope, store.codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Every slot's value, weighted and summed, and only the sum mixed back; see `Stage.mix`."""
        return unmix(mix_by_chunks(self._mixed_values, store, weights))

    def _mixed_keys(self, store: StageStore, at: At) -> Tensor:
        codes: RotateCodes = store.codes
        mixed = self._read((codes.keys, codes.key_scale, codes.key_zero), at, codes.place.shape[-1])
        if codes.key_scale.shape[-1] > 1:
            mixed = mixed.gather(-1, codes.place.long().expand_as(mixed))
        return mixed

    def _mixed_values(self, store: StageStore, at: At) -> Tensor:
        codes: RotateCodes = store.codes
        return self._read((codes.values, codes.value_scale, codes.value_zero), at, codes.place.shape[-1])

    def _read(self, parts: tuple[Tensor, Tensor, Tensor], at: At, width: int) -> Tensor:
        code, scale, zero = (take(part, at) for part in parts)
        steps = unpack(code, self.bits, width).unflatten(-1, (scale.shape[-1], -1)).float() - zero[..., None].float()
        return (steps * scale.float()[..., None]).flatten(-2)

    def _put(self, parts: tuple[Tensor, Tensor, Tensor], mixed: Tensor, slots: Tensor, write_mask: Tensor) -> None:
        """Quantize groups, of which 2-bit codes cut off the outer fifth of either side's range."""
        grouped = mixed.unflatten(-1, (parts[1].shape[-1], -1))
        least, most = torch.aminmax(grouped, dim=-1, keepdim=True)
        top, clip = 2**self.bits - 1, 0.8 if self.bits == 2 else 1.0
        low, high = least.clamp(max=0) * clip, most.clamp(min=0) * clip
        scale = round_to_half(torch.where(least == most, most.abs(), (high - low) / top).clamp(max=FP16))
        divisor = scale.masked_fill(scale == 0, 1)  # where it is 0, any code is 0
        zero = (-low / divisor).round().clamp(0, top)
        code = ((grouped / divisor).round() + zero).clamp(0, top).to(torch.uint8)
        put(parts[0], pack(code.flatten(-2), self.bits), slots, write_mask)
        put(parts[1], scale.squeeze(-1).half(), slots, write_mask)
        put(parts[2], zero.squeeze(-1).to(torch.uint8), slots, write_mask)


def _places(mixed: Tensor, write_mask: Tensor) -> Tensor:
    """Each channel's place when channels are sorted by their sum of sizes, the largest first, [B, H, 1, D] int16.

    The sum is one of integers: it must not depend on how many inactive tokens stand between the others.
    """
    size = mixed.abs().masked_fill(~write_mask[..., None], 0)
    unit = size.amax((2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * 2.0**-24
    total = (size / unit).round().long().sum(2, keepdim=True)
    return total.sort(dim=-1, descending=True, stable=True).indices.argsort(-1).to(torch.int16)

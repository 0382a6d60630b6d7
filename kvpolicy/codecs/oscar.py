"""OSCAR: few bits after a rotation that was calibrated by queries and by attention."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvpolicy.codecs import _files
from kvpolicy.codecs.buffer import buffer_sizes
from kvpolicy.codecs.common import (
    ENCODED_AT_ONCE,
    SingleStage,
    mix_by_chunks,
    put,
    score_by_chunks,
    take,
    token_ranges,
)
from kvpolicy.codecs.side_bits import SideBits
from kvpolicy.codecs.token_groups import Parts
from kvpolicy.codecs.uniform import dequantize, is_fused, largest_divisor, mix_fused, quantize, score_fused
from kvpolicy.kernels.packing import packed_width
from kvpolicy.protocols import ALL_HEADS, At, ModelInfo, RotaryView, StageStore, Traits
from kvpolicy.text.strategy import AutoInt, fraction, least, strategy, tiny_or


class OSCARRotations(NamedTuple):
    """The calibrated tensors of one layer; H is 1 if all heads share them.

    Attributes:
        keys: What keys are multiplied by, orthonormal, [1, H, D, D] fp32.
        values: The same for values, [1, H, D, D] fp32.
    """

    keys: Tensor
    values: Tensor


class OSCARCodes(NamedTuple):
    """The tensors of one layer; `D'` is the bytes of D codes of the side, `g` the groups of a token.

    Attributes:
        keys: Codes of rotated keys, [B, H, C, D'] uint8.
        key_scale: [B, H, C, g] fp16.
        key_zero: [B, H, C, g] fp16.
        values: Codes of rotated values, [B, H, C, D'] uint8.
        value_scale: [B, H, C, g] fp16.
        value_zero: [B, H, C, g] fp16.
    """

    keys: Tensor
    key_scale: Tensor
    key_zero: Tensor
    values: Tensor
    value_scale: Tensor
    value_zero: Tensor


@strategy
class OSCAR(SideBits, SingleStage):
    """Quantize each token to 2 bits after a calibrated rotation, and keep many sinks and recent tokens as they are.

    An error of a key matters as far as queries have its direction, and that of a value as far as its token is attended
    to. So keys are rotated to the directions of the queries, and values to those of the values, weighted by the scores
    of their keys; a Hadamard transform then spreads each direction evenly over all channels. The outermost elements of
    a vector are clipped. At `bits=2` in a head of 128 channels, an element takes 2.25 bits.

    Args:
        bits: Bits per code: 2, 3 or 4.
        key_bits: Bits per code of keys, which have outliers; `auto`: `bits`.
        value_bits: Bits per code of values; `auto`: `bits`.
        group_size: The maximum number of channels per group (which has the largest divisor of the head dimension up to
            it).
        key_clip: Fraction of the elements of a key that are inside the bound to which the others are clipped; 1 for
            none that is clipped.
        value_clip: The same for values.
        sinks: How many of the first prompt tokens stay in full precision.
        residual_length: How many of the newest tokens always stay in full precision. `auto`: one for every 32 tokens of
            the budget, less the block if `block_size` is `auto` too; at most 32.
        block_size: How many tokens are encoded at a time during decode. `auto`: one for every 32 tokens of the budget,
            at least 1 and at most 32.
        calibration: Folder of the calibration, or the name of an embedded model, `tiny` or `tiny-4k`.

    Examples:
        >>> OSCAR().layout(1000)
        Layout(exact=351, coded=(680,))

    Source:
        OSCAR (arXiv:2605.17757), by the authors' code; the paper was not read in full (unverified). The defaults are
        those of its runs with Qwen3-8B. Differences:

        - Each KV head has its own rotations, unless the calibration was made with `--shared`: one for all heads of a
          layer, as in the paper. The authors' later code has one for each head too.
        - A head dimension that is not a power of two is spread by a Hadamard matrix and a cosine transform, and not
          permuted by bit reversal, which has no effect where a group is a whole head.
        - Scale and zero are fp16, and codes are rounded with them, half to even; the zero is a number (the minimum),
          and not a code. The authors' are fp32 or bf16, half up.
        - Nothing is folded into the weights of the model: queries and outputs are rotated in each step.
        - Lloyd-Max levels, which their code has for newer models, are not here.
        - Tokens are encoded in blocks.
    """

    bits: Literal[2, 3, 4] = 2
    key_bits: Literal[2, 3, 4, "auto"] = "auto"
    value_bits: Literal[2, 3, 4, "auto"] = "auto"
    group_size: int = least(1, 128)
    key_clip: float = fraction(0.96)
    value_clip: float = fraction(0.92)
    sinks: int = least(0, 64)
    residual_length: AutoInt = least(0, 256)
    block_size: AutoInt = least(1, "auto")
    calibration: str = tiny_or("a folder")

    @property
    def traits(self) -> Traits:
        """The code of a token does not depend on other tokens; the first ones are pinned."""
        return self.traits_for(None)

    def traits_for(self, tokens: int | None) -> Traits:
        residual, block = buffer_sizes(tokens, residual=self.residual_length, block=self.block_size)
        return Traits(
            block=block,
            residual=residual,
            pins="first" if self.sinks else "none",
            pinned=self.sinks,
            at_once=ENCODED_AT_ONCE,
        )

    def load_calibration(self, layer_idx: int, device: torch.device | str, heads: slice = ALL_HEADS) -> OSCARRotations:
        """The calibrated rotations of a layer."""
        names = ("keys.rotation", "values.rotation")
        sides = (_files.layer_tensor(self.calibration, "oscar", name, layer_idx).float() for name in names)
        return OSCARRotations(*((t if len(t) == 1 else t[heads])[None].to(device) for t in sides))

    def check(self, model: ModelInfo) -> None:
        """Raise KVPolicyError if the calibration is missing, lacks a layer or is of another model."""
        _files.check_model(_files.load(self.calibration, "oscar"), self.calibration, model)
        for layer_idx in model.indices:
            for rotation in self.load_calibration(layer_idx, "cpu"):
                _files.check_heads(self.calibration, "oscar", rotation.shape[1], rotation.shape[2], model)

    def alloc(self, batch: int, heads: int, slots: int, head_dim: int, device: torch.device | str) -> OSCARCodes:

        def side(bits: int) -> tuple[Tensor, Tensor, Tensor]:
            groups = head_dim // largest_divisor(head_dim, self.group_size)
            sizes = ((packed_width(head_dim, bits), torch.uint8), (groups, torch.float16), (groups, torch.float16))
            code, scale, zero = (torch.zeros(batch, heads, slots, n, dtype=dtype, device=device) for n, dtype in sizes)
            return code, scale, zero

        return OSCARCodes(*side(self.bits_of_keys), *side(self.bits_of_values))

    def write(
        self, store: StageStore, keys: Tensor, values: Tensor, slots: Tensor, write_mask: Tensor, occupied: Tensor
    ) -> None:
        codes: OSCARCodes = store.codes
        rotations: OSCARRotations = store.calibration
        if keys.shape[2] == 0 or codes.keys.shape[2] == 0:
            return
        sides = (
            (keys, rotations.keys, self.key_clip, self.bits_of_keys, codes[:3]),
            (values, rotations.values, self.value_clip, self.bits_of_values, codes[3:]),
        )
        for x, rotation, clip, bits, targets in sides:
            for at in token_ranges(x.shape[2]):
                some = clipped(_times(x[:, :, at], rotation), clip)
                encoded = quantize(some, bits, some.shape[-1] // targets[1].shape[-1])
                for target, data in zip(targets, encoded, strict=True):
                    put(target, data, slots[:, :, at], write_mask[:, :, at])

    def keys(self, store: StageStore, at: At) -> Tensor:
        return _times(self._rotated_keys(store, at), store.calibration.keys.mT)

    def values(self, store: StageStore, at: At) -> Tensor:
        return _times(self._rotated_values(store, at), store.calibration.values.mT)

    def score(self, store: StageStore, queries: Tensor, rope: RotaryView | None) -> Tensor:
        """Products of rotated queries with the rotated key of every slot; see `Stage.score`."""
        assert rope is None, "keys are encoded as attention sees them"
        codes: OSCARCodes = store.codes
        rotated = queries.float() @ store.calibration.keys
        if is_fused(codes.keys, self.bits_of_keys, queries.shape[-1]):
            return score_fused(*codes[:3], rotated, self.bits_of_keys)
        return score_by_chunks(self._rotated_keys, store, rotated.to(queries.dtype), None, codes.keys.shape[2])

    def mix(self, store: StageStore, weights: Tensor) -> Tensor:
        """Weighted sum of the values of all slots, of which only the sum is rotated back; see `Stage.mix`."""
        codes: OSCARCodes = store.codes
        back = store.calibration.values.mT
        if is_fused(codes.values, self.bits_of_values, back.shape[-1]):
            return mix_fused(*codes[3:], weights, self.bits_of_values) @ back
        return mix_by_chunks(self._rotated_values, store, weights) @ back

    def _rotated_keys(self, store: StageStore, at: At) -> Tensor:
        return _read(store.codes[:3], at, self.bits_of_keys, store.calibration.keys.shape[-1])

    def _rotated_values(self, store: StageStore, at: At) -> Tensor:
        return _read(store.codes[3:], at, self.bits_of_values, store.calibration.values.shape[-1])


def clipped(x: Tensor, inside: float) -> Tensor:
    """Vectors whose largest elements are clipped to the size of a smaller one, [..., D].

    Args:
        x: [..., D].
        inside: The rank of that one by size, as a fraction of D; 1 for the largest, so that nothing is clipped.

    >>> clipped(torch.tensor([3.0, -9.0, 1.0, 2.0]), 0.5).tolist()
    [3.0, -3.0, 1.0, 2.0]
    """
    if inside == 1:
        return x
    bound = x.abs().sort(-1).values[..., int(inside * x.shape[-1]), None]
    return x.clamp(-bound, bound)


def _times(x: Tensor, rotation: Tensor) -> Tensor:
    """Vectors [B, H, n, D] times a matrix [1, H, D, D], fp32."""
    # In fp64, since the order of the sums of a product depends on the batch, and a code must not.
    return (x.double() @ rotation.double()).float()


def _read(parts: Parts, at: At, bits: int, width: int) -> Tensor:
    """The rotated vectors that the codes of the slots `at` stand for, [B, H, n, D] fp32."""
    code, scale, zero = (take(part, at) for part in parts)
    return dequantize(code, scale, zero, bits, width)

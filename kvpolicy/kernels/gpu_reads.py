"""Attention to codes on a GPU, in Triton: functions of `kvpolicy.kernels.fused_read`, with the same arguments.

Inductor's loops take 5 to 20 times the time of the bytes of the codes on a GPU: they convert each code to fp32 once for
every query head, and load few bytes at a time. Here codes become bf16, in which integers up to 256 are exact, and
tensor cores multiply them. A number of fp32 is the sum of three of bf16. These are three rows of one product, so that
products are as exact as in fp32.

This module imports Triton. `kvpolicy.kernels.compiled` imports it where Triton is.

`B` rows, `H` KV heads, `C` slots, `G` query heads of each KV head, `D` channels, `W` bytes of the codes of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton import knobs

from kvpolicy.kernels import gpu_programs

programs: Any = gpu_programs

PROGRAMS = 1056
"""Programs that share the slots of all heads, at most: eight for each multiprocessor of a large GPU."""

GROUP_PROGRAMS = 4224
"""The same where programs have one warp and read one group of tokens at a time."""

SCORED = 64
"""Slots that a program scores at a time, at most."""

MIXED = 32
"""Slots that a program mixes at a time."""

LEAST = 16
"""The least size of a dimension of a product on tensor cores."""

LARGEST_GROUP = 128
"""Tokens of the largest group that is read."""

MOST_HEADS = 32
"""The most query heads of a KV head that are read."""


def score_channel_groups(
    codes: Tensor, scale: Tensor, zero: Tensor, queries: Tensor, sums: Tensor, bits: int
) -> Tensor | None:
    """`fused_read.score_channel_groups`, or None if the shapes do not suit."""
    batch, heads, slots, _ = codes.shape
    group, dim = queries.shape[2:]
    sizes = _channel_sizes(codes, scale, group, dim, bits)
    if sizes is None:
        return None
    # Without zeros, scales take their place as an argument, which a program with HAS_ZERO=False does not read.
    zero = zero if zero.shape[-1] else scale
    sizes["BLOCK"] = max(2 * LEAST, min(SCORED, _power_of_2(slots)))
    share, shares = _shares(slots, sizes["BLOCK"], batch * heads, PROGRAMS)
    out = queries.new_empty(batch, heads, group, slots)
    programs.score_channel_groups[batch * heads, shares](
        codes,
        scale,
        zero,
        queries.contiguous(),
        sums.contiguous(),
        out,
        *codes.stride()[:3],
        *scale.stride()[:3],
        *zero.stride()[:3],
        heads,
        slots,
        share,
        **sizes,
        HAS_ZERO=zero is not scale,
        num_warps=2,
        num_stages=3,
    )
    return out


def score_token_groups(codes: Tensor, scale: Tensor, offsets: Tensor, queries: Tensor, bits: int) -> Tensor | None:
    """`fused_read.score_token_groups`, or None if the shapes do not suit."""
    batch, heads, slots, _ = codes.shape
    groups, dim = scale.shape[2:]
    size = slots // groups
    sizes = _sizes(codes, scale, queries.shape[2], dim, bits)
    if sizes is None or size & (size - 1) or not LEAST <= size <= LARGEST_GROUP:
        return None
    share, shares = _shares(groups, 1, batch * heads, GROUP_PROGRAMS)
    out = queries.new_empty(batch, heads, queries.shape[2], slots)
    programs.score_token_groups[batch * heads, shares](
        codes,
        scale,
        offsets.contiguous(),
        queries.contiguous(),
        out,
        *codes.stride()[:3],
        *scale.stride()[:3],
        heads,
        groups,
        share,
        **sizes | {"SIZE": size},
        num_warps=1,
        num_stages=3,
    )
    return out


def mix_channel_groups(codes: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, bits: int) -> Tensor | None:
    """`fused_read.mix_channel_groups`, or None if the shapes do not suit."""
    batch, heads, slots, width = codes.shape
    group = weights.shape[2]
    dim = width * 8 // bits
    sizes = _channel_sizes(codes, scale, group, dim, bits)
    if sizes is None:
        return None
    zero = zero if zero.shape[-1] else scale
    # Programs share the slots of a head, and each adds up its own: the sums of all are added in the end.
    runs = width // sizes["RUN"]
    share, shares = _shares(slots, MIXED, batch * heads * runs, PROGRAMS)
    out = weights.new_empty(shares, batch, heads, group, dim)
    programs.mix_channel_groups[batch * heads, shares, runs](
        codes,
        scale,
        zero,
        weights.contiguous(),
        out,
        *codes.stride()[:3],
        *scale.stride()[:3],
        *zero.stride()[:3],
        heads,
        slots,
        share,
        **sizes,
        HAS_ZERO=zero is not scale,
        BLOCK=MIXED,
        num_warps=2,
        num_stages=3,
    )
    return out.sum(0) if shares > 1 else out[0]


def _channel_sizes(codes: Tensor, scale: Tensor, group: int, dim: int, bits: int) -> dict[str, Any] | None:
    """Constants of programs that read groups of channels, or None if they read none of such shapes."""
    sizes = _sizes(codes, scale, group, dim, bits)
    if sizes is None:
        return None
    size = dim // scale.shape[3]
    run = math.gcd(sizes["W"], size)
    return sizes | {"SIZE": size, "RUN": run, "LANES": max(LEAST, _power_of_2(run))}


def _sizes(codes: Tensor, scale: Tensor, group: int, dim: int, bits: int) -> dict[str, Any] | None:
    """Constants of programs that read codes, or None if they read none of such shapes."""
    slots, width = codes.shape[2:]
    # Within a head, offsets have 32 bits.
    is_near = slots * max(codes.stride(2), scale.stride(2), group) < 2**31
    if codes.stride(-1) != 1 or scale.stride(-1) != 1 or group > MOST_HEADS or 8 % bits or not slots or not is_near:
        return None
    heads = max(LEAST // 4, _power_of_2(group))
    lanes = max(LEAST, _power_of_2(width))
    in_python = knobs.runtime.interpret
    return {"G": group, "HEADS": heads, "D": dim, "W": width, "BITS": bits, "LANES": lanes, "IN_PYTHON": in_python}


def _power_of_2(number: int) -> int:
    """The smallest power of two from a positive number on."""
    return 1 << (number - 1).bit_length()


def _shares(slots: int, block: int, programs: int, most: int) -> tuple[int, int]:
    """Slots of a program, and the programs that share the slots of a head.

    Args:
        slots: Slots of a head.
        block: Slots that a program reads at a time.
        programs: Programs if each reads all slots of a head.
        most: Programs that fill a GPU.
    """
    blocks = -(-slots // block)
    share = -(-blocks // min(blocks, max(1, most // programs)))
    return share * block, -(-blocks // share)


READS: dict[str, Callable[..., Tensor | None]] = {
    "score_channel_groups": score_channel_groups,
    "score_token_groups": score_token_groups,
    "mix_channel_groups": mix_channel_groups,
}
"""These run on a GPU in place of the functions of `fused_read`, by their names, which are unique; see `apart`."""

# type: ignore  # The language of Triton, which only looks like Python.
"""Programs in Triton that `kvpolicy.kernels.gpu_reads` starts.

Tensors are pointers, and arguments such as `codes_b` are strides: of rows, heads, and slots or groups of tokens.
Those in capitals are constants, for which a program is compiled: `G` query heads of a KV head, as `HEADS` rows or
columns; `D` channels; `W` bytes of the codes of a slot; `BITS` of a code; `SIZE` channels or tokens of a group.
Neighboring bytes whose codes share scales are a run of `RUN` bytes, read as `LANES`. With `IN_PYTHON`, programs run in
Triton's interpreter, which knows neither PTX nor products of bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _thirds(x):
    """Three numbers of bf16 whose sum is `x` in fp32."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _third(x, part, IN_PYTHON: tl.constexpr):
    """The first, second or third number of bf16 of `x`, or 0, by `part`."""
    first, second, third = _thirds(x)
    later = tl.where(part == 1, second.to(tl.float32), tl.where(part == 2, third.to(tl.float32), 0.0))
    chosen = tl.where(part == 0, first.to(tl.float32), later)
    return chosen if IN_PYTHON else chosen.to(tl.bfloat16)


@triton.jit
def _rows_of_thirds(x, IN_PYTHON: tl.constexpr):
    """The numbers of bf16 of each row of `x` [M, N] as three rows, and a row of 0, [4 M, N]."""
    first, second, third = _thirds(x)
    parts = tl.join(tl.join(first, second), tl.join(third, tl.zeros_like(third)))
    parts = parts.to(tl.float32) if IN_PYTHON else parts
    # The four rows are neighbors in shared memory, where a thread writes them at once. So `x` is loaded one number at a
    # time: if each thread had neighboring columns, all threads would write to the same banks.
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1)), [4 * x.shape[0], x.shape[1]])


@triton.jit
def _codes_at(packed, PLACE: tl.constexpr, BITS: tl.constexpr, IN_PYTHON: tl.constexpr):
    """The codes at one place of bytes, as bf16."""
    SHIFT: tl.constexpr = PLACE * BITS
    if IN_PYTHON:
        return ((packed >> SHIFT) & (2**BITS - 1)).to(tl.float32)
    elif BITS == 8:
        return _codes_at(packed, 0, 4, False) + _codes_at(packed, 1, 4, False) * 16.0
    else:
        # Four bytes at a time. 0x43 before the byte of a code is 128 + code in bf16.
        MASK: tl.constexpr = (2**BITS - 1) * 0x01010101
        return tl.inline_asm_elementwise(
            f"""
            {{
            .reg .b32 codes, high, one;
            shr.b32 codes, $2, {SHIFT};
            and.b32 codes, codes, {MASK};
            mov.b32 high, 0x43434343;
            prmt.b32 $0, codes, high, 0x4140;
            prmt.b32 $1, codes, high, 0x4342;
            mov.b32 one, 0x3F803F80;
            mov.b32 high, 0xC300C300;
            fma.rn.bf16x2 $0, $0, one, high;
            fma.rn.bf16x2 $1, $1, one, high;
            }}
            """,
            "=&r,=&r,r",
            [packed],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def score_channel_groups(
    codes,
    scale,
    zero,
    queries,
    sums,
    out,
    codes_b,
    codes_h,
    codes_c,
    scale_b,
    scale_h,
    scale_c,
    zero_b,
    zero_h,
    zero_c,
    heads,
    slots,
    share,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_PYTHON: tl.constexpr,
):
    """Scores of some slots of a head: products of bf16 for each run and place, scaled and added."""
    row = tl.program_id(0).to(tl.int64)
    b = row // heads
    h = row % heads
    head = tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    codes += b * codes_b + h * codes_h
    scale += b * scale_b + h * scale_h
    zero += b * zero_b + h * zero_h
    column = tl.arange(0, 4 * HEADS)
    part = (column % 4)[None, :]
    own_head = (column // 4)[None, :]
    # Four columns of bf16 for each query head, of which the last is 0: made once for all slots.
    columns = ()
    for run in tl.static_range(W // RUN):
        for place in tl.static_range(8 // BITS):
            channels = (place * W + run * RUN + lane)[:, None]
            is_query = (lane < RUN)[:, None] & (own_head < G)
            query = tl.load(queries + (row * G + own_head) * D + channels, is_query, 0.0)
            columns = columns + (_third(query, part, IN_PYTHON),)  # noqa: RUF005
    # A block of slots at a time: codes are multiplied as they are, and the products scaled by group.
    begin = tl.program_id(1) * share
    for start in range(begin, tl.minimum(begin + share, slots), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        here = slot < slots
        products = tl.zeros([BLOCK, 4 * HEADS], tl.float32)
        for run in tl.static_range(W // RUN):
            at = codes + slot[:, None] * codes_c + (run * RUN + lane)[None, :]
            packed = tl.load(at, here[:, None] if RUN == LANES else here[:, None] & (lane < RUN)[None, :], 0)
            for place in tl.static_range(8 // BITS):
                own = tl.dot(_codes_at(packed, place, BITS, IN_PYTHON), columns[run * (8 // BITS) + place])
                group = (place * W + run * RUN) // SIZE
                products += own * tl.load(scale + slot * scale_c + group, here, 0).to(tl.float32)[:, None]
        total = tl.sum(tl.reshape(products, [BLOCK, HEADS, 4]), 2)
        if HAS_ZERO:
            for group in tl.static_range(D // SIZE):
                own_sums = tl.load(sums + (row * G + head) * (D // SIZE) + group, head < G, 0.0)
                total += tl.load(zero + slot * zero_c + group, here, 0).to(tl.float32)[:, None] * own_sums[None, :]
        target = out + (row * G + head)[None, :] * slots + slot[:, None]
        tl.store(target, total, here[:, None] & (head < G)[None, :])


@triton.jit
def score_token_groups(
    codes,
    scale,
    offsets,
    queries,
    out,
    codes_b,
    codes_h,
    codes_c,
    scale_b,
    scale_h,
    scale_x,
    heads,
    groups,
    share,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    IN_PYTHON: tl.constexpr,
):
    """Scores of some groups of tokens of a head, whose scales are multiplied into the queries."""
    row = tl.program_id(0).to(tl.int64)
    b = row // heads
    h = row % heads
    head = tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    codes += b * codes_b + h * codes_h
    scale += b * scale_b + h * scale_h
    of_row = row * G + head
    parts = ()
    for place in tl.static_range(8 // BITS):
        query = queries + of_row[:, None] * D + (place * W + lane)[None, :]
        query = tl.max_contiguous(query, (1, 1))  # see `_rows_of_thirds`
        is_query = (head < G)[:, None] & (lane < W)[None, :]
        parts = parts + (tl.load(query, is_query, 0.0),)  # noqa: RUF005
    begin = tl.program_id(1) * share
    for group in range(begin, tl.minimum(begin + share, groups)):
        slot = group * SIZE + tl.arange(0, SIZE)
        at = codes + slot[:, None] * codes_c + lane[None, :]
        packed = tl.load(at) if W == LANES else tl.load(at, (lane < W)[None, :], 0)
        products = tl.zeros([4 * HEADS, SIZE], tl.float32)
        for place in tl.static_range(8 // BITS):
            own = tl.load(scale + group * scale_x + place * W + lane, lane < W, 0).to(tl.float32)
            rows = _rows_of_thirds(parts[place] * own[None, :], IN_PYTHON)
            products = tl.dot(rows, tl.trans(_codes_at(packed, place, BITS, IN_PYTHON)), products)
        total = tl.sum(tl.reshape(products, [HEADS, 4, SIZE]), 1)
        total += tl.load(offsets + of_row * groups + group, head < G, 0.0)[:, None]
        tl.store(out + of_row[:, None] * (groups * SIZE) + slot[None, :], total, (head < G)[:, None])


@triton.jit
def mix_channel_groups(
    codes,
    scale,
    zero,
    weights,
    out,
    codes_b,
    codes_h,
    codes_c,
    scale_b,
    scale_h,
    scale_c,
    zero_b,
    zero_h,
    zero_c,
    heads,
    slots,
    share,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    RUN: tl.constexpr,
    LANES: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_PYTHON: tl.constexpr,
):
    """Weighted sums of some slots of a head and of one run, whose scales are multiplied into the weights."""
    row = tl.program_id(0).to(tl.int64)
    b = row // heads
    h = row % heads
    run = tl.program_id(2) * RUN
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, slots)
    head = tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    codes += b * codes_b + h * codes_h + run
    scale += b * scale_b + h * scale_h
    zero += b * zero_b + h * zero_h
    weights += (row * G + head) * slots
    sums0 = tl.zeros([4 * HEADS, LANES], tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    zeros0 = tl.zeros([HEADS, BLOCK], tl.float32)
    zeros1 = zeros0
    zeros2 = zeros0
    zeros3 = zeros0
    for start in range(begin, end, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        here = slot < end
        is_read = here[:, None] if RUN == LANES else here[:, None] & (lane < RUN)[None, :]
        packed = tl.load(codes + slot[:, None] * codes_c + lane[None, :], is_read, 0)
        at = tl.max_contiguous(weights[:, None] + slot[None, :], (1, 1))  # see `_rows_of_thirds`
        own = tl.load(at, (head < G)[:, None] & here[None, :], 0.0)
        for place in tl.static_range(8 // BITS):
            group = (place * W + run) // SIZE
            if place == 0 or SIZE < D:
                own_scale = tl.load(scale + slot * scale_c + group, here, 0).to(tl.float32)
                rows = _rows_of_thirds(own * own_scale[None, :], IN_PYTHON)
            numbers = _codes_at(packed, place, BITS, IN_PYTHON)
            if place == 0:
                sums0 = tl.dot(rows, numbers, sums0)
            elif place == 1:
                sums1 = tl.dot(rows, numbers, sums1)
            elif place == 2:
                sums2 = tl.dot(rows, numbers, sums2)
            else:
                sums3 = tl.dot(rows, numbers, sums3)
            if HAS_ZERO and (place == 0 or SIZE < D):
                offset = own * tl.load(zero + slot * zero_c + group, here, 0).to(tl.float32)[None, :]
                if place == 0:
                    zeros0 += offset
                elif place == 1:
                    zeros1 += offset
                elif place == 2:
                    zeros2 += offset
                else:
                    zeros3 += offset
    row_out = ((tl.program_id(1) * tl.num_programs(0) + row) * G + head) * D
    target = out + row_out[:, None] + run + lane[None, :]
    is_out = (head < G)[:, None] & (lane < RUN)[None, :]
    for place in tl.static_range(8 // BITS):
        if place == 0:
            sums = sums0
            offsets = zeros0
        elif place == 1:
            sums = sums1
            offsets = zeros1
        elif place == 2:
            sums = sums2
            offsets = zeros2
        else:
            sums = sums3
            offsets = zeros3
        if SIZE == D:
            offsets = zeros0
        total = tl.sum(tl.reshape(sums, [HEADS, 4, LANES]), 1) + tl.sum(offsets, 1)[:, None]
        tl.store(target + place * W, total, is_out)

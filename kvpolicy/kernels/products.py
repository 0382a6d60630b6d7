"""The products of attention, as attention and the codecs compute them, lengths of vectors, and rotations of keys."""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_SCALE = 2.0**-4
"""The factor on fp16 queries before the product; a power of two, so that dividing by it afterwards restores the
scores exactly unless an element underflows."""


def products(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply queries [..., M, D] with keys [..., N, D].

    In fp16, queries are scaled down first, because an unscaled dot product often exceeds the range of fp16.

    Returns:
        Scores, [..., M, N] fp32.
    """
    if queries.dtype != torch.float16:
        return matmul(queries, keys.transpose(-1, -2)).float()
    return matmul(queries * QUERY_SCALE, keys.transpose(-1, -2)).float().div_(QUERY_SCALE)


def scaled_products(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """`products` times a number, in one operation where the arguments allow it.

    Examples:
        >>> scaled_products(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 3, 2), 0.5)
        tensor([[[[1., 1., 1.]]]])
    """
    fits = queries.dtype != torch.float16 and queries.shape[:-2] == keys.shape[:-2]
    if not fits or torch.compiler.is_compiling():  # compiled, the factor is a part of what follows
        return products(queries, keys).mul_(scale)
    nothing = queries.new_empty(1, 1, 1)  # ignored, since beta is 0
    score = torch.baddbmm(nothing, queries.flatten(0, -3), keys.flatten(0, -3).mT, beta=0, alpha=scale)
    return score.unflatten(0, queries.shape[:-2]).float()


def matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """`rows @ matrix` for rows [B, H, M, K] and a matrix [B, H, K, N], without a slow kernel in compiled code.

    On a CPU, inductor (torch 2.13) turns a product of one row into a multiplication and a sum. Where the sum goes over
    the slots, it walks through all of them once for each vector of channels, and decodes the codes of a codec again in
    each walk. `baddbmm` stays a call of the same library function as in eager mode.

    Returns:
        [B, H, M, N].

    Examples:
        >>> matmul(torch.ones(1, 1, 1, 2), torch.eye(2)[None, None])
        tensor([[[[1., 1.]]]])
    """
    if not torch.compiler.is_compiling() or rows.shape[-2] != 1 or rows.device.type != "cpu":
        return rows @ matrix
    nothing = rows.new_zeros(1, 1, 1)  # ignored, since beta is 0
    product = torch.baddbmm(nothing, rows.flatten(0, 1), matrix.flatten(0, 1), beta=0)
    return product.unflatten(0, rows.shape[:2])


def add_products(sums: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    """`sums + rows @ matrix` in fp32, of which the product is in the dtype of the matrix.

    Args:
        sums: [B, H, M, N] fp32.
        rows: [B, H, M, K].
        matrix: [B, H, K, N].

    Examples:
        >>> add_products(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), torch.eye(2)[None, None])
        tensor([[[[2., 2.]]]])
    """
    if matrix.dtype != sums.dtype or torch.compiler.is_compiling():
        return sums + matmul(rows.to(matrix.dtype), matrix).float()
    total = torch.baddbmm(sums.flatten(0, 1), rows.to(matrix.dtype).flatten(0, 1), matrix.flatten(0, 1))
    return total.unflatten(0, sums.shape[:2])


def lengths(vectors: Tensor) -> Tensor:
    """Euclidean lengths of vectors [..., D], computed in at least fp32, without a copy of the vectors.

    Returns:
        [...] fp32.

    Examples:
        >>> lengths(torch.tensor([3, 4], dtype=torch.float64))
        tensor(5.)
    """
    dtype = torch.promote_types(vectors.dtype, torch.float32)  # vector_norm refuses to narrow fp64
    return torch.linalg.vector_norm(vectors, dim=-1, dtype=dtype).float()


def thin_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Multiply a few queries [..., M, D] with the entries [..., X, D] of an index; `products` in fp32 on a CPU.

    On processors without bf16 arithmetic, a product of few bf16 rows takes many times as long as one in fp32, the
    conversion included.

    Returns:
        Estimated scores, [..., M, X] fp32.
    """
    if keys.device.type == "cpu":
        # Not `matmul`: compiled, this is a sum over channels that reads an index once.
        return queries.float() @ keys.float().transpose(-1, -2)
    return products(queries.to(keys.dtype), keys)


def thin_mix(weights: Tensor, values: Tensor) -> Tensor:
    """Add up the values [..., X, D] of an index by a few rows of weights [..., M, X] fp32; see `thin_products`.

    Returns:
        [..., M, D] fp32.
    """
    if values.device.type == "cpu":
        return weights @ values.float()
    return (weights.to(values.dtype) @ values).float()


def coordinates(vectors: Tensor, basis: Tensor) -> Tensor:
    """Products of vectors [B, H, n, D] with the directions of their head, the columns of `basis` [H, D, r] fp32.

    Returns:
        [B, H, n, r] fp32.

    Examples:
        >>> coordinates(torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[0.6], [0.8]]]))
        tensor([[[[5.]]]])
    """
    # In fp64, so that the result does not depend on how a product over more tokens or rows is summed.
    return (vectors.double() @ basis.double()).float()


def of_tokens(vectors: Tensor) -> Tensor:
    """The vectors of all heads of each token, one behind the other: [B, H, n, D] as [B, 1, n, H * D].

    Examples:
        >>> of_tokens(torch.arange(4.0).view(1, 2, 1, 2))
        tensor([[[[0., 1., 2., 3.]]]])
    """
    return vectors.transpose(1, 2).flatten(2)[:, None]


def rotate_halves(keys: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate channel i of each key with channel i + D / 2.

    Args:
        keys: [B, H, n, D].
        positions: [B, H, n], integers.
        frequencies: Radians per position, [1, 1, 1, D / 2] fp32.

    Returns:
        [B, H, n, D] fp32.
    """
    angles = positions[..., None].float() * frequencies
    cos = angles.cos()
    sin = angles.sin()
    first, second = keys.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

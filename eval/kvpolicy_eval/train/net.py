"""The training net: computes the same as transformers' Llama, with the weights of all layers stacked.

Shapes: B batch, T tokens, H query heads, K KV heads, D head dim, L layers, W window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BLOCK = 32
"""Tokens of a block of windowed attention; a window is at most as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the model; every field has the meaning of its LlamaConfig namesake."""

    vocab_size: int = 768
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 500_000.0
    eps: float = 1e-6

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Focus:
    """Which tokens the layers attend to in a training step.

    Args:
        layers: Layers that attend to the whole context.
        window: Number of recent tokens that the other layers attend to, in addition to BOS.
    """

    layers: frozenset[int]
    window: int = 24


@cache
def rotation(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, each [1, T, 1, D]."""
    rates = 1 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), rates).repeat(1, 2)
    return angles.cos()[None, :, None], angles.sin()[None, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to `x`, [B, T, H, D]."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


@cache
def _window_mask(blocks: int, window: int) -> Tensor:
    """Mask of each block's queries over BOS, the previous block and the block, [blocks, 1, block, 1 + 2 block]."""
    query = torch.arange(_BLOCK)[:, None]
    distance = query + _BLOCK - torch.arange(2 * _BLOCK)[None]
    position = torch.arange(blocks)[:, None, None] * _BLOCK + query - distance
    near = (distance >= 0) & (distance < window) & (position > 0)  # BOS has a separate column
    return torch.cat([torch.ones(blocks, _BLOCK, 1, dtype=torch.bool), near], -1)[:, None]


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Attend to BOS and the last `window` tokens (at most 32), [B, H, T, D], without a T x T product.

    Queries are split into blocks of 32, and each block attends to BOS, the previous block and itself.
    """
    batch, _, length, _ = query.shape
    blocks = -(-length // _BLOCK)
    pad = blocks * _BLOCK - length
    q = F.pad(query, (0, 0, 0, pad)).unflatten(2, (blocks, _BLOCK)).transpose(1, 2).flatten(0, 1)

    def near(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, _BLOCK, pad)).unflatten(2, (blocks + 1, _BLOCK))
        first = x[:, :, None, :1].expand(-1, -1, blocks, -1, -1)
        joined = torch.cat([first, padded[:, :, :-1], padded[:, :, 1:]], 3)
        return joined.transpose(1, 2).flatten(0, 1)

    mask = _window_mask(blocks, window).repeat(batch, 1, 1, 1)
    out = F.scaled_dot_product_attention(q, near(key), near(value), attn_mask=mask)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


class Net(nn.Module):
    """A Llama whose per-layer weights are stacked [L, ...], so that Muon runs batched.

    Args:
        shape: Sizes.
        seed: Seed of the random initialization.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        """Initialize the weights at random."""
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        layers = shape.num_layers
        hidden = shape.hidden_size
        inner = shape.intermediate_size
        q_dim = shape.num_heads * shape.head_dim
        kv_dim = shape.num_kv_heads * shape.head_dim
        depth = math.sqrt(2 * layers)

        def normal(*size: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=generator) * std)

        self.embedding = normal(shape.vocab_size, hidden, std=0.08)
        self.query = normal(layers, q_dim, hidden, std=hidden**-0.5)
        self.key = normal(layers, kv_dim, hidden, std=hidden**-0.5)
        self.value = normal(layers, kv_dim, hidden, std=0.7 * hidden**-0.5)
        self.output = normal(layers, hidden, q_dim, std=q_dim**-0.5 / depth)
        self.gate = normal(layers, inner, hidden, std=hidden**-0.5)
        self.up = normal(layers, inner, hidden, std=hidden**-0.5)
        self.down = normal(layers, hidden, inner, std=inner**-0.5 / depth)
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))

    def matrices(self) -> list[nn.Parameter]:
        """The stacked matrices, which Muon trains."""
        return [self.query, self.key, self.value, self.output, self.gate, self.up, self.down]

    def vectors(self) -> list[nn.Parameter]:
        """The embedding and the norms, which AdamW trains."""
        return [self.embedding, self.attention_norm, self.mlp_norm, self.final_norm]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)

    def _attend(self, x: Tensor, layer: int, window: int | None) -> Tensor:
        s = self.shape
        weight = torch.cat([self.query[layer], self.key[layer], self.value[layer]])
        heads = F.linear(x, weight).unflatten(-1, (s.num_heads + 2 * s.num_kv_heads, s.head_dim))
        cos, sin = rotation(x.shape[1], s.head_dim, s.rope_theta)
        rotated = rotate(heads[:, :, : s.num_heads + s.num_kv_heads], cos, sin).transpose(1, 2)
        query = rotated[:, : s.num_heads]
        key = rotated[:, s.num_heads :].repeat_interleave(s.group, 1)
        value = heads[:, :, s.num_heads + s.num_kv_heads :].transpose(1, 2).repeat_interleave(s.group, 1)
        if window is None or x.shape[1] <= window:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            out = windowed_attention(query, key, value, window)
        return F.linear(out.transpose(1, 2).flatten(2), self.output[layer])

    def forward(self, tokens: Tensor, focus: Focus | None = None) -> Tensor:
        """Compute the next-token logits [B, T, vocabulary].

        Args:
            tokens: Token ids [B, T].
            focus: Which layers attend to the whole context; None for all of them.
        """
        hidden = F.embedding(tokens, self.embedding)
        for layer in range(self.shape.num_layers):
            window = None if focus is None or layer in focus.layers else focus.window
            hidden = hidden + self._attend(self._norm(hidden, self.attention_norm[layer]), layer, window)
            x = self._norm(hidden, self.mlp_norm[layer])
            gate, up = F.linear(x, torch.cat([self.gate[layer], self.up[layer]])).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, self.down[layer])
        return F.linear(self._norm(hidden, self.final_norm), self.embedding)

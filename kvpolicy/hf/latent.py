"""Latent attention (MLA): a token is held as one latent vector and one rotated key, which all query heads share.

transformers caches both and expands all of them for all heads in every step. Here the expansion is folded into queries
and outputs: a query head attends to the latent vectors themselves. So a layer has one KV head, a key is a latent vector
and behind it a rotated key, a value is the latent part of its key, and nothing of a token is held twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.projection import matrix_of, output_projection


class TakesLatents:
    """A layer of a cache that is given latent vectors, and hands them over to its attention.

    transformers expands what `update` returns, so that the attention function would see expanded vectors alone.
    """

    _given: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep latent vectors [B, 1, P, r] and rotated keys [B, 1, P, d] until attention takes them."""
        self._given = key_states, value_states
        return key_states, value_states

    def take_latents(self) -> tuple[Tensor, Tensor]:
        """The vectors and keys that `update` was given; the layer lets go of them."""
        given = self._given
        self._given = None
        assert given is not None, "transformers updates a layer before it attends"
        return given


class LatentSlots(TakesLatents, PolicyLayer):
    """The slots of a layer with latent attention."""


def latent_projection(module: Any) -> Tensor:
    """The output projection of latent vectors, one of each query head in place of its values, [hidden, Hq * r].

    Raises:
        KVPolicyError: If a weight cannot be read, or depends on the tokens.
    """
    behind = output_projection(module)
    heads = behind.shape[-1] // module.v_head_dim
    like = behind.new_empty(0, module.kv_lora_rank)
    of_values = expansion(module, like, heads)[..., -module.v_head_dim :, :]
    each = behind.unflatten(-1, (heads, -1)).transpose(-3, -2)  # [Hq, hidden, D']
    return (each @ of_values.to(behind.dtype)).transpose(-3, -2).flatten(-2)


def expansion(module: Any, like: Tensor, heads: int) -> Tensor:
    """The weight by which latent vectors are expanded, [Hq, n + D', r], or one for each row, [B, Hq, n + D', r]."""
    return matrix_of(module.kv_b_proj, like, "latent attention (MLA), got an adapter").unflatten(-2, (heads, -1))

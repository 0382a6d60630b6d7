"""Undoing and redoing a model's rotary embedding, with the model's own functions.

Keys arrive in the cache rotated. A codec may want them as they were before: rotated back they lie in fewer
directions, because what they mean does not turn with their position.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.hf.discovery import Site
from kvpolicy.protocols import At
from kvpolicy.spec.errors import KVPolicyError

_CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies change with the length, so that a stored key cannot be rotated back."""


def trained_positions(config: Any) -> int | None:
    """The positions that a model's rotary embedding was trained for; None where its kind reaches further by itself.

    Examples:
        >>> from transformers import LlamaConfig
        >>> trained_positions(LlamaConfig(max_position_embeddings=4096))
        4096
    """
    text = config.get_text_config()
    given: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in given.values() if isinstance(part, dict)] or [given]  # one for each type of layer
    kinds: set[str] = {part.get("rope_type", "default") for part in parts}
    limit: Any = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and kinds <= {"default", "linear", "llama3"} else None


def _slides_or_all(attention: Any) -> bool:
    return attention.sliding_window is None or attention.is_sliding


def _has_base(attention: Any) -> bool:
    return bool(attention.config.layer_rope_theta[attention.layer_idx])


_ROTATES: dict[str, Callable[[Any], bool]] = {
    "AfmoeAttention": lambda attention: attention.is_local_attention,
    "Cohere2Attention": lambda attention: attention.sliding_window is not None,
    "Cohere2MoeAttention": lambda attention: attention.sliding_window is not None or attention.force_rope,
    "Exaone4Attention": _slides_or_all,
    "Exaone4_5_Attention": _slides_or_all,
    "ExaoneMoeAttention": _slides_or_all,
    "FlintAttention": lambda attention: attention.sliding_window is not None,
    "Kolibri1Attention": _slides_or_all,
    "MuseGlimmerTextAttention": _has_base,
    "MuseSparkTextAttention": _has_base,
}
"""Attention classes of which some layers have no embedding, and the condition in their source or their decoder's."""


class Rope:
    """One layer's rotary embedding; of a layer without, the identity."""

    def __init__(self, tables: nn.Module | None, turn: Callable[..., Any] | None, layer_type: str | None) -> None:
        """Use `Rope.of`."""
        self._tables, self._turn, self._layer_type = tables, turn, layer_type
        prefix = "" if layer_type is None else f"{layer_type}_"
        self.scaling: float = float(getattr(tables, f"{prefix}attention_scaling", 1.0))
        self._angles: int = getattr(tables, f"{prefix}inv_freq", torch.empty(0)).numel()

    @classmethod
    def of(cls, decoder: nn.Module, site: Site) -> Rope:
        """The rotary embedding of a layer.

        Raises:
            KVPolicyError: Where it cannot be undone.
        """
        tables = next((m for m in decoder.modules() if type(m).__name__.endswith("RotaryEmbedding")), None)
        rotates = _ROTATES.get(type(site.attention).__name__, lambda attention: getattr(attention, "use_rope", True))
        if tables is None or not rotates(site.attention):
            return cls(None, None, None)
        turn = getattr(sys.modules[type(site.attention).__module__], "apply_rotary_pos_emb", None)
        kind: Any = getattr(tables, "rope_type", "default")
        layer_type: str | None = None
        if "layer_type" in inspect.signature(tables.forward).parameters:
            config: Any = tables.config
            layer_type = str(config.layer_types[site.layer_idx])
        if isinstance(kind, dict):
            if layer_type not in kind:  # a kind of layer without an embedding
                return cls(None, None, None)
            kind = kind[layer_type]
        if turn is None or kind in _CHANGING:
            raise KVPolicyError(
                f"The rotary embedding of layer {site.layer_idx} ({type(tables).__name__}, {kind}) cannot be undone, "
                "which this codec needs: use a codec that stores keys as attention sees them, such as tokenwise."
            )
        return cls(tables, _of_two(turn), layer_type)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rope:
        """Copies of a cache share the model's embedding."""
        return self

    def apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys [B, H, n, D] to positions [B, H, n] (or [B, 1, n]), fp32."""
        return self._rotate(keys, positions, back=False)

    def undo(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys [B, H, n, D] at positions [B, H, n] (or [B, 1, n]) back, fp32."""
        return self._rotate(keys, positions, back=True)

    def _rotate(self, keys: Tensor, positions: Tensor, *, back: bool) -> Tensor:
        keys = keys.float()
        if self._tables is None or self._turn is None:
            return keys
        batch, heads, count, dim = keys.shape
        at = positions.clamp_min(0).expand(batch, heads, count).reshape(batch, heads * count)
        more = {} if self._layer_type is None else {"layer_type": self._layer_type}
        cos, sin = self._tables(keys, at, **more)
        cos, sin = cos.float(), sin.float()
        if back:  # the tables hold the scaling, which undoing must divide by, once for it and once for itself
            cos, sin = cos / self.scaling**2, -sin / self.scaling**2
        width = cos.shape[-1] * (2 if cos.shape[-1] == self._angles else 1)  # each angle turns two channels (GPT-OSS)
        flat = keys.reshape(batch, 1, heads * count, dim)
        turned, _ = self._turn(flat[..., :width], flat[..., :width], cos, sin)
        return torch.cat([turned, flat[..., width:]], -1).view(batch, heads, count, dim)


def _of_two(turn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that rotates queries and keys, from one that may rotate either (Gemma-4)."""
    needed = [x for x in inspect.signature(turn).parameters.values() if x.default is x.empty]
    return turn if len(needed) > 3 else lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


class SlotRotary:
    """The rotary embedding of one stage's slots; implements `protocols.RotaryView`."""

    def __init__(self, rope: Rope, positions: Tensor, newest: Tensor, shift: Tensor) -> None:
        """Rotate to `positions` [B, H, C], the newest token's being `newest` [B]; the embedding adds `shift` [B]."""
        self._rope, self._positions, self._newest = rope, positions + shift[:, None, None], newest + shift
        self.occupied: Tensor = positions >= 0

    def keys(self, keys: Tensor, at: At) -> Tensor:
        """Rotate keys of the slots `at` to their positions, fp32; see `protocols.RotaryView`."""
        positions = self._positions[..., at] if isinstance(at, slice) else self._positions.gather(-1, at)
        return self._rope.apply(keys, positions)

    def queries(self, queries: Tensor, distance: int) -> Tensor:
        """Rotate the newest token's queries as if it stood `distance` tokens after unrotated keys."""
        here = self._newest[:, None, None].expand(*queries.shape[:3])
        return self._rope.apply(self._rope.undo(queries, here), torch.full_like(here, distance))

"""Find a layer's rotary embedding in a model, and the length that it was trained for."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from kvpolicy.hf.discovery import Site, home
from kvpolicy.kernels.rotary import INSTEAD, Rope
from kvpolicy.text.errors import KVPolicyError

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embedding with frequencies that depend on the length: a stored key cannot be unrotated."""

_STEADY = threading.Lock()
"""Held while rotary embeddings keep their angles, which threads that run one model share."""


def trained_positions(config: Any) -> int | None:
    """The positions that a model's rotary embedding was trained for; None where its kind reaches further by itself.

    Examples:
        >>> from transformers import LlamaConfig
        >>> trained_positions(LlamaConfig(max_position_embeddings=4096))
        4096
    """
    text = config.get_text_config()
    limit: Any = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and _kinds(text) <= {"default", "linear", "llama3"} else None


def depends_on_length(config: Any) -> bool:
    """Whether the angles of a model's rotary embedding depend on the length of a forward."""
    return not _kinds(config.get_text_config()).isdisjoint(_LENGTH_DEPENDENT)


def changing_kind(config: Any, first: int, last: int) -> str:
    """The kind of rotary embedding with other angles for `last` tokens than for `first`; empty if there is none.

    Examples:
        >>> from transformers import LlamaConfig
        >>> rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        >>> config = LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
        >>> changing_kind(config, 32, 64), changing_kind(config, 32, 65)
        ('', 'dynamic')
    """
    text = config.get_text_config()
    for part in _parts(text):
        kind: str = part.get("rope_type", "default")
        if kind == "dynamic" and last > max(first, text.max_position_embeddings):
            return kind
        if kind == "longrope" and first <= part["original_max_position_embeddings"] < last:
            return kind
    return ""


def least_with_angles(config: Any, length: int) -> int:
    """Tokens of the shortest text with the angles of one of `length` tokens.

    Examples:
        >>> from transformers import LlamaConfig
        >>> rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        >>> config = LlamaConfig(max_position_embeddings=64, rope_parameters=rope)
        >>> least_with_angles(config, 64), least_with_angles(config, 70)
        (1, 70)
    """
    text = config.get_text_config()
    least = 1
    for part in _parts(text):
        kind = part.get("rope_type", "default")
        if kind == "dynamic" and length > text.max_position_embeddings:
            least = length
        if kind == "longrope" and length > part["original_max_position_embeddings"]:
            least = max(least, part["original_max_position_embeddings"] + 1)
    return least


def _kinds(config: Any) -> set[str]:
    """The kinds of rotary embedding of a text model."""
    return {part.get("rope_type", "default") for part in _parts(config)}


def _parts(config: Any) -> list[dict[str, Any]]:
    """The parameters of the rotary embeddings of a text model: one for all layers, or one for each type of layer."""
    given: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [part for part in given.values() if isinstance(part, dict)] or [given]


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


def rope_of(decoder: nn.Module, site: Site, part: str = "codec") -> Rope:
    """The rotary embedding of a layer, which the `codec`, `reader` or `selector` of a policy undoes.

    Raises:
        KVPolicyError: If it cannot be undone.
    """
    return ropes_of(decoder, [site], part)[site.layer_idx]


def ropes_of(decoder: nn.Module, sites: Iterable[Site], part: str = "codec") -> dict[int, Rope]:
    """The rotary embedding of each of some layers, as `rope_of`, by layer.

    Args:
        decoder: The module with the layers.
        sites: The layers.
        part: What undoes the rotation; empty if nothing does, so that the layers' keys are not measured.

    Raises:
        KVPolicyError: If one of them cannot be undone, by its kind or as measured on the layer's keys.
    """
    sites = list(sites)
    shared = _shared_tables(decoder)
    ropes = {site.layer_idx: _rope(shared or _own_tables(site), site, part) for site in sites}
    other = first_not_undone(decoder, sites, ropes) if part else None
    if other is not None:
        raise KVPolicyError(
            f"Keys must be the same at every position once the rotary embedding is undone, as this {part} does, got "
            f"others in layer {other.layer_idx} ({type(other.attention).__name__}); try "
            + INSTEAD.get(part, "another policy.")
        )
    return ropes


def first_not_undone(decoder: nn.Module, sites: Iterable[Site], ropes: Mapping[int, Rope]) -> Site | None:
    """The first layer whose keys still depend on the position without their rotation, as measured; None if none does.

    Layers that cannot be measured are passed over.
    """
    from kvpolicy.hf.key_probe import is_undone  # here, so that plans need no transformers

    shared = _shared_tables(decoder)

    def angles(site: Site, like: Tensor, positions: Tensor) -> Any:
        tables = shared or _own_tables(site)
        if tables is None:
            return None
        layer_type = _layer_type(tables, site)
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        return _of_text(tables, layer_type)(like, positions, **of_layer)

    return next(
        (site for site in sites if is_undone(site, ropes[site.layer_idx], partial(angles, site)) is False), None
    )


def _shared_tables(decoder: nn.Module) -> nn.Module | None:
    """The rotary embedding that the decoder computes for all layers; None if each layer may have its own.

    That of another part, such as an encoder inside the decoder, is none.
    """
    return next((child for child in decoder.children() if is_rotary(child)), None)


def _own_tables(site: Site) -> nn.Module | None:
    return next((module for module in site.block.modules() if is_rotary(module)), None)


def is_rotary(module: nn.Module) -> bool:
    """Whether a module computes the angles of a rotary embedding."""
    return type(module).__name__.endswith("RotaryEmbedding")


@contextmanager
def steady_angles(decoder: nn.Module) -> Generator[None]:
    """Let rotary embeddings keep the angles of the last forward, whatever length the next ones have.

    A replay reaches behind the prompt. Embeddings that adapt to that length would rotate its queries, and with
    `dynamic` those of all later steps, otherwise than the keys of the prompt.
    """
    adapting = adapting_embeddings(decoder)
    if not adapting:
        yield
        return
    with _STEADY:
        kinds = [tables.rope_type for tables in adapting]
        try:
            for tables, kind in zip(adapting, kinds, strict=True):
                tables.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            yield
        finally:
            for tables, kind in zip(adapting, kinds, strict=True):
                tables.rope_type = kind


def adapting_embeddings(model: nn.Module) -> list[Any]:
    """The rotary embeddings of a model whose angles depend on the length."""
    # By the config, since another thread may hold the angles at the moment.
    found: list[Any] = [tables for tables in filter(is_rotary, model.modules()) if hasattr(tables, "rope_type")]
    return [tables for tables in found if not _kinds(tables.config).isdisjoint(_LENGTH_DEPENDENT)]


def _rope(tables: nn.Module | None, site: Site, part: str) -> Rope:
    kind_of_attention = home(site.attention)
    rotates = _ROTATES.get(kind_of_attention.__name__, lambda attention: getattr(attention, "use_rope", True))
    if tables is None or not rotates(site.attention):
        return Rope(None, None, None)
    apply = getattr(sys.modules[kind_of_attention.__module__], "apply_rotary_pos_emb", None)
    kind: Any = getattr(tables, "rope_type", "default")
    layer_type = _layer_type(tables, site)
    if isinstance(kind, dict):
        if layer_type not in kind:  # a type of layer without an embedding
            return Rope(None, None, None)
        kind = kind[layer_type]
    if apply is None or kind in _LENGTH_DEPENDENT:
        raise KVPolicyError(
            f"The rotary embedding of layer {site.layer_idx} must be undone for this {part}, got "
            f"{type(tables).__name__} of type {kind}, which cannot be undone; try "
            + INSTEAD.get(part, "another policy.")
        )
    return Rope(_of_text(tables, layer_type), _of_pairs(apply), layer_type)


class _ThreeParts(nn.Module):
    """A rotary embedding that asks for three parts of each position, which are equal in a text."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def __getattr__(self, name: str) -> Any:
        """Attributes of the embedding itself, which `Rope` reads."""
        own = self.__dict__["_modules"]["tables"]
        return own if name == "tables" else getattr(own, name)

    def forward(self, like: Tensor, positions: Tensor, **more: Any) -> Any:
        """Cosines and sines at positions [B, n]."""
        return self.tables(like, positions.expand(3, *positions.shape), **more)


def _of_text(tables: nn.Module, layer_type: str | None = None) -> nn.Module:
    """A rotary embedding as one of positions [B, n]: before transformers 5.24, those with three parts ask for all."""
    if not hasattr(tables, "mrope_section"):
        return tables
    at = next(tables.buffers()).new_zeros(1, 1)
    try:
        tables(at, at, **({} if layer_type is None else {"layer_type": layer_type}))
    except IndexError:
        return _ThreeParts(tables)
    return tables


def _layer_type(tables: nn.Module, site: Site) -> str | None:
    """The type of a layer, where angles depend on it."""
    if "layer_type" not in inspect.signature(tables.forward).parameters:
        return None
    config: Any = tables.config
    return str(config.layer_types[site.layer_idx])


def _of_pairs(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A function that rotates queries and keys, made from one that may rotate one tensor at a time (Gemma-4)."""
    needed = [x for x in inspect.signature(apply).parameters.values() if x.default is x.empty]
    return apply if len(needed) > 3 else lambda q, k, cos, sin: (apply(q, cos, sin), apply(k, cos, sin))

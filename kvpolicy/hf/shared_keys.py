"""Layers that read the keys and values of an earlier layer, their owner, and hold none of their own (Gemma 3n).

A layer of a model reads those of the last layer of its kind before the first one that reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prompt_statistics import looks_at_queries
from kvpolicy.hf.projection import Reading
from kvpolicy.hf.running_forward import RunningForward, refuse_gradients
from kvpolicy.hf.tiles import PromptTile
from kvpolicy.planning.memory import layer_spec
from kvpolicy.policy import Policy
from kvpolicy.statistics.statistic import Projection
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError

_READS = "reuse"
_MODES = {None, "store", _READS}
"""The modes of transformers: a layer keeps its keys to itself, shows them to others, or reads those of another."""


class ReadingLayer(CacheLayerMixin):
    """The layer of a cache that holds nothing, since the model's layer reads the slots or the window of its owner.

    Attributes:
        reads: Index of the owner.
        is_last: Whether no later layer reads it.
    """

    is_compileable = True
    is_croppable = True
    supports_early_init = False
    is_initialized = True  # pyright: ignore[reportIncompatibleUnannotatedOverride]
    keys = None  # pyright: ignore
    values = None  # pyright: ignore

    def __init__(self, reads: int, *, is_last: bool, is_sliding: bool) -> None:
        """Read the layer with an index, which may have a sliding window."""
        self.reads = reads
        self.is_last = is_last
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values as they are: no model stores any here."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """None: its owner counts them."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the new tokens alone: masks are made for layers with keys of their own."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Nothing to forget."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to take back."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """No rows."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """No rows."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """No rows."""


def key_owners(text: Any) -> dict[int, int]:
    """The owner of each layer of a text decoder's config that reads the keys of another.

    Raises:
        KVPolicyError: If a layer reads those of no earlier layer of its kind.
    """
    modes = _modes(text)
    if modes is None or _READS not in modes:
        return {}
    kinds: list[str] = text.layer_types
    first = modes.index(_READS)
    owners = {kind: index for index, kind in enumerate(kinds[:first])}
    readers = [index for index, mode in enumerate(modes) if mode == _READS]
    others = {*modes} - _MODES or hasattr(text, "kv_source_layers")
    if others or readers[-1] - first >= len(readers) or any(kinds[index] not in owners for index in readers):
        raise KVPolicyError(
            "Every layer that reads the keys of another must read those of the last layer of its kind with keys of its "
            f"own, and stand behind all of these, got others in {text.model_type}; try another model."
        )
    return {index: owners[kinds[index]] for index in readers}


def _modes(text: Any) -> list[str | None] | None:
    """The mode of each layer, one of `_MODES`; None if all have keys of their own."""
    if getattr(text, "num_kv_shared_layers", None) == text.num_hidden_layers:
        return [_READS] * text.num_hidden_layers  # of a drafter, which reads another model's
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is None:  # before transformers 5.23, its configs have the number alone
        shared = getattr(text, "num_kv_shared_layers", None) or 0
        return [None] * (text.num_hidden_layers - shared) + [_READS] * shared if shared else None
    return list(modes)


def joint_projections(
    projections: Mapping[int, Projection], owners: Mapping[int, int], heads: int
) -> dict[int, Projection]:
    """How to read the output projection of each owner, [hidden, Hq * D], with those of the layers that read its keys.

    Args:
        projections: How to read that of each layer.
        owners: The owner of each layer that reads.
        heads: KV heads.
    """
    readers: dict[int, list[int]] = {}
    for index, owner in owners.items():
        readers.setdefault(owner, [owner]).append(index)
    return {owner: Reading(_joint, [projections[i] for i in same], heads) for owner, same in readers.items()}


def _joint(parts: Sequence[Projection], heads: int) -> Tensor:
    first, *others = (part().unflatten(-1, (heads, -1)) for part in parts)
    return torch.cat([first, *(other.to(first.device) for other in others)], -1).flatten(-2)


_KEPT = "logits_to_keep"


def attend_shared(
    layers: list[Any],
    layer: ReadingLayer,
    forward: RunningForward,
    tile: PromptTile | None,
    q: Tensor,
    transform: ScoreTransform,
) -> Tensor:
    """Attend from new tokens to the prompt that the owner shows, or in a step to its slots.

    Args:
        layers: The layers of the cache.
        layer: The layer that reads.
        forward: The running forward.
        tile: The tile of the prompt that the layer takes, or None.
        q: [B, Hq, P, D].
        transform: From products to attention weights.

    Returns:
        [B, Hq, P, D].
    """
    heads = q.shape[1]
    device = q.device
    store: LayerStore = layers[layer.reads].store
    q = q.to(store.tensors.length.device)  # the owner may be on another one
    if store.ranks.phantom:  # a rank without heads takes part with one that no sum counts
        q = q.new_zeros(q.shape[0], 1, *q.shape[2:])
    prompt = forward.shown.get(layer.reads)
    if prompt is None:
        out, step = store.read(q, transform, forward.steps.pop(layer.reads))
        if layer.is_last:
            store.end_step(step)
        else:
            forward.steps[layer.reads] = step
    else:
        out = prompt.attend(q, transform, None if tile is None else tile.stop)
    if prompt is None or not prompt.is_first or tile is not None:
        refuse_gradients(out)
    return out[:, :heads].to(device)


def cuts(names: Sequence[str]) -> bool:
    """Whether a decoder with some arguments may cut the tokens of its last layers."""
    return _KEPT in names


def ranks_by_queries(policy: Policy) -> bool:
    """Whether a policy looks at what the queries of a prompt attend to."""
    return any(looks_at_queries(layer_spec(own, 0)) for own in policy.distinct)


def read_whole(kwargs: dict[str, Any], columns: int, mask: Any, *, may_cut: bool) -> None:
    """Let layers that read the keys of others take all tokens of a forward, where they would take wrong ones.

    Gemma 4 cuts their tokens to those whose logits are asked for, and their masks, which a policy replaces. The last
    token needs no causal mask; several would, and padding is among the tokens of all.

    Args:
        kwargs: The arguments of the decoder, in which it is said.
        columns: Tokens of the forward.
        mask: Its padding mask, or None.
        may_cut: Whether the forward has a cache under a policy that asks for no queries, and takes its prompt at once.
    """
    padded = mask is not None and not (isinstance(mask, Tensor) and bool(mask.all()))
    kept = kwargs.get(_KEPT, 0)
    if not isinstance(kept, int) or kept != 1 or padded or not may_cut:
        kwargs[_KEPT] = torch.arange(columns, device="cpu")  # by number, which Gemma 4 does not cut by

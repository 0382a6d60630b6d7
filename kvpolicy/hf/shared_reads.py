"""Attention of layers that read the keys of an earlier one, their owner; see `kvpolicy.hf.shared_keys`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.engine.prompt_statistics import looks_at_queries
from kvpolicy.hf.running_forward import RunningForward, refuse_gradients
from kvpolicy.hf.shared_keys import ReadingLayer
from kvpolicy.hf.tiles import Tile
from kvpolicy.planning.memory import layer_spec
from kvpolicy.policy import Policy
from kvpolicy.statistics.windows import ScoreTransform

_KEPT = "logits_to_keep"


def attend_shared(
    layers: list[Any],
    layer: ReadingLayer,
    forward: RunningForward,
    tile: Tile | None,
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
    heads, device = q.shape[1], q.device
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

"""Attention of a layer under a policy from one tile of a prompt, which is compressed with the last one."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from kvpolicy.engine.host import on_host
from kvpolicy.hf.layer import PolicyLayer
from kvpolicy.hf.tiles import Tile
from kvpolicy.protocols import Ranks
from kvpolicy.statistics import Forward
from kvpolicy.statistics.windows import ScoreTransform


@on_host
def attend_tile(
    cache: Any,
    layer: PolicyLayer,
    tile: Tile,
    vectors: tuple[Tensor, Tensor, Tensor],
    transform: ScoreTransform,
    forward: Forward | None,
    ranks: Ranks,
) -> Tensor:
    """Attend from one tile, and store it; see `CacheForward.attend`.

    Args:
        cache: The layer's cache.
        layer: The layer.
        tile: The tile.
        vectors: Its queries, keys and values.
        transform: From products to attention weights.
        forward: The arguments of the attention module, if the selector needs them.
        ranks: The ranks that hold the layer's other heads.
    """
    q, k, v = vectors
    store = layer.store
    if tile.start == 0:
        if not store.is_initialized:
            store.initialize(k, ranks, q.shape[1] // k.shape[1], v.shape[3])
        valid = None if tile.valid is None else tile.valid.to(k.device)
        layer.tiles = store.begin_tiles(q, k, tile.columns, valid, layer.pending)
    tiles = layer.tiles
    assert tiles is not None
    out = tiles.attend(q, k, v, transform, store.contents.score_inputs(forward))
    if forward is not None and store.spec.needs_call:
        tiles.note_forward(forward, q, tile.whole)
    if tile.is_last:
        layer.tiles = None
        cache.end_prompt(layer, tiles.prompt(transform), partial(tiles.shown, store.contents))
        if layer is cache.policy_layers[0]:
            layer.extend_digest(tiles.valid, tile.columns)
    return out

"""Scores of heads for a model: how far back their attention reaches, without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.listener import check_finite, listening
from kvpolicy.calibration.suitable import check_heads
from kvpolicy.hf.discovery import Sites, find_sites
from kvpolicy.hf.model_spec import describe
from kvpolicy.hf.rotary_lookup import rope_of
from kvpolicy.kernels.rotary import Rope
from kvpolicy.protocols import View
from kvpolicy.statistics import ModuleCall, Results, Vectors
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.validation import check_size

POSITIONS = 500
"""Positions at which the mean key stands."""

_DIGITS = 6
"""Digits of a score in a file: further ones are noise, and differ between machines."""


def rows_of(model: nn.Module, scores: Mapping[int, Tensor]) -> tuple[tuple[float, ...], ...]:
    """Scores of KV heads as a file has them: a row for each layer of the model, empty where there is none."""
    depth = describe(model.config).depth  # pyright: ignore[reportArgumentType]
    rows = (scores[layer].tolist() if layer in scores else [] for layer in range(depth))
    return tuple(tuple(round(score, _DIGITS) for score in row) for row in rows)


def head_scores(
    model: nn.Module, windows: Sequence[Tensor], *, positions: int = POSITIONS, progress: bool = False
) -> dict[int, Tensor]:
    """How far back the attention of each KV head reaches, from 0 to 1, without gradients.

    Queries and keys of a window are averaged over its tokens, without their rotary embedding. The mean key is put at
    positions 0, 1 and so on, and the mean query at the last of them. The score of a query head is the mean of the
    cumulated attention weights: it is high if attention goes to tokens far back, and low if it goes to the newest. The
    score of a KV head is the mean over its query heads and over the windows.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n], of different texts.
        positions: How many positions there are.
        progress: Whether to show a progress bar.

    Returns:
        The scores of each layer that a policy manages, [H] fp64 on the CPU, by the index of the layer.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, has a layer whose rotary embedding is
            missing or depends on the length, or produces numbers that are not finite; or if there is no text.

    Examples:
        >>> import kvpolicy
        >>> scores = head_scores(kvpolicy.tiny()[0], [torch.arange(3, 40)])
        >>> len(scores), scores[0].shape
        (8, torch.Size([4]))

    Source:
        The estimate of kvpress (DuoAttentionPress with on_the_fly_scoring) for the training of DuoAttention
        (arXiv:2410.10819). Differences: queries and keys are those that attention takes, with the rotation undone, so
        that norms of queries and keys count in all models (kvpress leaves them out by a mistake), and products are
        scaled and capped as the model does; texts are given, in windows of equal weight.
    """
    windows = as_windows(windows)
    if not windows:
        raise KVPolicyError("The windows must contain tokens to calibrate on, got none; try a longer text.")
    positions = check_size("positions", positions, 2)
    check_heads(model)
    ropes = _ropes(model, find_sites(model))
    total: dict[int, Tensor] = {}

    def look(seen: Results, view: View) -> None:
        given = seen[ModuleCall]
        assert given.queries is not None
        rope = ropes[view.layer_idx]
        at = view.positions[:1, 0]
        query = rope.unrotate_rows(given.queries, at)[0].mean(1)  # [Hq, D]
        key = rope.unrotate_rows(seen[Vectors].keys, at)[0].mean(1)  # [H, D]
        query = query.unflatten(0, (len(key), -1))
        scores = reach(query, key, rope, positions, given.scale, given.softcap).mean(-1).cpu()
        total[view.layer_idx] = total.get(view.layer_idx, 0) + scores / len(windows)

    with listening(model, (ModuleCall(), Vectors()), look) as run:
        for ids in tqdm(windows, desc="heads", disable=not progress):
            run(ids)
    for layer, scores in total.items():
        check_finite("scores", f"layer {layer}", scores)
    return total


def reach(query: Tensor, key: Tensor, rope: Rope, positions: int, scale: float, softcap: float | None) -> Tensor:
    """The mean of the cumulated attention weights of a query over copies of one key, [H, G] fp64.

    Args:
        query: Query of each query head, without its rotation, [H, G, D] fp32; it stands at the last position.
        key: Key of each KV head, without its rotation, [H, D] fp32; a copy stands at each position.
        rope: The rotary embedding of the layer.
        positions: How many positions there are.
        scale: Factor of the products.
        softcap: Their cap, or None.
    """
    heads, group, dim = query.shape
    at = torch.arange(positions, device=query.device)
    queries = rope.rotate(query.reshape(1, heads * group, 1, dim), at[None, None, -1:]).double()
    keys = rope.rotate(key[None, :, None].expand(-1, -1, positions, -1), at[None, None]).double()
    scores = (queries.reshape(heads, group, dim) @ keys[0].mT) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    return scores.softmax(-1).cumsum(-1).mean(-1)


def _ropes(model: nn.Module, sites: Sites) -> dict[int, Rope]:
    """The rotary embedding of each layer that a policy manages."""
    found: dict[int, Rope] = {}
    evictable = set(describe(model.config).evictable)  # pyright: ignore[reportArgumentType]
    for site in (site for site in sites.layers if site.layer_idx in evictable):
        try:
            rope = rope_of(sites.decoder, site)
        except KVPolicyError as error:
            raise _no_rope(model, site.layer_idx, "one that depends on the length, or is unknown") from error
        if not rope.rotates:
            raise _no_rope(model, site.layer_idx, "none")
        found[site.layer_idx] = rope
    return found


def _no_rope(model: nn.Module, layer_idx: int, what: str) -> KVPolicyError:
    return KVPolicyError(
        f"Every layer must have a rotary embedding for its heads to be scored, got {what} in layer {layer_idx} of "
        f"{type(model).__name__}; try a head file from another source, or the head allocator adakv."
    )

"""Keys and values of a model without a policy, as codecs will meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache

from kvpolicy.families import Site, Sites, describe, find_sites
from kvpolicy.rotary import Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Vectors of each layer that a policy can keep small, [H, n, D] fp32 on the CPU, by the layer's index.

    The n tokens are the same in every layer and part.

    Attributes:
        pre: Keys with the rotary embedding undone; empty where not asked for.
        post: Keys as attention sees them; empty where not asked for.
        values: Values.
    """

    pre: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    post: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def parts(self) -> dict[str, dict[int, Tensor]]:
        """By the names of the parts in a calibration: `keys.pre`, `keys.post`, `values`."""
        return {"keys.pre": self.pre, "keys.post": self.post, "values": self.values}


@torch.no_grad()
def collect(
    model: nn.Module,
    windows: Sequence[Tensor],
    *,
    tokens: int = 16_384,
    frames: Sequence[str] = ("pre", "post"),
    seed: int = 0,
    progress: bool = False,
) -> Samples:
    """Run windows of tokens through a model and keep some tokens' keys and values.

    Args:
        model: A causal language model that no policy is attached to.
        windows: Token ids, each [n].
        tokens: About how many tokens are kept in all, drawn from every window alike: memory is bounded by
            layers * heads * tokens * head_dim numbers, for each frame and for the values.
        frames: Which keys: `pre`, `post` or both.
        seed: Of the draw.
        progress: Whether to show a bar.

    Raises:
        ValueError: Where the model is not supported, has a policy, or makes numbers that are not finite.

    Example:
        >>> import kvpolicy
        >>> collect(kvpolicy.tiny()[0], [torch.arange(3, 40)], tokens=20).pre[0].shape
        torch.Size([4, 20, 32])
    """
    if hasattr(model, "_kvpolicy"):
        raise ValueError("A policy is attached to this model: detach it before calibrating.")
    if not windows:
        raise ValueError("There are no tokens to calibrate on: give a longer text.")
    sites, layers = find_sites(model), describe(model.config).evictable
    ropes = {i: Rope.of(sites.decoder, site) for i, site in _at(sites, layers)} if "pre" in frames else {}
    kept: dict[str, dict[int, list[Tensor]]] = {}
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for ids in tqdm(windows, desc="collect", disable=not progress):
            draw = torch.randperm(len(ids), generator=generator)[: -(-tokens // len(windows))].sort().values
            for part, vectors in _run(model, sites, ids, layers, frames, ropes).items():
                for layer, x in vectors.items():
                    kept.setdefault(part, {}).setdefault(layer, []).append(x[:, draw.to(x.device)].float().cpu())
    finally:
        model.train(was_training)
    joined = {part: {i: torch.cat(xs, 1) for i, xs in vectors.items()} for part, vectors in kept.items()}
    for part, vectors in joined.items():
        for layer, x in vectors.items():
            if not x.isfinite().all():
                raise ValueError(
                    f"The {part} of layer {layer} are not all finite numbers: load the model in bf16 or fp32."
                )
    return Samples(**joined)


def _at(sites: Sites, layers: list[int]) -> list[tuple[int, Site]]:
    return [(site.layer_idx, site) for site in sites.layers if site.layer_idx in layers]


def _run(
    model: nn.Module, sites: Sites, ids: Tensor, layers: list[int], frames: Sequence[str], ropes: dict[int, Rope]
) -> dict[str, dict[int, Tensor]]:
    """Every token's vectors of one window, each [H, n, D]."""
    cache: Any = DynamicCache(config=model.config)
    device = next(sites.decoder.parameters()).device
    sites.decoder(input_ids=ids[None].to(device), past_key_values=cache, use_cache=True)
    found: dict[str, dict[int, Tensor]] = {part: {} for part in (*frames, "values")}
    for layer in layers:
        keys: Tensor = cache.layers[layer].keys
        found["values"][layer] = cache.layers[layer].values[0]
        if "post" in frames:
            found["post"][layer] = keys[0]
        if "pre" in frames:
            positions = torch.arange(len(ids), device=keys.device)[None, None]
            found["pre"][layer] = ropes[layer].undo(keys, positions)[0]
    return found

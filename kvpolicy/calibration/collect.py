"""Keys and values of a model without a policy, as codecs will meet them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.cache_utils import DynamicCache

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.hf.attention_interface import PREFIX
from kvpolicy.hf.config_swap import configs_of
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.model_spec import describe
from kvpolicy.hf.rotary_lookup import rope_of
from kvpolicy.spec.errors import KVPolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Vectors of each layer that a policy can keep small, [H, n, D] fp32 on the CPU, by the layer's index.

    The n tokens are the same in every layer and part.

    Attributes:
        pre: Keys with the rotary embedding undone; empty where not asked for.
        post: Keys as attention sees them; empty where not asked for.
        values: Values.
        fisher: Squared gradients of the loss, of keys (of frame `pre` where asked for) and of values, [2, H, n, D];
            empty where not asked for.
    """

    pre: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    post: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    fisher: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def parts(self) -> dict[str, dict[int, Tensor]]:
        """By the names of the parts in a calibration: `keys.pre`, `keys.post`, `values`."""
        return {"keys.pre": self.pre, "keys.post": self.post, "values": self.values}


def collect(
    model: nn.Module,
    windows: Sequence[Tensor],
    *,
    tokens: int = 16_384,
    frames: Sequence[str] = ("pre", "post"),
    fisher: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Samples:
    """Run windows of tokens through a model and keep some tokens' keys and values.

    Args:
        model: A causal language model that no policy is attached to.
        windows: Token ids, each [n] or [1, n].
        tokens: About how many tokens are kept in all, drawn from every window alike: memory is bounded by
            layers * heads * tokens * head_dim numbers, for each frame and for the values.
        frames: Which keys: `pre`, `post` or both.
        fisher: Whether to keep squared gradients too, for which every window takes the memory of a training step.
        seed: Of the draw.
        progress: Whether to show a bar.

    Raises:
        KVPolicyTypeError: Where the windows are no token ids.
        KVPolicyError: Where the model is not supported, has a policy, or makes numbers that are not finite.

    Examples:
        >>> import kvpolicy
        >>> collect(kvpolicy.tiny()[0], [torch.arange(3, 40)], tokens=20).pre[0].shape
        torch.Size([4, 20, 32])
    """
    if any((config._attn_implementation or "").startswith(PREFIX) for config in configs_of(model)):
        raise KVPolicyError("A policy is attached to this model: detach it before calibrating.")
    windows = as_windows(windows)
    if not windows:
        raise KVPolicyError("There are no tokens to calibrate on: give a longer text.")
    reader = _Reader(model, frames, fisher)
    kept: dict[str, dict[int, list[Tensor]]] = {}
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        counts = shares(windows, tokens)
        for ids, count in zip(tqdm(windows, desc="collect", disable=not progress), counts, strict=True):
            draw = torch.randperm(len(ids), generator=generator)[:count].sort().values
            for part, vectors in reader.run(ids).items():
                for layer, x in vectors.items():
                    some = x.index_select(-2, draw.to(x.device)).float().cpu()
                    kept.setdefault(part, {}).setdefault(layer, []).append(some)
    finally:
        model.train(was_training)
    return Samples(**_joined(kept))


def shares(windows: Sequence[Tensor], tokens: int) -> list[int]:
    """How many tokens of each window are kept, of about `tokens` in all.

    >>> shares([torch.arange(9), torch.arange(3)], 9)
    [5, 3]
    """
    return [min(len(ids), -(-tokens // len(windows))) for ids in windows]


def _joined(kept: dict[str, dict[int, list[Tensor]]]) -> dict[str, dict[int, Tensor]]:
    joined = {part: {layer: torch.cat(xs, -2) for layer, xs in vectors.items()} for part, vectors in kept.items()}
    for part, vectors in joined.items():
        for layer, x in vectors.items():
            if not x.isfinite().all():
                raise KVPolicyError(f"Some of {part} in layer {layer} is not finite: load the model in bf16 or fp32.")
    return joined


class _Reader:
    """Runs a model and looks into its cache."""

    def __init__(self, model: nn.Module, frames: Sequence[str], fisher: bool) -> None:
        self.model, self.frames, self.fisher = model, frames, fisher
        shape = describe(model.config)
        self.sites, self.layers, self.heads = find_sites(model), shape.evictable, shape.heads
        own = [site for site in self.sites.layers if site.layer_idx in self.layers]
        self.ropes = {site.layer_idx: rope_of(self.sites.decoder, site) for site in own} if "pre" in frames else {}

    def run(self, ids: Tensor) -> dict[str, dict[int, Tensor]]:
        """Every token's vectors of one window [n], by part and layer, each [H, n, D]."""
        config: Any = self.model.config
        cache: Any = DynamicCache(config=config)
        ids = ids[None].to(next(self.sites.decoder.parameters()).device)
        slopes = self._slopes(ids, cache) if self.fisher else {}
        if not self.fisher:
            with torch.no_grad():
                self.sites.decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        keys = {layer: self._heads(cache.layers[layer].keys.detach())[:, :, 0] for layer in self.layers}
        values = {layer: self._heads(cache.layers[layer].values.detach())[0, :, 0] for layer in self.layers}
        found = {"values": values}
        if "post" in self.frames:
            found["post"] = {layer: x[0] for layer, x in keys.items()}
        if "pre" in self.frames:
            found["pre"] = {layer: self._undo(layer, x)[0] for layer, x in keys.items()}
        if self.fisher:
            found["fisher"] = {layer: torch.cat(both).square() for layer, both in slopes.items()}
        return found

    def _heads(self, x: Tensor) -> Tensor:
        """Of each KV head its copies [1, H, copies, n, D]: grouped Falcon's stock cache has one for each query head."""
        return x.unflatten(1, (self.heads, -1))

    def _undo(self, layer: int, keys: Tensor) -> Tensor:
        with torch.no_grad():
            return self.ropes[layer].unrotate(keys, torch.arange(keys.shape[2], device=keys.device)[None, None])

    def _slopes(self, ids: Tensor, cache: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Gradients of the loss in keys and values; rotations turn a gradient back as they do a key."""
        with torch.enable_grad():
            loss = self.model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
            if not loss.requires_grad:
                raise KVPolicyError(
                    "No weight of the model has a gradient: call requires_grad_(True), or leave fisher out."
                )
            tensors = [t for layer in self.layers for t in (cache.layers[layer].keys, cache.layers[layer].values)]
            both = [self._heads(g.float()).sum(2) for g in torch.autograd.grad(loss, tensors)]
        keys = dict(zip(self.layers, both[::2], strict=True))
        turned = {layer: self._undo(layer, g) if self.ropes else g for layer, g in keys.items()}
        values = dict(zip(self.layers, both[1::2], strict=True))
        return {layer: (turned[layer], values[layer]) for layer in self.layers}

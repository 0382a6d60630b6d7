"""Held-out text through a policy: the error of its keys and values, and how surprising what follows is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy.distortion import distortion
from kvpolicy.engine.rotary import Rope
from kvpolicy.hf.discovery import find_sites
from kvpolicy_eval.data.text import held_out

PROMPT, FOLLOWING, ROWS = 448, 64, 8
"""Tokens of a prompt, tokens that follow it, and rows."""


class Pages:
    """Held-out text, its keys and values, and how surprising it is under a policy.

    Args:
        model: The embedded model.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Read the text."""
        self.model = model
        ids: Tensor = tokenizer(held_out(), return_tensors="pt").input_ids[0]
        self.ids = ids[: ROWS * (PROMPT + FOLLOWING)].view(ROWS, -1)
        self.frames = self._collect()

    @torch.inference_mode()
    def _collect(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer: keys as attention sees them, unrotated keys, and values."""
        cache, sites = DynamicCache(config=self.model.config), find_sites(self.model)
        self.model(self.ids[:, :PROMPT], past_key_values=cache)
        layers: Any = cache.layers
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for site in sites.layers:
            keys, values = layers[site.layer_idx].keys.float(), layers[site.layer_idx].values.float()
            positions = torch.arange(PROMPT).expand(*keys.shape[:2], -1)
            found.append((keys, Rope.of(sites.decoder, site).undo(keys, positions), values))
        return found

    def errors(self, policy: str) -> tuple[float, float]:
        """Mean error of keys and values over the layers, of coded tokens; nan where nothing is coded."""
        codec = kvpolicy.Policy.parse(policy).codec
        lost: list[tuple[float, float]] = []
        for index, (post, pre, values) in enumerate(self.frames):
            keys = pre if codec.traits.key_space == "unrotated" else post
            try:
                lost.append(distortion(codec, keys, values, queries=post, layer_idx=index)[:2])
            except ValueError:
                return math.nan, math.nan
        return tuple(sum(side) / len(lost) for side in zip(*lost, strict=True))  # pyright: ignore[reportReturnType]

    @torch.inference_mode()
    def perplexity(self, policy: str, share: float | None = None) -> float:
        """Of the tokens that follow a prompt, each read behind a cache under the policy."""
        stock = kvpolicy.plan(
            self.model.config, "full", batch=ROWS, prompt=PROMPT + FOLLOWING, dtype=self.model.dtype
        ).full_nbytes  # fmt: skip
        sized = policy if share is None else f"{policy}@{int(share * stock)}B"
        lost = torch.zeros(())
        with kvpolicy.attach(self.model, policy):
            cache = kvpolicy.PolicyCache(self.model, sized, prompt=PROMPT, new=FOLLOWING)
            logits = self.model(self.ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1).logits
            for place in range(PROMPT, PROMPT + FOLLOWING):
                lost += torch.nn.functional.cross_entropy(logits[:, -1].float(), self.ids[:, place])
                logits = self.model(self.ids[:, place : place + 1], past_key_values=cache).logits
        return math.exp(float(lost) / FOLLOWING)

"""Held-out text under a policy: the error of its keys and values, and how its continuation is predicted."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpolicy
from kvpolicy.distortion import Distortion, distortion, group_distortion
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import find_sites
from kvpolicy.hf.rotary_lookup import rope_of
from kvpolicy.protocols import Codec, GroupsLayers, ModelInfo
from kvpolicy_eval.common.continuation import Continuation
from kvpolicy_lm_eval.data.text import held_out

PROMPT = 448
"""Tokens of a prompt."""
FOLLOWING = 64
"""Tokens after the prompt, of which the perplexity is measured."""
ROWS = 8
"""Rows of the batch."""


class HeldOutText:
    """Rows of held-out text, with the keys and values that the model computes for them without a policy.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        text: What is read; the held-out text of the embedded model by default.
    """

    def __init__(self, model: Any, tokenizer: Any, text: str | None = None) -> None:
        """Tokenize the text and run the prompts once."""
        self.model = model
        self.tokenizer = tokenizer
        ids: Tensor = tokenizer(held_out() if text is None else text, return_tensors="pt").input_ids[0]
        self.ids = ids[: ROWS * (PROMPT + FOLLOWING)].view(ROWS, -1)
        self.continuation = Continuation(model, self.ids, PROMPT)
        self.tensors = self._collect()

    @torch.inference_mode()
    def _collect(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Rotated keys, unrotated keys and values of each layer without a sliding window, fp32."""
        cache = DynamicCache(config=self.model.config)
        sites = find_sites(self.model)
        self.model(self.ids[:, :PROMPT], **cache_argument(self.model, cache), logits_to_keep=1)
        layers: Any = cache.layers
        tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for site in sites.layers:
            if layers[site.layer_idx].is_sliding:
                continue
            keys = layers[site.layer_idx].keys.float()
            values = layers[site.layer_idx].values.float()
            positions = torch.arange(PROMPT).expand(*keys.shape[:2], -1)
            tensors[site.layer_idx] = (keys, rope_of(sites.decoder, site).unrotate(keys, positions), values)
        return tensors

    def errors(self, policy: str) -> tuple[float, float]:
        """Relative squared error of encoded keys and of encoded values, averaged over the layers that encode any.

        Args:
            policy: Spec of a policy.

        Returns:
            Error of keys and error of values; NaN if the policy encodes no token.
        """
        codec = kvpolicy.Policy.parse(policy).codec
        if codec.traits.groups is not None:
            return self._group_errors(codec.traits.groups)
        codecs: dict[int, Codec] = dict.fromkeys(self.tensors, codec)
        if codec.traits.by_layer is not None:
            codecs |= codec.traits.by_layer.by_layer(self._info)
        key_errors: list[float] = []
        value_errors: list[float] = []
        for index, (rotated, unrotated, values) in self.tensors.items():
            keys = unrotated if codec.traits.key_space == "unrotated" else rotated
            try:
                key_error, value_error = distortion(codecs[index], keys, values, queries=rotated, layer_idx=index)[:2]
            except ValueError:  # all tokens stay in full precision
                return math.nan, math.nan
            key_errors.append(key_error)
            value_errors.append(value_error)
        return sum(key_errors) / len(key_errors), sum(value_errors) / len(value_errors)

    @property
    def _info(self) -> ModelInfo:
        _, heads, _, dim = next(iter(self.tensors.values()))[0].shape
        return ModelInfo(len(self.tensors), heads, dim)

    def _group_errors(self, codec: GroupsLayers) -> tuple[float, float]:
        """The same for a codec that groups layers, averaged over the layers in a group."""
        found: list[Distortion] = []
        for group in codec.groups(self._info):
            layers = [(rotated, values) for rotated, _, values in (self.tensors[index] for index in group)]
            try:
                found += group_distortion(codec, layers)
            except ValueError:
                return math.nan, math.nan
        return sum(each.keys for each in found) / len(found), sum(each.values for each in found) / len(found)

    def perplexity(self, policy: str, byte_share: float | None = None) -> float:
        """Perplexity of the tokens after the prompts, decoded one by one from a cache under a policy.

        Args:
            policy: Spec of the policy; without a budget if `byte_share` is given.
            byte_share: Budget as a share of the full cache's bytes.
        """
        full = kvpolicy.plan(
            self.model.config, "full", batch=ROWS, prompt=PROMPT + FOLLOWING, dtype=self.model.dtype
        ).full_nbytes
        sized = policy if byte_share is None else f"{policy}@{int(byte_share * full)}B"
        return math.exp(self.continuation.nats(policy, sized))

    @functools.cached_property
    def tokens_per_byte(self) -> float:
        """Tokens that are predicted over the bytes of their text."""
        text = "".join(self.tokenizer.batch_decode(self.ids[:, PROMPT:]))
        return self.ids[:, PROMPT:].numel() / len(text.encode())

    def divergence(self, policy: str) -> float:
        """Mean divergence of what a policy predicts from what the full cache predicts, in nats.

        Of the tokens after the prompts but the first, which a prompt predicts, each decoded by a step.

        Args:
            policy: Spec of the policy.
        """
        return self.continuation.divergence(policy)

"""A conversation with a model under a policy: pieces of text, fed one after the other to one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy
from kvpolicy.hf.cache_names import cache_argument


class Trace(NamedTuple):
    """Predictions and cache of a conversation.

    Attributes:
        logits: Predictions behind the last token of each piece, [B, V].
        cache: The cache after the last piece.
    """

    logits: list[Tensor]
    cache: kvpolicy.PolicyCache


@torch.inference_mode()
def run(model: Any, policy: Policy | str, pieces: Sequence[Tensor], sized: str | None = None, **expected: Any) -> Trace:
    """Feed pieces to a model under a policy, each in a forward pass of its own.

    Args:
        model: A causal language model without a policy attached.
        policy: The policy that is attached.
        pieces: Token ids, [B, T] each.
        sized: Spec of the same policy with the budget of the cache; that of `policy` by default.
        **expected: The tokens to come, `prompt` and `new` of `kvpolicy.PolicyCache`.
    """
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, sized, **expected)
        logits = [model(piece, **cache_argument(model, cache), logits_to_keep=1).logits[:, -1] for piece in pieces]
    return Trace(logits, cache)

"""The most bytes of prompts that wait while layers are measured, where they are trimmed to what may be kept."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.engine.state import slot_tensors
from kvpolicy.engine.trimming import LEAST_GAIN, trimmed_from
from kvpolicy.planning.memory import layer_spec
from kvpolicy.planning.planner import base_tokens
from kvpolicy.planning.tokens import Tokens, most_tokens
from kvpolicy.policy import Policy
from kvpolicy.protocols import BoundsBudgets, LayerShape


def trimmed_bytes(
    policy: Policy, shape: LayerShape, tokens: Tokens, prompt: Tensor, columns: int, layers: int
) -> int | None:
    """The most bytes of prompts that wait in all layers but the newest, whose prompt is still whole.

    Args:
        policy: The policy.
        shape: The shape of a layer.
        tokens: The division of the budget.
        prompt: Tokens of each row's prompt, [B].
        columns: Tokens of the longest prompt, or of its first chunk.
        layers: Layers under the policy.

    Returns:
        None where it is not known before the prompt is measured that they can be trimmed.
    """
    allocator = policy.allocator
    nested = trimmed_from(layer_spec(policy, 0))
    if policy.replay or isinstance(policy.budget, str) or not isinstance(allocator, BoundsBudgets) or nested is None:
        return None
    ceiling = most_tokens(policy, prompt, tokens.last)
    total = base_tokens(policy, prompt) * layers
    least, together = allocator.guarantee(total, policy.min_tokens, ceiling, layers)
    if bool((least < nested).any()):
        return None
    # A head of a row is padded to the longest one, and which row that is may differ from layer to layer.
    held = min(int(together.sum() / (1 - LEAST_GAIN)), layers * columns)
    state = policy.selector.alloc(1, shape.heads, 1, "meta", shape.head)
    of_token = shape.token_nbytes + shape.heads * torch.int32.itemsize + sum(t.nbytes for t in slot_tensors(state))
    return len(prompt) * held * of_token

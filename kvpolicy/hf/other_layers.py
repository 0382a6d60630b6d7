"""Why a model has no single stack of attention layers, in the words of a user."""

from __future__ import annotations

import inspect

from torch import nn

from kvpolicy.text.errors import KVPolicyError

_STATES = ("state", "cache_params")
"""Arguments of models whose memory is a state of a fixed size."""


def no_single_stack(name: str, why: str = "") -> KVPolicyError:
    """The error for a model without recognized attention layers, or with several stacks of them.

    Args:
        name: Of its class.
        why: What it is instead, as a relative clause.
    """
    said = f", {why}" if why else ""
    return KVPolicyError(
        f"The model must have a single stack of attention layers that cache keys and values, got {name}{said}; try a "
        "decoder-only model with multi-head or grouped-query attention."
    )


def why_no_stack(model: nn.Module, stacks: int) -> str:
    """What a model has in place of one stack of attention layers that know their index, as a relative clause.

    Args:
        model: The model.
        stacks: How many stacks were found.
    """
    from kvpolicy.hf.cache_names import LAYER_NAMES  # here: plans need no transformers

    if stacks > 1:
        return f"which has {stacks} stacks"
    names = {type(module).__name__ for module in model.modules()}
    parameters = inspect.signature(model.forward).parameters
    if not any(name.endswith("Attention") for name in names) or any(name in parameters for name in _STATES):
        return "whose layers hold states of a fixed size and no tokens"
    if not any(name in parameters for name in LAYER_NAMES):
        return "which takes no cache of transformers"
    return "whose layers share attention modules, or do not say their index to them"

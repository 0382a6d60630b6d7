"""Models without weights, on the device meta, made from a config that may be damaged."""

from __future__ import annotations

from typing import Any

import torch

from kvpolicy.text.errors import KVPolicyError

MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What transformers raises for a config with values that it does not expect, such as 0 heads."""


def meta_model(kind: Any, config: Any, **options: Any) -> Any:
    """A model of an `Auto` class of transformers, without weights.

    Args:
        kind: The class, such as `AutoModelForCausalLM`.
        config: The config of the model.
        options: Further arguments of `from_config`.

    Raises:
        KVPolicyError: If the class has no model for this config, or a value of the config is wrong.
    """
    try:
        with torch.device("meta"):
            return kind.from_config(config, **options)
    except MALFORMED as error:
        if str(error).startswith("Unrecognized configuration class"):  # the message lists every class of transformers
            raise KVPolicyError(
                f"The config must be of a causal language model of transformers for its weights to be counted, got "
                f"{config.model_type}."
            ) from error
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise KVPolicyError(
            f"The config must be one of which transformers makes a model, got one of {config.model_type} with an "
            f"error ({type(error).__name__}: {said}); try the config.json of the model."
        ) from error

"""Small models with random weights, of any class that an entry names."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy_eval.families import special
from kvpolicy_eval.families.entries import Entry, classes
from kvpolicy_eval.families.small_config import small_config

LIMIT = 40_000_000
"""Parameters that a model may have; one with more needs a field in `special.FIELDS`."""
_KEPT = re.compile(r"a_log|dt_bias")
_KEPT_VECTORS = re.compile(r"a_log|dt_bias|inv_freq|log_min|e_score")
_EMBEDDINGS = re.compile(r"embed|wte|wpe")
_QUERIES = re.compile(r"q_proj|query|qkv|q_b_proj|c_attn|wq|q_up")


def model_class(entry: Entry) -> Any:
    """The class of transformers that an entry names."""
    import transformers

    return getattr(transformers, classes()[entry.kind][entry.name])


def build(entry: Entry) -> nn.Module:
    """A small model of an entry, in fp32, whose attention matters for its logits.

    Raises:
        ValueError: If it would have too many parameters.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = small_config(CONFIG_MAPPING[entry.name], special.of(entry, special.FIELDS, {}))
    for name, value in special.of(entry, special.ATTRIBUTES, {}).items():
        setattr(config, name, value)
    kind = model_class(entry)
    needed = getattr(kind, "config_class", None)
    text = config.get_text_config(decoder=True)
    if needed is not None and not isinstance(config, needed) and isinstance(text, needed):
        config = text
    _check_size(kind, config, special.of(entry, special.LARGE, LIMIT))
    torch.manual_seed(0)
    return sharpen(kind(config).float().eval())


def _check_size(kind: Any, config: Any, limit: int) -> None:
    with torch.device("meta"):
        named = dict(kind(copy.deepcopy(config)).named_parameters())
    total = sum(parameter.numel() for parameter in named.values())
    if total > limit:
        largest = max(named, key=lambda name: named[name].numel())
        raise ValueError(f"The model must have at most {limit:,} parameters, got {total:,}, most of them in {largest}.")


def sharpen(model: nn.Module) -> nn.Module:
    """Draw weights with which it matters what is attended to: large queries, and noise on vectors."""
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1:
                if not _KEPT.search(name.lower()):
                    parameter.copy_(_noise(parameter, dice) * _deviation(name.lower(), parameter))
            elif not _KEPT_VECTORS.search(name.lower()):
                parameter.add_(_noise(parameter, dice) * 0.05)
    return model


def _noise(like: Tensor, dice: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=dice)


def _deviation(name: str, weight: Tensor) -> float:
    """The standard deviation of a matrix."""
    if _EMBEDDINGS.search(name):
        return 0.3 * (2.0 if _QUERIES.search(name) else 1.0)
    inputs = weight[0].numel() if "conv" in name else weight.shape[-1]
    return (2.0 if _QUERIES.search(name) else 1.0) / math.sqrt(max(inputs, 1))

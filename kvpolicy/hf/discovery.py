"""Finding the attention layers of a model, and refusing attention that a policy cannot replace."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import NamedTuple

import torch
from torch import nn

from kvpolicy.spec.errors import KVPolicyError


class Site(NamedTuple):
    """Where one layer's attention happens."""

    layer_idx: int
    block: nn.Module
    attention: nn.Module


class Sites(NamedTuple):
    """The module whose forward takes the cache, and the layers below it."""

    decoder: nn.Module
    layers: list[Site]


def find_sites(model: nn.Module) -> Sites:
    """Find a model's decoder, layers and attention modules.

    Raises:
        KVPolicyError: Where none is found, or one does not use transformers' attention interface.
    """
    found: list[Site] = []
    decoders: set[str] = set()
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("Attention") or not isinstance(getattr(module, "layer_idx", None), int):
            continue
        path = name.split(".")
        depth = max((i for i, part in enumerate(path) if part.isdigit()), default=0)
        if not depth:
            continue
        if not is_falcon(module):
            check_attention_class(name, type(module))
        decoders.add(".".join(path[: depth - 1]))
        found.append(Site(int(module.layer_idx), model.get_submodule(".".join(path[: depth + 1])), module))  # pyright: ignore[reportArgumentType]
    if not found or len(decoders) != 1:
        raise no_single_stack(type(model).__name__)
    elsewhere = any(
        getattr(site.attention, "is_causal", True) is False or "CrossAttention" in type(site.attention).__name__
        for site in found
    )
    if elsewhere or len({site.layer_idx for site in found}) < len(found):
        raise not_causal(type(model).__name__)
    return Sites(model.get_submodule(decoders.pop()), sorted(found, key=lambda site: site.layer_idx))


def sample_weights(site: Site, count: int = 64) -> torch.Tensor | None:
    """Weight fingerprint: `count` samples of the first attention matrix; None if it is quantized."""
    for parameter in site.attention.parameters():
        if parameter.dim() == 2 and parameter.is_floating_point() and parameter.device.type != "meta":
            flat = parameter.detach().flatten()
            return flat[torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()].float().cpu()
    return None


def no_single_stack(name: str) -> KVPolicyError:
    """The error for a model whose attention layers cannot be found, or form several stacks."""
    return KVPolicyError(
        f"{name} has no single stack of attention layers that a policy could be attached to: pass a decoder-only "
        "causal language model of transformers."
    )


def not_causal(name: str) -> KVPolicyError:
    """The error for a model whose attention is not causal self-attention."""
    return KVPolicyError(
        f"{name} has attention that looks ahead or at something else than its own tokens: pass a decoder-only causal "
        "language model of transformers."
    )


def check_attention_class(name: str, kind: type) -> None:
    """Raise where the attention of a class cannot be replaced."""
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in vars(kind).values() if callable(method)]
    used = {name for code in codes if code is not None for name in code.co_names}
    if "lambda_q1" in used:
        raise KVPolicyError(
            f"{name} ({kind.__name__}) attends twice with one set of keys (differential attention), which a policy "
            "cannot follow: use a model whose layers attend once."
        )
    if hasattr(kind, "prepare_dynamic_mask"):
        raise KVPolicyError(
            f"{name} ({kind.__name__}) masks tokens by their values, which a policy cannot follow: use another model."
        )
    known = hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
    own = "softmax" in used and "ALL_ATTENTION_FUNCTIONS" not in used  # though others in its file may have none
    if not known or own:
        raise KVPolicyError(
            f"{name} ({kind.__name__}) does not use transformers' attention interface, so its attention cannot be "
            "replaced: use a model class that does, or a newer transformers."
        )


def is_falcon(module: nn.Module) -> bool:
    """Whether an attention module is Falcon's, which has a class table of its own."""
    return type(module).__name__ in ("FalconAttention", "FalconFlashAttention2")


@functools.cache
def attention_classes(module: str) -> list[type]:
    """The attention classes of a modeling module that take a layer index, without vision, audio and cross attention."""
    found = [kind for name, kind in vars(sys.modules[module]).items() if name.endswith("Attention")]
    return [
        kind
        for kind in found
        if isinstance(kind, type)
        and "layer_idx" in inspect.signature(kind).parameters
        and not any(word in kind.__name__ for word in ("Vision", "Audio", "Cross"))
    ]

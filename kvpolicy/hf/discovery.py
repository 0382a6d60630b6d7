"""Finding the attention layers of a model, and refusing a model without them, or whose attention cannot be replaced.

A config is refused for what attaching to its model would refuse, before any weight is loaded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpolicy.hf.embedded import ShippedConfig
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.limits import MAX_SIZE

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
    """Say in a relative clause why a model has no single stack of attention layers that know their index.

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


class Site(NamedTuple):
    """The modules of one layer.

    Attributes:
        layer_idx: Index of the layer.
        block: The decoder layer.
        attention: Its attention module.
    """

    layer_idx: int
    block: nn.Module
    attention: nn.Module


class Sites(NamedTuple):
    """The modules of a model that a policy is attached to.

    Attributes:
        decoder: The module with the forward that takes the cache.
        layers: Its layers, in order.
    """

    decoder: nn.Module
    layers: list[Site]


ATTENTION = ("Attention", "MLA")
"""Ends of the names of attention classes."""


def find_sites(model: nn.Module) -> Sites:
    """Find the decoder, the layers and the attention modules of a model.

    Raises:
        KVPolicyError: If there are none, or their attention cannot be replaced.
    """
    stacks: dict[str, list[Site]] = {}  # by the name of their decoder
    states = _without_attention(model)
    for name, module in model.named_modules():
        if not type(module).__name__.endswith(ATTENTION) or not _has_index(module):
            continue
        if module.layer_idx in states:  # such as KimiLinearDeltaAttention: a state, and no tokens
            continue
        # In "model.layers.3.self_attn" the layer is the last module whose name is a number, and its list is in the
        # decoder. In "model.layers.3.self_attn.1" it is the one before, whose layer attends twice (LongCat).
        path = name.split(".")
        depth = max((i for i, part in enumerate(path[:-1]) if part.isdigit()), default=0)
        if not depth:
            continue
        if not is_falcon(module):
            check_attention_class(name, home(module))
        site = Site(int(module.layer_idx), model.get_submodule(".".join(path[: depth + 1])), module)  # pyright: ignore[reportArgumentType]
        stacks.setdefault(".".join(path[: depth - 1]), []).append(site)
    if len(stacks) > 1:  # one of them may look at pictures (DeepSeek-OCR 2)
        text = getattr(model, "get_decoder", lambda: None)()
        stacks = {name: sites for name, sites in stacks.items() if model.get_submodule(name) is text} or stacks
    if len(stacks) != 1:
        raise no_single_stack(type(model).__name__, why_no_stack(model, len(stacks)))
    ((name, found),) = stacks.items()
    # Two attention modules of one layer index are self-attention and cross-attention.
    crosses = any("CrossAttention" in type(site.attention).__name__ for site in found)
    if crosses or len({site.layer_idx for site in found}) < len(found):
        raise not_causal(type(model).__name__, CROSSES)
    if any(getattr(site.attention, "is_causal", True) is False for site in found):
        raise not_causal(type(model).__name__, LOOKS_AHEAD)
    decoder = model.get_submodule(name)
    _check_decoder(decoder)
    return Sites(decoder, sorted(found, key=lambda site: site.layer_idx))


def _has_index(module: nn.Module) -> bool:
    """Whether a module knows the index of its layer; attention that layers share may have -1."""
    index = getattr(module, "layer_idx", None)
    return isinstance(index, int) and index >= 0


def _check_decoder(decoder: nn.Module) -> None:
    """Raise KVPolicyError if a decoder takes its tokens, or masks them, in a way that a policy does not follow."""
    if isinstance(getattr(decoder, "embed_tokens", None), nn.ModuleList):
        raise KVPolicyError(
            f"The model must take one token at each position, got {type(decoder).__name__}, which takes one of each of "
            "its codebooks; try a model of text."
        )
    if hasattr(decoder, "_prepare_decoder_attention_mask"):
        raise KVPolicyError(
            "Masks must be made by the mask functions of transformers to be replaced, got "
            f"{type(decoder).__name__}, which makes its own; try a newer transformers."
        )


def _without_attention(model: nn.Module) -> set[int]:
    """Layers of a model that have a state and no attention."""
    from transformers.cache_utils import CacheLayerMixin, DynamicCache  # here: plans need no transformers

    from kvpolicy.hf.cache_names import DummyLayer

    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return set()
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return {index for index, layer in enumerate(layers) if not isinstance(layer, CacheLayerMixin | DummyLayer)}


def sample_weights(site: Site, count: int = 64) -> torch.Tensor | None:
    """Weight fingerprint: `count` samples of the first attention matrix; None if it is quantized."""
    for parameter in site.attention.parameters():
        if parameter.dim() == 2 and parameter.is_floating_point() and parameter.device.type != "meta":
            return samples_of(parameter.detach(), count).float().cpu()
    return None


def samples_of(weight: torch.Tensor, count: int = 64) -> torch.Tensor:
    """`count` elements of a weight at equal distances, [count]."""
    flat = weight.flatten()
    # In float64: float32 indices would be inexact in matrices of more than 2^24 elements.
    return flat[torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device="cpu").long()]


CROSSES = "it also attends to an encoder or to pictures"
LOOKS_AHEAD = "tokens attend to later ones"


def not_causal(name: str, why: str) -> KVPolicyError:
    """The error for a model with attention that is not causal self-attention."""
    return KVPolicyError(
        f"The model must be a decoder-only causal language model of transformers, got {name}, whose attention is not "
        f"causal self-attention: {why}."
    )


def check_attention_class(name: str, kind: type) -> None:
    """Raise KVPolicyError if the attention of a class cannot be replaced.

    What a class does is read from the names that its methods use, since transformers does not declare it.
    """
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in vars(kind).values() if callable(method)]
    used = {name for code in codes if code is not None for name in code.co_names}
    if "lambda_q1" in used:
        raise KVPolicyError(
            f"Attention must be computed once per layer, got differential attention in {name} ({kind.__name__}), which "
            "is not supported."
        )
    if hasattr(kind, "prepare_dynamic_mask"):
        raise KVPolicyError(
            f"Attention must be masked by position only, got a mask that depends on values in {name} "
            f"({kind.__name__}), which is not supported."
        )
    known = hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
    # Other classes of the module may use the interface.
    own = "softmax" in used and "ALL_ATTENTION_FUNCTIONS" not in used
    if not known or own:
        raise KVPolicyError(
            f"Attention must use the attention interface of transformers to be replaced, got {name} "
            f"({kind.__name__}), which does not; try a newer transformers."
        )
    if "position_bias" in {name for code in codes if code is not None for name in code.co_varnames}:
        raise KVPolicyError(
            f"Attention must use queries and keys alone to score tokens, got a bias by content and distance in {name} "
            f"({kind.__name__}), which is not supported."
        )


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where hooks of accelerate load its weights, or where these are."""
    hooks: list[Any] = [getattr(part, "_hf_hook", None) for part in module.modules()]
    wanted = next((hook.execution_device for hook in hooks if getattr(hook, "offload", False)), None)
    if wanted is not None:
        return torch.device(wanted)
    held = (*module.parameters(), *module.buffers())  # quantized weights may be buffers
    return next((t.device for t in held if not t.is_meta), held[0].device if held else torch.device("cpu"))


def around(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules that contain a decoder, from the outermost."""
    name = next(name for name, module in model.named_modules() if module is decoder)
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]


ROPE_DELTAS = "rope_deltas"
"""Where transformers keeps the offset of each row behind pictures (M-RoPE), [B, 1] int64; None before a prompt."""


def rope_owner(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The innermost module around a decoder that keeps offsets of its positions; None if none does."""
    return next((module for module in reversed(around(model, decoder)) if ROPE_DELTAS in vars(module)), None)


def home(module: nn.Module) -> type[nn.Module]:
    """The class that defines the forward of a module, which a subclass of it may inherit."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def is_falcon(module: nn.Module) -> bool:
    """Whether an attention module is that of Falcon, which does not use the attention interface."""
    return is_falcon_class(type(module))


def is_falcon_class(kind: type) -> bool:
    """Whether an attention class is Falcon's."""
    return kind.__name__ in ("FalconAttention", "FalconFlashAttention2")


def check_modules(config: Any) -> None:
    """Look at the modules of a config's model, as attaching does: the model is made on the device meta.

    Nothing is known of a config whose model is none of transformers' own.

    Raises:
        KVPolicyError: If the attention of the model cannot be replaced.
    """
    if isinstance(config, ShippedConfig):
        return
    kind = _model_class(config)
    if kind is not None and (refusal := _refusal(kind, _ByContent(config))):
        raise KVPolicyError(refusal)


def _model_class(config: Any) -> type[nn.Module] | None:
    """The class of transformers that a config is of; for a part of a model, that of the part."""
    from transformers.models.auto import modeling_auto as auto

    text = type(config.get_text_config(decoder=True))
    candidates = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None),
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None),
        auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(text, None),
    )
    kind = next(filter(None, candidates), None) or _decoder_class(type(config))
    return kind if isinstance(kind, type) and kind.__module__.startswith("transformers.") else None


def _decoder_class(config: type) -> Any:
    """The causal language model of a config of transformers that no auto class takes, such as Musicgen's decoder."""
    if not config.__module__.startswith("transformers.models."):
        return None
    modeling = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    found = (each for name, each in vars(modeling).items() if name.endswith("ForCausalLM"))
    return next((each for each in found if getattr(each, "config_class", None) is config), None)


class _ByContent:
    """A config that equals another one of the same content."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._content: str = config.to_json_string(use_diff=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByContent) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


@functools.lru_cache(maxsize=64)
def _refusal(kind: type[nn.Module], described: _ByContent) -> str:
    """Why a policy cannot be attached to a model of a class and a config; empty if it can."""
    try:
        model = _skeleton(kind, described.config)
        find_sites(model) if model is not None else _check_classes(kind)
    except KVPolicyError as error:
        return str(error)
    return ""


def _skeleton(kind: type[nn.Module], config: Any) -> nn.Module | None:
    """A model without weights; None if it cannot be made here."""
    config = copy.deepcopy(config)
    needed: Any = getattr(kind, "config_class", None)
    text = config.get_text_config(decoder=True)
    # Only where the class is that of the text decoder: a class may take configs of another model, as that of GLM-4.6V.
    if needed is not None and not isinstance(config, needed) and isinstance(text, needed):
        config = text
    try:
        config._attn_implementation = "eager"  # another one may need a package
        with torch.device("meta"):
            return kind(config)
    except Exception:
        return None  # such as a picture tower of a package that is not installed


def _check_classes(kind: type[nn.Module]) -> None:
    """Check all attention classes of a model's module that take a layer index."""
    found = [each for name, each in vars(sys.modules[kind.__module__]).items() if name.endswith(ATTENTION)]
    classes = [
        each
        for each in found
        if isinstance(each, type)
        and "layer_idx" in inspect.signature(each).parameters
        and not any(word in each.__name__ for word in ("Vision", "Audio", "Cross"))
    ]
    if not classes:
        raise no_single_stack(kind.__name__)
    for each in classes:
        if not is_falcon_class(each):
            check_attention_class(each.__name__, each)


def vocabulary_of(model: Any) -> int:
    """Tokens that a model knows; as many as ids may ever be, where it does not say."""
    embeddings = None
    with contextlib.suppress(NotImplementedError):  # transformers raises it for modules that it does not know
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return getattr(embeddings, "num_embeddings", MAX_SIZE)


def lacks_weights(model: nn.Module) -> bool:
    """Whether weights are on `meta` and no hook loads them, unlike those that accelerate offloads."""
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not is_offloaded and any(parameter.is_meta for parameter in model.parameters())

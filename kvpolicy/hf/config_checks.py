"""Refuse a config for what attaching to its model would refuse, before any weight is loaded."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
from typing import Any

import torch
from torch import nn

from kvpolicy.hf.discovery import ATTENTION, check_attention_class, find_sites, is_falcon_class, no_single_stack
from kvpolicy.hf.shipped import ShippedConfig
from kvpolicy.text.errors import KVPolicyError


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

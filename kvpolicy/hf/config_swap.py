"""The attention implementation in a model's configs, changed for one model alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from kvpolicy.hf.attention_interface import register

IMPLEMENTATION = "_attn_implementation_internal"


def configs_of(model: nn.Module) -> list[Any]:
    """The configs that a model's modules hold, each once."""
    found = {id(config): config for module in model.modules() if (config := _config(module)) is not None}
    return list(found.values())


def swap_implementation(model: nn.Module) -> Callable[[], None]:
    """Let a model's attention go through the policy's functions; returns how to undo it.

    Two models may share a config, so the modules get copies. What is changed in a copy meanwhile, such as a padding
    token, is taken over when the original comes back.
    """
    originals = configs_of(model)
    other = "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
    copies = {id(config): copy.copy(config) for config in originals}
    before = {key: dict(vars(config)) for key, config in copies.items()}
    for config in copies.values():
        # Not by the public property: its setter writes to the sub-configs, which are still those of the originals here.
        setattr(config, IMPLEMENTATION, register(config._attn_implementation, other))
        for name in config.sub_configs:
            sub = getattr(config, name, None)
            if id(sub) in copies:
                vars(config)[name] = copies[id(sub)]
    held = [(module, config) for module in model.modules() if (config := _config(module)) is not None]
    for module, config in held:
        vars(module)["config"] = copies[id(config)]

    def undo() -> None:
        for module, config in held:
            vars(module)["config"] = config
        for config in originals:
            _take_over(config, copies[id(config)], before[id(config)])

    return undo


def _config(module: nn.Module) -> PreTrainedConfig | None:
    config = vars(module).get("config")
    return config if isinstance(config, PreTrainedConfig) else None


def _take_over(original: PreTrainedConfig, changed: PreTrainedConfig, before: dict[str, Any]) -> None:
    """Give the original what was set on its copy, but for what the swap itself set."""
    own = {IMPLEMENTATION, *original.sub_configs}
    for name, value in vars(changed).items():
        # By identity: not every value can be compared, and what is changed in place is shared with the shallow copy.
        if name not in own and (name not in before or before[name] is not value):
            vars(original)[name] = value

"""The configs that ship with the package, read without transformers: its import takes longer than a plan."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvpolicy.text.embedded_names import EMBEDDED

_ASSETS = files("kvpolicy") / "assets"
_NAMES = (path.name.removesuffix(".json") for path in (_ASSETS / "configs").iterdir())
SHIPPED = tuple(sorted([*_NAMES, *EMBEDDED]))
"""Names of the configs that ship with the package."""


def shipped_name(name: str) -> str | None:
    """The shipped config that a name means, in any case; None if it means none.

    Examples:
        >>> shipped_name("Llama-3.1-8B"), shipped_name("gpt2")
        ('llama-3.1-8b', None)
    """
    lower = name.strip().lower()
    return lower if lower in SHIPPED and (name in SHIPPED or not Path(name).exists()) else None


def config_file(name: str) -> Any:
    """The `config.json` of a shipped name."""
    return _ASSETS / name / "config.json" if name in EMBEDDED else _ASSETS / "configs" / f"{name}.json"


class ShippedConfig:
    """A shipped config with the attributes of transformers' config class that plans read.

    The tests compare every plan of it with that of transformers' config.

    Attributes:
        name: Its name; of the text decoder of a model of several parts, that of the model.
    """

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        """A config with `fields`, as its JSON file has them."""
        self.name = name
        self._fields = fields

    def __getattr__(self, field: str) -> Any:
        """A field of the file."""
        try:
            return vars(self)["_fields"][field]
        except KeyError:
            raise AttributeError(f"The config {vars(self).get('name')!r} has no field {field!r}.") from None

    def get_text_config(self, decoder: bool = False) -> ShippedConfig:
        """The config of the text decoder, which is this one unless the model has several parts."""
        text = self._fields.get("text_config")
        return self if text is None else ShippedConfig(self.name, text)

    def windows(self) -> dict[int, int]:
        """The sliding window of each layer that has one."""
        kinds = self._fields.get("layer_types") or []
        return {index: self.sliding_window for index, kind in enumerate(kinds) if kind == "sliding_attention"}


@functools.cache
def shipped_config(name: str) -> ShippedConfig:
    """Read a shipped config.

    Examples:
        >>> shipped_config("llama-3.1-8b").num_hidden_layers
        32
        >>> shipped_config("gemma-3-12b").get_text_config().sliding_window
        1024
    """
    return ShippedConfig(name, json.loads(config_file(name).read_text(encoding="utf-8")))


@functools.cache
def _parameters() -> dict[str, Any]:
    return json.loads((_ASSETS / "parameters.json").read_text(encoding="utf-8"))


class Skeleton(nn.Module):
    """The parameters of a shipped model on the meta device, with their names, shapes and ties.

    `python -m kvpolicy_eval.catalog.parameters` writes them to a file, from the models of transformers.

    Attributes:
        config: The config of the model.
        tp_plan: The plan by which transformers shards it.
    """

    def __init__(self, config: ShippedConfig) -> None:
        """The model of a shipped config."""
        super().__init__()
        self.config = config
        found = _parameters()[config.name]
        self.tp_plan: dict[str, str] = found["tp_plan"]
        self._head: str = found["head"]
        with torch.device("meta"):
            for pattern, shape in found["parameters"].items():
                stack, star, leaf = pattern.partition(".*.")
                for index in range(found["layers"][stack] if star else 1):
                    self._add(
                        f"{stack}.{index}.{leaf}" if star else pattern,
                        nn.Parameter(torch.empty(shape, dtype=torch.float32, device="cpu"), False),
                    )
        for name, other in found["tied"].items():
            self._add(name, self.get_parameter(other))

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.get_submodule(self._head)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, parameter)

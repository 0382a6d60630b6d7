"""Models by name: a small trained model and configs of large ones that ship with the package, and GGUF files.

Shipped configs are read without transformers, whose import takes longer than a plan.
"""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import nn

from kvpolicy.hf.meta_model import MALFORMED
from kvpolicy.registry import suggest
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.embedded_names import EMBEDDED, EmbeddedName
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.formats import expanded

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

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """The plan by which transformers shards the model."""
        return _parameters()[self.name]["tp_plan"]

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


class ShippedModel(nn.Module):
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
        self.tp_plan = config.base_model_tp_plan
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


_ON_HUB = re.compile(r"([^/]+/[^/]+)/([^/]+)")


class Checkpoint(NamedTuple):
    """Where transformers finds a model.

    Attributes:
        name: A folder, or a name on the Hub.
        options: Further arguments of `from_pretrained`: `gguf_file`, for a GGUF file.
    """

    name: str
    options: dict[str, str]


def checkpoint_of(name: str) -> Checkpoint:
    """Where the model of a name is: its folder and file, if it is a GGUF file.

    Args:
        name: The path of a GGUF file, or `OWNER/REPOSITORY/FILE.gguf` on the Hub; any other name stays as it is.

    Raises:
        KVPolicyError: If there is no such file.
        ModuleNotFoundError: If the package gguf is not installed.

    Examples:
        >>> checkpoint_of("Qwen/Qwen3-4B")
        Checkpoint(name='Qwen/Qwen3-4B', options={})
    """
    if not name.lower().endswith(".gguf"):
        return Checkpoint(name, {})
    path = expanded(name)
    on_hub = _ON_HUB.fullmatch(name)
    if not path.is_file() and (on_hub is None or name.startswith(("/", ".", "~"))):
        raise KVPolicyError(f"A GGUF file must exist, got {name!r}; try its path, or OWNER/REPOSITORY/FILE.gguf.")
    if find_spec("gguf") is None:
        message = "A GGUF file needs the package gguf, which is not installed; run pip install 'kvpolicy[gguf]'."
        raise ModuleNotFoundError(message, name="gguf")
    if path.is_file() or on_hub is None:
        return Checkpoint(str(path.parent), {"gguf_file": path.name})
    return Checkpoint(on_hub[1], {"gguf_file": on_hub[2]})


HUB_TIMEOUT = 5.0
"""Seconds to wait for the Hub before a name is refused."""


@named_arguments
def tiny(dtype: torch.dtype = torch.float32, *, name: EmbeddedName = "tiny") -> tuple[Any, Any]:
    """Load a bundled model: a Llama of 8 layers that recalls records, for trying policies without a download.

    Args:
        dtype: Dtype of the weights, which are stored in bf16.
        name: `tiny`, trained on up to 1,024 tokens, or `tiny-4k`, which was trained further on up to 4,736.

    Returns:
        The model, a `LlamaForCausalLM` in evaluation mode, and its tokenizer. Type checkers
        see `Any`: with the types that transformers declares, they refuse `generate`, and text that was decoded.

    Raises:
        KVPolicyError: If there is no bundled model of that name.
        KVPolicyTypeError: If `dtype` is none, such as a name.

    Examples:
        >>> model, tokenizer = tiny()
        >>> model.config.num_hidden_layers
        8
        >>> tiny(name="tiny-4k")[0].config.max_position_embeddings
        4736
    """
    if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = f"name={dtype!r}" if dtype in EMBEDDED else "torch.bfloat16"
        raise KVPolicyTypeError(f"dtype must be a torch.dtype, got {dtype!r}; try {hint}.")
    if name not in EMBEDDED:
        raise KVPolicyError(f"The bundled model must be one of {', '.join(EMBEDDED)}, got {name}; try {EMBEDDED[0]}.")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError as error:
        message = "The bundled model needs transformers, which is not installed; run pip install 'kvpolicy[hf]'."
        raise ModuleNotFoundError(message, name=error.name) from error
    with as_file(files("kvpolicy") / "assets" / name) as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def config_of(name: str) -> Any:
    """Load a config that ships with the package, or as transformers does.

    Args:
        name: One that ships with the package, such as `llama-3.1-8b` (`SHIPPED` has them all); or a folder, a
            `config.json`, a GGUF file, or the name of a model on the Hub, which is asked once.

    Raises:
        KVPolicyError: If there is none.

    Examples:
        >>> config_of("mixtral-8x7b").num_local_experts
        8
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    shipped = shipped_name(name)
    if shipped is None and _is_path(name) and not Path(name).exists():
        raise KVPolicyError(f"The config must be an existing file or folder, got {name}.")
    try:
        if shipped is not None:
            with as_file(config_file(shipped)) as path:
                return AutoConfig.from_pretrained(path, trust_remote_code=False)
        found = checkpoint_of(name)
        if not found.options and not Path(name).exists():
            _ask_hub(name)
        return AutoConfig.from_pretrained(found.name, trust_remote_code=False, **found.options)
    except (OSError, StrictDataclassError, *MALFORMED) as error:
        reason = shorten(str(error), 300, placeholder=" ...").rstrip(".") or type(error).__name__
        raise KVPolicyError(
            f"The config must be a model that ships, a folder, a config.json or a name on the Hub, got {name} "
            f"({reason}){suggest(name.rpartition('/')[2], SHIPPED)}"
        ) from error


def _ask_hub(name: str) -> None:
    """Ask the Hub once whether it has a model, unless its config is in the local cache.

    transformers would ask six times, with pauses of up to 8 seconds.

    Raises:
        OSError: If the Hub does not have the model, or does not answer.
        ValueError: If the Hub allows no such name.
    """
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str) or constants.HF_HUB_OFFLINE:
        return
    url = hf_hub_url(name, "config.json")
    try:
        get_hf_file_metadata(url, token=get_token(), timeout=HUB_TIMEOUT)
    except Exception as error:  # huggingface_hub passes on the errors of its HTTP library, which it has changed
        raise OSError(f"the Hub does not have it, or cannot be reached: {error}") from error


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".json")


def as_config(config: Any) -> Any:
    """A transformers config as it is, the one of a model, or the one of a name.

    A config that ships with the package is read without transformers.

    Raises:
        KVPolicyTypeError: If it is none of these.
        KVPolicyError: If there is no config of that name.

    Examples:
        >>> as_config("llama-2-70b").num_hidden_layers
        80
    """
    shipped = shipped_name(config) if isinstance(config, str) else None
    if shipped is not None:
        return shipped_config(shipped)
    if isinstance(config, ShippedConfig):
        return config
    found: Any = config_of(config) if isinstance(config, str) else getattr(config, "config", config)
    if not hasattr(found, "get_text_config"):
        raise KVPolicyTypeError(
            f"config must be a transformers config, a model or a name such as {SHIPPED[0]}, got a "
            f"{type(config).__name__}."
        )
    return found

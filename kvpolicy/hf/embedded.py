"""What ships with the package: a small trained model, and configs of large ones without their weights."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from kvpolicy.spec.errors import KVPolicyError, KVPolicyTypeError

SHIPPED = ("llama-2-70b", "llama-3-70b", "mixtral-8x7b", "tiny")
"""Models whose configs ship."""


def tiny(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load the embedded model: a Llama of 8 layers that recalls, for trying policies without a download.

    Args:
        dtype: Of the weights, which are stored in bf16.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Examples:
        >>> model, tokenizer = tiny()
        >>> model.config.num_hidden_layers
        8
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError as error:
        told = "The model needs transformers, which is not installed: pip install 'kvpolicy[hf]'."
        raise ModuleNotFoundError(told, name=error.name) from error
    with as_file(files("kvpolicy") / "assets" / "tiny") as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def config_of(name: str) -> Any:
    """Find a config by a shipped name, or as transformers does.

    Args:
        name: `llama-2-70b`, `llama-3-70b`, `mixtral-8x7b` or `tiny`, which ship with the package; else a folder, a
            `config.json` or the name of a model on the hub.

    Raises:
        KVPolicyError: Where none is found.

    Examples:
        >>> config_of("mixtral-8x7b").num_local_experts
        8
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if name not in SHIPPED and _is_path(name) and not Path(name).exists():
        raise KVPolicyError(f"There is no file or folder {name}: check the path.")
    assets = files("kvpolicy") / "assets"
    shipped = assets / "tiny" / "config.json" if name == "tiny" else assets / "configs" / f"{name}.json"
    try:
        if name in SHIPPED:
            with as_file(shipped) as path:
                return AutoConfig.from_pretrained(path, trust_remote_code=False)
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = shorten(str(error), 300, placeholder=" ...").rstrip(".") or type(error).__name__
        raise KVPolicyError(
            f"The config of {name} cannot be read: give {', '.join(SHIPPED)}, a folder, a config.json or a hub name "
            f"({reason})."
        ) from error


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".json")


def as_config(config: Any) -> Any:
    """A transformers config as it is, a model's own, or the one of a name.

    Raises:
        KVPolicyTypeError: Where it is none of these.
        KVPolicyError: Where there is no config of that name.

    Examples:
        >>> as_config("llama-2-70b").num_hidden_layers
        80
    """
    found: Any = config_of(config) if isinstance(config, str) else getattr(config, "config", config)
    if not hasattr(found, "get_text_config"):
        raise KVPolicyTypeError(
            f"{config!r} is no config: give one of transformers, a model, or a name such as {SHIPPED[0]}."
        )
    return found

"""What ships with the package: a small trained model, and configs of large ones without their weights."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

import torch

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
        ValueError: Where none is found.

    Examples:
        >>> config_of("mixtral-8x7b").num_local_experts
        8
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    assets = files("kvpolicy") / "assets"
    shipped = assets / "tiny" / "config.json" if name == "tiny" else assets / "configs" / f"{name}.json"
    try:
        if name in SHIPPED:
            with as_file(shipped) as path:
                return AutoConfig.from_pretrained(path, trust_remote_code=False)
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(
            f"The config of {name} cannot be read: give {', '.join(SHIPPED)}, a folder, a config.json or a hub name "
            f"({reason[:200]})."
        ) from error

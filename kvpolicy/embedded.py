"""The small trained model that ships with the package."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

import torch


def tiny(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load the embedded model: a Llama of 8 layers that recalls, for trying policies without a download.

    Args:
        dtype: Of the weights, which are stored in bf16.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Example:
        >>> model, tokenizer = tiny()
        >>> model.config.num_hidden_layers
        8
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with as_file(files("kvpolicy") / "assets" / "tiny") as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)

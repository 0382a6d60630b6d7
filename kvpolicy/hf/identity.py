"""Identification of the model that a calibration or a saved cache belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from kvpolicy.hf.discovery import find_sites, sample_weights
from kvpolicy.hf.model_spec import describe
from kvpolicy.protocols import ModelInfo


def model_info(model: nn.Module) -> ModelInfo:
    """Description of a model for codecs, including its weight fingerprint.

    Raises:
        KVPolicyError: If the model does not support policies.

    Examples:
        >>> import kvpolicy
        >>> model_info(kvpolicy.tiny()[0])[:3]
        (8, 4, 32)
    """
    return describe(model.config).info(sample_weights(find_sites(model).layers[0]))


def identity(model: nn.Module, name: str | None = None, info: ModelInfo | None = None) -> dict[str, Any]:
    """The description of a model in a file, which `kvpolicy.text.model_identity.check_same_model` verifies.

    Args:
        model: The model.
        name: Name of the model; by default where it was loaded from, without folders.
        info: Its description for codecs; that of the whole model for a shard. By default, `model_info` makes it.
    """
    info = model_info(model) if info is None else info
    config: Any = model.config
    loaded_from: str = getattr(config, "name_or_path", "") or type(model).__name__
    return {
        "name": name or (Path(loaded_from).name if Path(loaded_from).exists() else loaded_from),
        "type": str(config.get_text_config(decoder=True).model_type),
        "layers": info.layers,
        "heads": info.heads,
        "head_dim": info.head_dim,
        "weights": None if info.weights is None else info.weights.tolist(),
        "rope": _jsonable(getattr(config.get_text_config(decoder=True), "rope_parameters", None)),
    }


def _jsonable(parameters: Any) -> Any:
    """Parameters of a rotary embedding as a file has them: some configs hold tuples, and subclasses of dict."""
    return json.loads(json.dumps(parameters, default=str))

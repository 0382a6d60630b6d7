"""Which model a calibration belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from kvpolicy.hf.discovery import find_sites, sample_weights
from kvpolicy.hf.model_spec import describe
from kvpolicy.protocols import ModelInfo


def model_info(model: nn.Module) -> ModelInfo:
    """What a codec may know of a model, with a few of its weights.

    Raises:
        KVPolicyError: Where no policy could be attached to the model.

    Examples:
        >>> import kvpolicy
        >>> model_info(kvpolicy.tiny()[0])[:3]
        (8, 4, 32)
    """
    return describe(model.config).info(sample_weights(find_sites(model).layers[0]))


def identity(model: nn.Module, name: str | None = None) -> dict[str, Any]:
    """What a calibration stores of its model, as `kvpolicy.codecs._files.check_model` reads it.

    Args:
        model: The model.
        name: What to call it; what it was loaded from, without folders, by default.
    """
    info = model_info(model)
    config: Any = model.config
    loaded: str = getattr(config, "name_or_path", "") or type(model).__name__
    return {
        "name": name or (Path(loaded).name if Path(loaded).exists() else loaded),
        "type": str(config.get_text_config(decoder=True).model_type),
        "layers": info.layers,
        "heads": info.heads,
        "head_dim": info.head_dim,
        "weights": None if info.weights is None else info.weights.tolist(),
    }

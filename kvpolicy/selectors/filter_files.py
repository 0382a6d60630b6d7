"""Filter files: a vector for each KV head of a model, with which the keys of its tokens are multiplied.

A file is in the format of `tensor_files`, described by the entry `kvpolicy_filters`. The tensor `filters.0` has the
filters of layer 0, [H, D] fp32, or [1, D] for all heads of the layer; a layer that no policy manages has none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.tensor_files import FileKind, Parsed
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten

KEY = "kvpolicy_filters"
"""The entry of the metadata that describes the file."""

_PREFIX = "filters."


@dataclass(frozen=True, eq=False)
class FilterFile:
    """The content of a filter file. It is shared by all callers that load it and must not be modified.

    Attributes:
        filters: The filters of each layer, [H, D] fp32 or [1, D] for all heads, on the CPU, by the index of the layer.
        model: The model that the file is for, as in other calibrations; None if the file does not say.
        made: How the file was made: the text, its options.
    """

    filters: Mapping[int, Tensor]
    model: dict[str, Any] | None = None
    made: dict[str, Any] | None = None


def save_filters(path: str | os.PathLike[str], content: FilterFile) -> None:
    """Write a filter file in the format of this module; an existing file is replaced.

    Args:
        path: The file.
        content: Its content.

    Raises:
        KVPolicyError: If the file cannot be written.
    """
    tensors = {f"{_PREFIX}{layer}": filters for layer, filters in content.filters.items()}
    FILTERS.save(path, Parsed(tensors, content.model, content.made))


def load_filters(path: str) -> FilterFile:
    """Read a filter file; it is read again only after it has changed.

    Args:
        path: The file, or the name of an embedded model, `tiny` or `tiny-4k`, whose file is part of the package.

    Raises:
        KVPolicyError: If it cannot be read, is no filter file, or was edited or damaged.

    Examples:
        >>> load_filters("tiny").filters[0].shape
        torch.Size([4, 32])
    """
    return FILTERS.load(path)


def check_filters(content: FilterFile, path: str, model: ModelInfo) -> None:
    """Refuse a model that a filter file is not for.

    Args:
        content: The content of the file.
        path: The file as the user wrote it.
        model: The model to check.

    Raises:
        KVPolicyError: If layers, heads or weights differ.
    """
    FILTERS.check_model(path, content.model, model)
    for layer_idx in model.indices:
        found = content.filters.get(layer_idx)
        if found is None or found.shape[0] not in (1, model.heads) or found.shape[1] != model.head_dim:
            got = "none" if found is None else list(found.shape)
            raise KVPolicyError(
                f"{FILTERS.named(path)} must have filters for {model.heads} KV heads of dimension {model.head_dim}, as "
                f"the model has, got {got} in layer {layer_idx}; {FILTERS.remedy} on this model."
            )


def _content(parsed: Parsed, path: str) -> FilterFile:
    for name, tensor in parsed.tensors.items():
        if not name.removeprefix(_PREFIX).isdecimal() or tensor.dim() != 2 or not bool(tensor.isfinite().all()):
            raise KVPolicyError(
                f"{FILTERS.named(path)} must have finite filters [H, D] of layers, got {shorten(name)!r} of the shape "
                f"{list(tensor.shape)}; {FILTERS.remedy}."
            )
    filters = {int(name.removeprefix(_PREFIX)): tensor.float() for name, tensor in parsed.tensors.items()}
    return FilterFile(dict(sorted(filters.items())), parsed.model, parsed.made)


FILTERS: FileKind[FilterFile] = FileKind(
    "filter file", KEY, "qfilters.safetensors", "kvpolicy calibrate qfilters", _content
)

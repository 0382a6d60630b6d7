"""Filter files: a vector for each KV head of a model, with which the keys of its tokens are multiplied.

A file is in the format of safetensors. The tensor `filters.0` has the filters of layer 0, [H, D] fp32, or [1, D] for
all heads of the layer; a layer that no policy manages has none. The entry `kvpolicy_filters` of the metadata is JSON:

    {"format": 1, "kvpolicy": "0.1.0", "model": {...}, "made": {...}, "sha256": "..."}

`model` describes the model as other calibrations do, or is null for a file that fits any model of its shapes; `made`
says from which text and with which options the file was made. The hash covers all of this and the tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.spec.embedded_names import EMBEDDED, embedded_file
from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.formats import check_format, replace_file, stamp
from kvpolicy.spec.model_identity import check_same_model
from kvpolicy.spec.tables import shorten

FORMAT = 1
"""Version of the file format; newer ones are refused."""

KEY = "kvpolicy_filters"
"""The entry of the metadata that describes the file."""

_PREFIX = "filters."
_REMEDY = "try kvpolicy calibrate qfilters"


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
    from safetensors.torch import save

    tensors = {f"{_PREFIX}{layer}": filters.detach().cpu().contiguous() for layer, filters in content.filters.items()}
    facts = stamp(FORMAT) | {"model": content.model, "made": content.made}
    facts["sha256"] = _digest(facts, tensors)
    blob = save(tensors, metadata={"format": "pt", KEY: json.dumps(facts, allow_nan=False)})
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, blob)
    except OSError as error:
        raise KVPolicyError(
            f"The filter file {str(path)!r} must be writable, got {error.strerror}; try another file."
        ) from error


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
    if path in EMBEDDED:
        return _embedded(path)
    where = Path(path).expanduser().absolute()  # a relative path in a cache key would not name one file
    try:
        found = where.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    # The times and sizes are part of the cache key alone, so that a file is read again after it was replaced.
    return _load(path, str(where), (found.st_mtime_ns, found.st_size, found.st_ino))


def check_filters(content: FilterFile, path: str, model: ModelInfo) -> None:
    """Refuse a model that a filter file is not for.

    Args:
        content: The content of the file.
        path: The file as the user wrote it.
        model: The model to check.

    Raises:
        KVPolicyError: If layers, heads or weights differ.
    """
    what = f"The filter file {path!r}"
    if content.model is not None:
        check_same_model(content.model, what, model, remedy=f"{_REMEDY} on this model")
    for layer_idx in model.indices:
        found = content.filters.get(layer_idx)
        if found is None or found.shape[0] not in (1, model.heads) or found.shape[1] != model.head_dim:
            raise KVPolicyError(
                f"{what} must have filters for {model.heads} KV heads of dimension {model.head_dim}, as the model has, "
                f"got {'none' if found is None else list(found.shape)} in layer {layer_idx}; {_REMEDY} on this model."
            )


@functools.cache
def _embedded(name: str) -> FilterFile:
    return _parsed(embedded_file(name, "qfilters.safetensors").read_bytes(), name)


@functools.lru_cache(maxsize=32)
def _load(path: str, where: str, _changed: tuple[int, ...]) -> FilterFile:
    try:
        blob = Path(where).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _parsed(blob, path)


def _parsed(blob: bytes, path: str) -> FilterFile:
    from safetensors import SafetensorError
    from safetensors.torch import load

    what = f"The filter file {path!r}"
    try:
        tensors = load(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise KVPolicyError(f"{what} must be a safetensors file, got one that cannot be parsed; {_REMEDY}.") from error
    facts = _facts(blob)
    if facts is None:
        raise KVPolicyError(f"{what} must be written by kvpolicy, got one that does not say so; {_REMEDY}.")
    # Before the hash, which a newer format may compute in another way: the message must name the version.
    check_format(facts, FORMAT, what)
    if facts.get("sha256") != _digest({key: value for key, value in facts.items() if key != "sha256"}, tensors):
        raise KVPolicyError(f"{what} must be as it was written, got an edited or damaged one; {_REMEDY}.")
    for name, tensor in tensors.items():
        if not name.removeprefix(_PREFIX).isdecimal() or tensor.dim() != 2 or not bool(tensor.isfinite().all()):
            raise KVPolicyError(
                f"{what} must have finite filters [H, D] of layers, got {shorten(name)!r} of the shape "
                f"{list(tensor.shape)}; {_REMEDY}."
            )
    filters = {int(name.removeprefix(_PREFIX)): tensor.float() for name, tensor in tensors.items()}
    return FilterFile(dict(sorted(filters.items())), facts.get("model"), facts.get("made"))


def _facts(blob: bytes) -> dict[str, Any] | None:
    """The description of a file that safetensors can read; None if it has none."""
    start = 8  # `load` returns no metadata; they follow the length of the header
    header: Any = json.loads(blob[start : start + int.from_bytes(blob[:start], "little")])
    try:
        facts: Any = json.loads((header.get("__metadata__") or {}).get(KEY, "null"))
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", facts) if isinstance(facts, dict) else None


def _digest(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _unreadable(path: str, error: Exception) -> KVPolicyError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return KVPolicyError(
        f"The filter file must be a readable file or {' or '.join(EMBEDDED)}, got {path!r} ({reason}); {_REMEDY}."
    )

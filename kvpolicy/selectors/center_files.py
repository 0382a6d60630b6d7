"""Center files: where the queries of each query head of a model lie before the rotary embedding.

A file is in the format of `tensor_files`, described by the entry `kvpolicy_centers`. Layer 0 has the tensors
`centers.0.mean` [Hq, D], the mean query of each query head without its rotation, and `centers.0.lengths` [Hq, F], the
mean length of its queries in each of the F planes that the embedding rotates, as attention takes them; or [1, D] and
[1, F] for all heads; all fp32. A layer that no policy manages has none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.tensor_files import FileKind, Parsed
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten

KEY = "kvpolicy_centers"
"""The entry of the metadata that describes the file."""

_PREFIX = "centers."


class Centers(NamedTuple):
    """The queries of one layer.

    Attributes:
        mean: The mean query of each query head without its rotation, [Hq, D] fp32; [1, D] for all heads.
        lengths: Their mean length in each plane of the embedding, [Hq, F] fp32; [1, F] for all heads.
    """

    mean: Tensor
    lengths: Tensor


@dataclass(frozen=True, eq=False)
class CenterFile:
    """The content of a center file. It is shared by all callers that load it and must not be modified.

    Attributes:
        centers: Those of each layer, on the CPU, by the index of the layer.
        model: The model that the file is for, as in other calibrations; None if the file does not say.
        made: How the file was made: the text, its options.
    """

    centers: Mapping[int, Centers]
    model: dict[str, Any] | None = None
    made: dict[str, Any] | None = None


def save_centers(path: str | os.PathLike[str], content: CenterFile) -> None:
    """Write a center file in the format of this module; an existing file is replaced.

    Args:
        path: The file.
        content: Its content.

    Raises:
        KVPolicyError: If the file cannot be written.
    """
    tensors = {
        f"{_PREFIX}{layer}.{name}": tensor
        for layer, found in content.centers.items()
        for name, tensor in found._asdict().items()
    }
    CENTERS.save(path, Parsed(tensors, content.model, content.made))


def load_centers(path: str) -> CenterFile:
    """Read a center file; it is read again only after it has changed.

    Args:
        path: The file, or the name of an embedded model, `tiny` or `tiny-4k`, whose file is part of the package.

    Raises:
        KVPolicyError: If it cannot be read, is no center file, or was edited or damaged.

    Examples:
        >>> load_centers("tiny").centers[0].mean.shape
        torch.Size([8, 32])
    """
    return CENTERS.load(path)


def check_centers(content: CenterFile, path: str, model: ModelInfo) -> None:
    """Refuse a model that a center file is not for.

    Args:
        content: The content of the file.
        path: The file as the user wrote it.
        model: The model to check.

    Raises:
        KVPolicyError: If layers, heads or weights differ.
    """
    CENTERS.check_model(path, content.model, model)
    for layer_idx in model.indices:
        found = content.centers.get(layer_idx)
        heads = 0 if found is None else found.mean.shape[0]
        if found is None or (heads != 1 and heads % model.heads) or found.mean.shape[1] != model.head_dim:
            got = "none" if found is None else list(found.mean.shape)
            raise KVPolicyError(
                f"{CENTERS.named(path)} must have centers for the query heads of {model.heads} KV heads of dimension "
                f"{model.head_dim}, as the model has, got {got} in layer {layer_idx}; {CENTERS.remedy} on this model."
            )


def _content(parsed: Parsed, path: str) -> CenterFile:
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parsed.tensors.items():
        layer, _, part = name.removeprefix(_PREFIX).partition(".")
        fits = layer.isdecimal() and part in Centers._fields and tensor.dim() == 2
        if not fits or not bool(tensor.isfinite().all()):
            raise KVPolicyError(
                f"{CENTERS.named(path)} must have finite means [Hq, D] and lengths [Hq, F] of layers, got "
                f"{shorten(name)!r} of the shape {list(tensor.shape)}; {CENTERS.remedy}."
            )
        found.setdefault(int(layer), {})[part] = tensor.float()
    for layer, parts in found.items():
        if len(parts) < len(Centers._fields) or len({len(tensor) for tensor in parts.values()}) > 1:
            shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
            raise KVPolicyError(
                f"{CENTERS.named(path)} must have a mean and lengths of every query head of a layer, got {shapes} in "
                f"layer {layer}; {CENTERS.remedy}."
            )
    return CenterFile({layer: Centers(**found[layer]) for layer in sorted(found)}, parsed.model, parsed.made)


CENTERS: FileKind[CenterFile] = FileKind(
    "center file", KEY, "triattention.safetensors", "kvpolicy calibrate triattention", _content
)

"""Files of tensors of each layer of a model, which a selector needs.

A file is in the format of safetensors. One entry of the metadata, which names the kind of the file, is JSON:

    {"format": 1, "kvpolicy": "0.2.0", "model": {...}, "made": {...}, "sha256": "..."}

`model` describes the model as other calibrations do, or is null for a file that fits any model of its shapes; `made`
says from which text and with which options the file was made. The hash covers all of this and the tensors.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.formats import check_format, stamp
from kvpolicy.text.model_file import CalibrationKind, check_digest, digest, pack_tensors, unpack_tensors
from kvpolicy.text.model_identity import check_same_model
from kvpolicy.text.tables import shorten

Content = TypeVar("Content")
Layer = TypeVar("Layer")


class TensorFile(CalibrationKind[Content], Generic[Content, Layer]):
    """One kind of file of tensors.

    Attributes:
        holds: The class of its content, which takes what it has of each layer, the model, and how it was made.
        prefix: The first word of the names of its tensors, and the field of its content that has the layers.
        dims: Its tensors of a layer by name, and how many dimensions each has; the empty name for a tensor that the
            layer alone names.
        of_layer: What it has of a layer, for messages.
        whole: What it must have of each layer besides, for messages.
    """

    holds: Callable[[dict[int, Layer], dict[str, Any] | None, dict[str, Any] | None], Content]
    prefix: str
    dims: ClassVar[Mapping[str, int]]
    of_layer: str
    whole: str = ""

    @property
    def key(self) -> str:
        """The entry of the metadata that describes the file."""
        return f"kvpolicy_{self.prefix}"

    @abstractmethod
    def tensors(self, layer: Layer) -> dict[str, Tensor]:
        """The tensors of a layer by the names of `dims`."""

    @abstractmethod
    def layer(self, parts: dict[str, Tensor]) -> Layer | None:
        """The content of a layer, fp32, from its tensors; None if they do not fit together."""

    @abstractmethod
    def misfit(self, found: Layer | None, model: ModelInfo) -> tuple[str, object] | None:
        """The need of a model and what a layer has instead; None if it fits."""

    def content(self, found: dict[int, Layer] | None, model: dict[str, Any], made: dict[str, Any]) -> Content:
        """See `CalibrationKind`."""
        return self.holds(found or {}, model, made)

    def encode(self, content: Content) -> dict[str, bytes]:
        """See `ModelFile`."""
        told: Any = content
        layers: Mapping[int, Layer] = getattr(content, self.prefix)
        tensors = {
            f"{self.prefix}.{layer}.{name}".removesuffix("."): tensor.detach().cpu().contiguous()
            for layer, found in layers.items()
            for name, tensor in self.tensors(found).items()
        }
        facts = stamp(self.format) | {"model": told.model, "made": told.made}
        facts["sha256"] = digest(facts, tensors)
        return {"": pack_tensors(tensors, {self.key: json.dumps(facts, allow_nan=False)})}

    def parse(self, parts: Sequence[Any], path: str) -> Content:
        """See `ModelFile`."""
        blob = self.read(parts[0], path)
        what = self.named(path)
        tensors = unpack_tensors(blob, what, self.remedy)
        facts = _facts(blob, self.key)
        if facts is None:
            raise self.wrong(path, "be written by kvpolicy", "one that does not say so")
        # Before the hash, which a newer format may compute in another way: the message must name the version.
        check_format(facts, self.format, what)
        check_digest(facts, tensors, what, self.remedy)
        return self.holds(self._layers(tensors, path), facts.get("model"), facts.get("made"))

    def _layers(self, tensors: dict[str, Tensor], path: str) -> dict[int, Layer]:
        """The content of each layer, in order."""
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            prefix, _, rest = name.partition(".")
            layer, _, part = rest.partition(".")
            is_known = prefix == self.prefix and layer.isdecimal() and self.dims.get(part) == tensor.dim()
            if not is_known or not bool(tensor.isfinite().all()):
                got = f"{shorten(name)!r} of the shape {list(tensor.shape)}"
                raise self.wrong(path, f"have finite {self.of_layer} of layers", got)
            parts.setdefault(int(layer), {})[part] = tensor.float()
        found: dict[int, Layer] = {}
        for layer in sorted(parts):
            own = self.layer(parts[layer])
            if own is None:
                shapes = {name: list(parts[layer][name].shape) for name in self.dims if name in parts[layer]}
                raise self.wrong(path, f"have {self.whole}", f"{shapes} in layer {layer}")
            found[layer] = own
        return found

    def check(self, content: Content, path: str, model: ModelInfo) -> None:
        """Refuse a model that a file is not for.

        Args:
            content: The content of the file.
            path: The file as the user wrote it.
            model: The model to check.

        Raises:
            KVPolicyError: If layers, heads or weights differ.
        """
        remedy = f"{self.remedy} on this model"
        told: Any = content
        if told.model is not None:
            check_same_model(told.model, self.named(path), model, remedy=remedy)
        for layer_idx in model.indices:
            found = getattr(content, self.prefix).get(layer_idx)
            misfit = self.misfit(found, model)
            if misfit is not None:
                needed, got = misfit
                got = f"{'none' if found is None else got} in layer {layer_idx}"
                raise self.wrong(path, f"have {needed}, as the model has", got, remedy)


def _facts(blob: bytes, key: str) -> dict[str, Any] | None:
    """The description of a file that safetensors can read; None if it has none."""
    start = 8  # `load` returns no metadata; they follow the length of the header
    header: Any = json.loads(blob[start : start + int.from_bytes(blob[:start], "little")])
    try:
        facts: Any = json.loads((header.get("__metadata__") or {}).get(key, "null"))
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", facts) if isinstance(facts, dict) else None

"""Filter files: a vector for each KV head of a model, with which the keys of its tokens are multiplied.

A file is in the format of `tensor_files`, described by the entry `kvpolicy_filters`. The tensor `filters.0` has the
filters of layer 0, [H, D] fp32, or [1, D] for all heads of the layer; a layer that no policy manages has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.tensor_files import TensorFile


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


class _Filters(TensorFile[FilterFile, Tensor]):
    noun = "filter file"
    command = "kvpolicy calibrate qfilters"
    asset = "qfilters.safetensors"
    prefix = "filters"
    dims: ClassVar = {"": 2}
    of_layer = "filters [H, D]"
    holds = FilterFile

    def tensors(self, layer: Tensor) -> dict[str, Tensor]:
        return {"": layer}

    def layer(self, parts: dict[str, Tensor]) -> Tensor:
        return parts[""]

    def misfit(self, found: Tensor | None, model: ModelInfo) -> tuple[str, object] | None:
        shape = [0, 0] if found is None else list(found.shape)
        if shape[0] in (1, model.heads) and shape[1] == model.head_dim:
            return None
        return f"filters for {model.heads} KV heads of dimension {model.head_dim}", shape


FILTER_FILES = _Filters()

"""Center files: where the queries of each query head of a model lie before the rotary embedding.

A file is in the format of `tensor_files`, described by the entry `kvpolicy_centers`. Layer 0 has the tensors
`centers.0.mean` [Hq, D], the mean query of each query head without its rotation, and `centers.0.lengths` [Hq, F], the
mean length of its queries in each of the F planes that the embedding rotates, as attention takes them; or [1, D] and
[1, F] for all heads; all fp32. A layer that no policy manages has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.selectors.tensor_files import TensorFile


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


class _Centers(TensorFile[CenterFile, Centers]):
    noun = "center file"
    command = "kvpolicy calibrate triattention"
    asset = "triattention.safetensors"
    holds = CenterFile
    prefix = "centers"
    dims: ClassVar = {"mean": 2, "lengths": 2}
    of_layer = "means [Hq, D] and lengths [Hq, F]"
    whole = "a mean and lengths of every query head of a layer"

    def tensors(self, layer: Centers) -> dict[str, Tensor]:
        return layer._asdict()

    def layer(self, parts: dict[str, Tensor]) -> Centers | None:
        fits = len(parts) == len(self.dims) and len(parts["mean"]) == len(parts["lengths"])
        return Centers(**parts) if fits else None

    def misfit(self, found: Centers | None, model: ModelInfo) -> tuple[str, object] | None:
        heads, dim = (0, 0) if found is None else found.mean.shape
        if heads and (heads == 1 or heads % model.heads == 0) and dim == model.head_dim:
            return None
        needed = f"centers for the query heads of {model.heads} KV heads of dimension {model.head_dim}"
        return needed, [heads, dim]


CENTER_FILES = _Centers()

"""Gate files: for each layer of a model, what scores a token by the input of the layer, once for each KV head.

A file is in the format of `tensor_files`, described by the entry `kvpolicy_gates`. Layer 0 has the tensors
`gates.0.weight` [H, n] and `gates.0.bias` [H], or [1, n] and [1] for all heads, all fp32: n is the hidden size of the
model. A gate with one hidden layer of n units has `gates.0.inner_weight` [n, hidden] and `gates.0.inner_bias` [n] too.
A layer that no policy manages has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import ALL_HEADS, ModelInfo
from kvpolicy.selectors.tensor_files import TensorFile
from kvpolicy.text.model_file import without_name


class Inner(NamedTuple):
    """The hidden layer of a gate, of n units.

    Attributes:
        weight: [n, hidden] fp32.
        bias: [n] fp32.
    """

    weight: Tensor
    bias: Tensor


class LayerGate(NamedTuple):
    """The function that scores the tokens of one layer.

    Attributes:
        weight: For each KV head, [H, n] fp32, or [1, n] for all heads: n units of the hidden layer, or the hidden size
            of the model.
        bias: [H] fp32, or [1].
        inner: The hidden layer; the empty tuple if scores are linear in the input.
    """

    weight: Tensor
    bias: Tensor
    inner: Inner | tuple[()] = ()

    @property
    def hidden(self) -> int:
        """The hidden size of the model."""
        return (self.inner.weight if isinstance(self.inner, Inner) else self.weight).shape[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGate:
        """The gate itself: copies of a cache share what belongs to the model."""
        return self

    def score(self, inputs: Tensor) -> Tensor:
        """The scores of tokens by their inputs [B, T, hidden], of any dtype: [B, H or 1, T] fp32."""
        units = inputs
        if isinstance(self.inner, Inner):
            units = F.gelu(F.linear(inputs.float(), *self.inner))
        # In fp64: in the first layer, a word has the same input wherever it stands. Its scores must be equal for ties
        # to go to the earlier token, and the rounding of an fp32 product depends on the tokens that come with it.
        return F.linear(units.double(), self.weight.double(), self.bias.double()).float().transpose(1, 2)

    def of_heads(self, heads: slice = ALL_HEADS) -> LayerGate:
        """The gate of some KV heads."""
        if len(self.bias) == 1:  # all heads share it
            return self
        return self._replace(weight=self.weight[heads], bias=self.bias[heads])

    def to(self, device: torch.device | str) -> LayerGate:
        """Move to a device."""
        inner = Inner(*(t.to(device) for t in self.inner)) if isinstance(self.inner, Inner) else ()
        return LayerGate(self.weight.to(device), self.bias.to(device), inner)


@dataclass(frozen=True, eq=False)
class GateFile:
    """The content of a gate file. It is shared by all callers that load it and must not be modified.

    Attributes:
        gates: The gate of each layer, on the CPU, by the index of the layer.
        model: The model that the file is for, as in other calibrations; None if the file does not say.
        made: How the file was made: the text, its options, and how well the gates fit.
    """

    gates: Mapping[int, LayerGate]
    model: dict[str, Any] | None = None
    made: dict[str, Any] | None = None


class _Gates(TensorFile[GateFile, LayerGate]):
    noun = "gate file"
    command = "kvpolicy calibrate gate"
    asset = "kvzap.safetensors"
    holds = GateFile
    prefix = "gates"
    dims: ClassVar = {"weight": 2, "bias": 1, "inner_weight": 2, "inner_bias": 1}
    of_layer = "weights and biases"
    whole = (
        "a weight [H, n] and a bias [H] in each layer, and for n hidden units an inner weight [n, hidden] and an inner "
        "bias [n]"
    )

    def tensors(self, layer: LayerGate) -> dict[str, Tensor]:
        inner = layer.inner._asdict() if isinstance(layer.inner, Inner) else {}
        found = {"weight": layer.weight, "bias": layer.bias} | {f"inner_{name}": t for name, t in inner.items()}
        return {name: tensor.float() for name, tensor in found.items()}

    def layer(self, parts: dict[str, Tensor]) -> LayerGate | None:
        shapes = {name: list(tensor.shape) for name, tensor in parts.items()}
        heads, units = shapes.get("weight", (0, 0))
        fits = shapes.get("bias") == [heads] and heads > 0
        if "inner_weight" in parts or "inner_bias" in parts:
            fits = fits and shapes.get("inner_bias") == [units] and shapes.get("inner_weight", [0])[0] == units
        if not fits:
            return None
        inner = Inner(parts["inner_weight"], parts["inner_bias"]) if "inner_bias" in parts else ()
        return LayerGate(parts["weight"], parts["bias"], inner)

    def misfit(self, found: LayerGate | None, model: ModelInfo) -> tuple[str, object] | None:
        heads, hidden = (0, 0) if found is None else (found.bias.shape[0], found.hidden)
        if heads in (1, model.heads) and model.hidden in (0, hidden):
            return None
        needed = f"gates of {model.heads} KV heads and the hidden size {model.hidden or hidden or 'of the model'}"
        return needed, f"{heads} KV heads and {hidden}"

    def compared(self, content: GateFile) -> object:
        """Nor is how well the gates fit, which is known afterwards."""
        return without_name(content.model), {key: value for key, value in (content.made or {}).items() if key != "r2"}


GATE_FILES = _Gates()

"""Gate files: for each layer of a model, what scores a token by the input of the layer, once for each KV head.

A file is in the format of `tensor_files`, described by the entry `kvpolicy_gates`. Layer 0 has the tensors
`gates.0.weight` [H, n] and `gates.0.bias` [H], or [1, n] and [1] for all heads, all fp32: n is the hidden size of the
model. A gate with one hidden layer of n units has `gates.0.inner_weight` [n, hidden] and `gates.0.inner_bias` [n] too.
A layer that no policy manages has none of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpolicy.protocols import ALL_HEADS, ModelInfo
from kvpolicy.selectors.tensor_files import FileKind, Parsed
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten

KEY = "kvpolicy_gates"
"""The entry of the metadata that describes the file."""

_PREFIX = "gates."
_PARTS = {"weight": 2, "bias": 1, "inner_weight": 2, "inner_bias": 1}
"""The tensors of a gate, and how many dimensions each has."""


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
        """The same on a device."""
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


def save_gates(path: str | os.PathLike[str], content: GateFile) -> None:
    """Write a gate file in the format of this module; an existing file is replaced.

    Args:
        path: The file.
        content: Its content.

    Raises:
        KVPolicyError: If the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for layer, gate in content.gates.items():
        tensors |= {f"{_PREFIX}{layer}.weight": gate.weight, f"{_PREFIX}{layer}.bias": gate.bias}
        if isinstance(gate.inner, Inner):
            tensors |= {f"{_PREFIX}{layer}.inner_{name}": t for name, t in gate.inner._asdict().items()}
    GATES.save(path, Parsed({name: tensor.float() for name, tensor in tensors.items()}, content.model, content.made))


def load_gates(path: str) -> GateFile:
    """Read a gate file; it is read again only after it has changed.

    Args:
        path: The file, or the name of an embedded model, `tiny` or `tiny-4k`, whose file is part of the package.

    Raises:
        KVPolicyError: If it cannot be read, is no gate file, or was edited or damaged.

    Examples:
        >>> load_gates("tiny").gates[0].weight.shape
        torch.Size([4, 128])
    """
    return GATES.load(path)


def check_gates(content: GateFile, path: str, model: ModelInfo) -> None:
    """Refuse a model that a gate file is not for.

    Args:
        content: The content of the file.
        path: The file as the user wrote it.
        model: The model to check.

    Raises:
        KVPolicyError: If layers, heads, the hidden size or weights differ.
    """
    GATES.check_model(path, content.model, model)
    for layer_idx in model.indices:
        gate = content.gates.get(layer_idx)
        hidden = 0 if gate is None else gate.hidden
        if gate is None or gate.bias.shape[0] not in (1, model.heads) or model.hidden not in (0, hidden):
            got = "none" if gate is None else f"{gate.bias.shape[0]} KV heads and {hidden}"
            raise KVPolicyError(
                f"{GATES.named(path)} must have gates of {model.heads} KV heads and the hidden size "
                f"{model.hidden or hidden or 'of the model'}, as the model has, got {got} in layer {layer_idx}; "
                f"{GATES.remedy} on this model."
            )


def _content(parsed: Parsed, path: str) -> GateFile:
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parsed.tensors.items():
        layer, _, part = name.removeprefix(_PREFIX).partition(".")
        known = name.startswith(_PREFIX) and layer.isdecimal() and _PARTS.get(part) == tensor.dim()
        if not known or not bool(tensor.isfinite().all()):
            raise KVPolicyError(
                f"{GATES.named(path)} must have finite weights and biases of layers, got {shorten(name)!r} of the "
                f"shape {list(tensor.shape)}; {GATES.remedy}."
            )
        layers.setdefault(int(layer), {})[part] = tensor.float()
    return GateFile({layer: _gate(layers[layer], layer, path) for layer in sorted(layers)}, parsed.model, parsed.made)


def _gate(parts: dict[str, Tensor], layer: int, path: str) -> LayerGate:
    """The gate of a layer, of tensors that fit together."""
    shapes = {name: list(parts[name].shape) for name in _PARTS if name in parts}
    heads, units = (*parts["weight"].shape,) if "weight" in parts else (0, 0)
    fits = shapes.get("bias") == [heads] and heads > 0
    if "inner_weight" in parts or "inner_bias" in parts:
        fits = fits and shapes.get("inner_bias") == [units] and shapes.get("inner_weight", [0])[0] == units
    if not fits:
        raise KVPolicyError(
            f"{GATES.named(path)} must have a weight [H, n] and a bias [H] in each layer, and for n hidden units an "
            f"inner weight [n, hidden] and an inner bias [n], got {shapes} in layer {layer}; {GATES.remedy}."
        )
    inner = Inner(parts["inner_weight"], parts["inner_bias"]) if "inner_bias" in parts else ()
    return LayerGate(parts["weight"], parts["bias"], inner)


GATES: FileKind[GateFile] = FileKind("gate file", KEY, "kvzap.safetensors", "kvpolicy calibrate gate", _content)

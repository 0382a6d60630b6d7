"""Tokens whose gate, which a file has, is highest at the input of the layer."""

from __future__ import annotations

import functools
import math

from safetensors.torch import load_file
from torch import Tensor

from ..coding import Config
from ._common import kept_if_newest

DEFAULTS: Config = {"file": "", "window": 128}
"""Without a file, all tokens are worth the same."""
SMALL = "kvzap:file=FOLDER/kvzap/gate.safetensors:window=3"


def priority(config: Config, position: int, score: complex, length: int, budget: int) -> float:
    """The score; the newest tokens stay, at most as many as half the budget, and always one."""
    return kept_if_newest(score.real, position, length, max(min(config["window"], budget // 2), 1))


def scores_of_inputs(config: Config, inputs: Tensor | None, layer: int, head: int) -> list[complex] | None:
    """The score of each token by the input of the layer at it."""
    if not config["file"]:
        return None
    assert inputs is not None, "this selector looks at the input of the layer"
    gate = gate_of(config["file"], layer)
    return [complex(scored(gate, vector, head)) for vector in inputs.double().tolist()]


def scored(gate: dict[str, list[list[float]] | list[float]], vector: list[float], head: int) -> float:
    """One number: a linear map, or one behind a hidden layer with GELU."""
    if "inner_weight" in gate:
        units = [
            sum(w * x for w, x in zip(row, vector, strict=True)) + bias  # pyright: ignore[reportArgumentType, reportOperatorIssue]
            for row, bias in zip(gate["inner_weight"], gate["inner_bias"], strict=True)
        ]
        vector = [x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in units]
    weight = gate["weight"]
    bias = gate["bias"]
    own = head if len(bias) > 1 else 0
    return sum(w * x for w, x in zip(weight[own], vector, strict=True)) + bias[own]  # pyright: ignore[reportArgumentType, reportOperatorIssue]


@functools.cache
def gate_of(file: str, layer: int) -> dict[str, list[list[float]] | list[float]]:
    """The tensors of a layer in a file, by the ends of their names."""
    tensors = load_file(file)
    mine = f"gates.{layer}."
    return {name.removeprefix(mine): tensor.double().tolist() for name, tensor in tensors.items() if mine in name}

"""Calibrations that fit tiny models of a head dimension of 8, random but fixed, whatever their number of heads."""

from __future__ import annotations

import functools
import getpass
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.codecs._files import save
from kvpolicy.codecs.rotation import mix
from kvpolicy.selectors.center_files import CENTER_FILES, CenterFile, Centers
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, Inner, LayerGate
from tests.reference.codecs import Calibration

DIM = 8
LAYERS = 6
HIDDEN = 32
"""Hidden size of the models."""
DEEPEST = 8
"""Layers of the deepest model that meets every selector."""


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _csr() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Dictionaries that the even and the odd layers share."""
    widths = {"keys.pre": DIM, "keys.post": DIM, **{f"values.sn{sn}": DIM // sn for sn in (1, 2, 4)}}
    groups = {name: [[*range(0, LAYERS, 2)], [*range(1, LAYERS, 2)]] for name in widths}
    tensors = {
        f"{name}.{group}": torch.nn.functional.normalize(_random(width, 24 - group, seed=width + group), dim=0).half()
        for name, width in widths.items()
        for group in (0, 1)
    }
    return {"groups": groups}, tensors


def _kvquant() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Ranges of channels, and levels that are not even."""
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        tensors[f"keys.offset.{layer}"] = _random(1, DIM, seed=layer) / 4
        tensors[f"keys.range.{layer}"] = 1.5 + _random(1, DIM, seed=layer + 10).abs()
        for bits in (2, 3, 4):
            even = torch.linspace(-1, 1, 2**bits)
            for side, bend in (("keys", 0.6), ("values", 0.3)):
                tensors[f"{side}.levels.b{bits}.{layer}"] = even**3 * bend + even * (1 - bend)
                tensors[f"{side}.norm.b{bits}.{layer}"] = torch.tensor([1 + bend / 8, bend / 16])
    return {}, tensors


def _lowrank() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Bases that all heads share, with more energy in the first directions."""
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for number, part in enumerate(("keys.pre", "keys.post", "values", "queries")):
            seed = 400 + 4 * layer + number
            tensors[f"{part}.basis.{layer}"] = torch.linalg.qr(_random(1, DIM, DIM, seed=seed)).Q.half()
            falls = 0.6 - 0.08 * (layer % 4)
            tensors[f"{part}.energy.{layer}"] = 4 * falls ** torch.arange(DIM)[None] + 0.01 * (number + 1)
            if part != "queries":
                tensors[f"{part}.mean.{layer}"] = _random(1, DIM, seed=seed + 100) / 4
    return {}, tensors


def _oscar() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rotations that all heads share."""
    return {}, {
        f"{side}.rotation.{layer}": torch.linalg.qr(_random(1, DIM, DIM, seed=700 + 2 * layer + number)).Q
        for layer in range(LAYERS)
        for number, side in enumerate(("keys", "values"))
    }


_MADE = {"csr": _csr, "kvquant": _kvquant, "lowrank": _lowrank, "oscar": _oscar}


def filters(heads: int = 1) -> FilterFile:
    """A filter for each head, or one that all heads share."""
    return FilterFile({layer: _random(heads, DIM, seed=layer + 20) for layer in range(DEEPEST)})


def gates(heads: int = 1, hidden: int = HIDDEN) -> GateFile:
    """A gate for each head, or one that all heads share; every other one has a hidden layer."""
    found: dict[int, LayerGate] = {}
    for layer in range(DEEPEST):
        seed = 4 * layer + 100
        units = 5 if layer % 2 else hidden
        inner = Inner(_random(units, hidden, seed=seed + 2), _random(units, seed=seed + 3)) if layer % 2 else ()
        found[layer] = LayerGate(_random(heads, units, seed=seed), _random(heads, seed=seed + 1), inner)
    return GateFile(found)


def centers(heads: int = 1) -> CenterFile:
    """The mean query of each query head, or one that all heads share, in as many planes as a model has."""
    found = {layer: _random(2 * heads, DIM, seed=layer + 300).chunk(2) for layer in range(DEEPEST)}
    return CenterFile({layer: Centers(mean, other[:, :1].abs() * 3) for layer, (mean, other) in found.items()})


FOLDER = Path(tempfile.gettempdir()) / f"kvpolicy-tests-{getpass.getuser()}"
"""Where calibrations are; it has the same name in every run and every process, since names of tests have it."""


@functools.cache
def write(method: str) -> Path:
    """Write the calibration of a method into its folder, once."""
    path = FOLDER / method
    if method == "qfilters":
        FILTER_FILES.save(path / "filters.safetensors", filters())
        return path
    if method == "triattention":
        CENTER_FILES.save(path / "centers.safetensors", centers())
        return path
    if method == "kvzap":
        GATE_FILES.save(path / "gate.safetensors", gates())
        return path
    meta, tensors = _MADE[method]()
    save(path, method, {"model": None, "head_dim": DIM, **meta}, tensors)
    return path


def calibration(method: str, layer: int, seed: int = 0) -> Calibration:
    """What the reference needs to know of a layer's calibration."""
    if method == "turboquant":  # whose signs are any
        return {"signs": mix(torch.eye(DIM), seed)[:, 0].sign()}
    if method not in _MADE:
        return {}
    meta, tensors = _MADE[method]()
    if method in ("kvquant", "lowrank", "oscar"):
        return {name.rpartition(".")[0]: t for name, t in tensors.items() if name.endswith(f".{layer}")}
    return {name: tensors[f"{name}.{layer % 2}"] for name in meta["groups"]}

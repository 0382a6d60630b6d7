"""Calibrations and a profile on disk, random but fixed, for models of three policy layers and a head dimension of 8.

They are written byte by byte as the formats of these files say, so that no code of the package takes part.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

DIM = 8
LAYERS = 6
HIDDEN = 32


def write_files(folder: Path) -> None:
    """Write `csr`, `kvquant`, `qfilters`, `kvzap` and `profile.json` into a folder."""
    _write_calibration(folder / "csr", "csr", *_csr())
    _write_calibration(folder / "kvquant", "kvquant", *_kvquant())
    _write_filters(folder / "qfilters" / "filters.safetensors")
    _write_gates(folder / "kvzap" / "gate.safetensors")
    profile = {"format": 1, "kvpolicy": "0", "model": "golden", "layers": 3, "cosine": [0.2, 0.9, 0.5]}
    (folder / "profile.json").write_text(json.dumps(profile), encoding="utf-8")


def _write_calibration(folder: Path, method: str, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    blob = save({name: t.contiguous() for name, t in tensors.items()})
    facts: dict[str, Any] = {
        "format": 1,
        "kvpolicy": "0",
        "method": method,
        "tensors_sha256": hashlib.sha256(blob).hexdigest(),
        "meta": {"model": None, "head_dim": DIM, **meta},
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    facts["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "tensors.safetensors").write_bytes(blob)
    (folder / "calibration.json").write_text(json.dumps(facts), encoding="utf-8")


def _write_filters(path: Path) -> None:
    """A filter in each layer that all heads share."""
    _write_tensors(path, {f"filters.{layer}": _random(1, DIM, seed=layer + 20) for layer in range(LAYERS)}, "filters")


def _write_gates(path: Path) -> None:
    """A gate in each layer that all heads share, without a hidden layer."""
    weights = {f"gates.{layer}.weight": _random(1, HIDDEN, seed=layer + 100) for layer in range(LAYERS)}
    biases = {f"gates.{layer}.bias": _random(1, seed=layer + 200) for layer in range(LAYERS)}
    _write_tensors(path, weights | biases, "gates")


def _write_tensors(path: Path, tensors: dict[str, Tensor], kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    facts: dict[str, Any] = {"format": 1, "kvpolicy": "0", "model": None, "made": None}
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} torch.float32 {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    metadata = {f"kvpolicy_{kind}": json.dumps(facts | {"sha256": found.hexdigest()})}
    path.write_bytes(save(tensors, metadata=metadata))


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _csr() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One dictionary for the even layers and one for the odd ones."""
    widths = {"keys.pre": DIM, "keys.post": DIM, **{f"values.sn{sn}": DIM // sn for sn in (1, 2, 4)}}
    groups = {name: [[*range(0, LAYERS, 2)], [*range(1, LAYERS, 2)]] for name in widths}
    tensors = {
        f"{name}.{group}": torch.nn.functional.normalize(_random(width, 24 - group, seed=width + group), dim=0).half()
        for name, width in widths.items()
        for group in (0, 1)
    }
    return {"groups": groups}, tensors


def _kvquant() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Ranges of channels, and levels that are not uniform."""
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

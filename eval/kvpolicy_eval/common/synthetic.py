"""Configs and calibrations without a real model, for measurements in which only sizes and speed count."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from kvpolicy import CSR, OSCAR, KVQuant, LowRank
from kvpolicy.codecs._files import save
from kvpolicy.protocols import Codec

LEVELS = (2, 3, 4)
"""Bits for which `KVQuant` has calibrated levels."""


def one_layer_config(heads: int, head_dim: int, layers: int = 1) -> Any:
    """Config of a Llama with one layer.

    Args:
        heads: KV heads, and as many query heads.
        head_dim: Size of a head.
        layers: Layers, for codecs that need several.
    """
    return LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=heads * head_dim,
        head_dim=head_dim,
    )


def with_random_calibration(
    codec: Codec, folder: Path, heads: int, head_dim: int, atoms: int | None = None, layers: int = 1
) -> Codec:
    """The same codec with random calibrated tensors, if it needs any.

    Args:
        codec: Any codec.
        folder: Existing folder, to which the tensors are written.
        heads: KV heads.
        head_dim: Size of a head.
        atoms: Atoms of CSR's dictionaries; 256 per head by default, as in the paper.
        layers: Layers of the model; they share CSR's dictionaries.
    """
    generator = torch.Generator().manual_seed(0)
    meta = {"model": None, "head_dim": head_dim}
    if isinstance(codec, CSR):
        count = atoms or 256 * heads
        names = {"keys.pre": head_dim, "keys.post": head_dim} | {f"values.sn{sn}": head_dim // sn for sn in (1, 2, 4)}
        tensors = {
            f"{name}.0": torch.nn.functional.normalize(torch.randn(width, count, generator=generator), dim=0).half()
            for name, width in names.items()
        }
        save(str(folder / "csr"), "csr", meta | {"groups": {name: [list(range(layers))] for name in names}}, tensors)
        return dataclasses.replace(codec, dictionary=str(folder / "csr"))
    if isinstance(codec, KVQuant):
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(layers):
            tensors[f"keys.offset.{layer}"] = torch.zeros(1, head_dim)
            tensors[f"keys.range.{layer}"] = torch.full((1, head_dim), 3.0)
            for side in ("keys", "values"):
                for bits in LEVELS:
                    tensors[f"{side}.levels.b{bits}.{layer}"] = torch.linspace(-1, 1, 2**bits)
                    tensors[f"{side}.norm.b{bits}.{layer}"] = torch.tensor([1.0, 0.0])
        save(str(folder / "kvquant"), "kvquant", meta, tensors)
        return dataclasses.replace(codec, calibration=str(folder / "kvquant"))
    if isinstance(codec, OSCAR):
        tensors = {
            f"{side}.rotation.{layer}": torch.linalg.qr(torch.randn(1, head_dim, head_dim, generator=generator)).Q
            for layer in range(layers)
            for side in ("keys", "values")
        }
        save(str(folder / "oscar"), "oscar", meta, tensors)
        return dataclasses.replace(codec, calibration=str(folder / "oscar"))
    if isinstance(codec, LowRank):
        tensors = {}
        for layer in range(layers):
            for part in ("keys.pre", "keys.post", "values", "queries"):
                basis = torch.linalg.qr(torch.randn(1, head_dim, head_dim, generator=generator)).Q
                tensors[f"{part}.basis.{layer}"] = basis.half()
                tensors[f"{part}.energy.{layer}"] = torch.linspace(2, 1, head_dim)[None]
                tensors[f"{part}.mean.{layer}"] = torch.zeros(1, head_dim)
        save(str(folder / "lowrank"), "lowrank", meta, tensors)
        return dataclasses.replace(codec, calibration=str(folder / "lowrank"))
    return codec

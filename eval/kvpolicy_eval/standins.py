"""Calibrations of random numbers, for shapes that no calibrated model at hand has: right for size and speed alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from kvpolicy import CSR, KVQuant
from kvpolicy.codecs._files import save
from kvpolicy.protocols import Codec

LEVELS = (2, 3, 4)


def stand_in(codec: Codec, folder: Path, heads: int, head_dim: int, atoms: int | None = None, layers: int = 1) -> Codec:
    """The same codec with random calibrated tensors where it needs some.

    Args:
        codec: Any codec.
        folder: Where to write, an existing folder.
        heads: KV heads.
        head_dim: Numbers of a key.
        atoms: Of CSR's dictionaries; 256 for each head by default, as in the paper.
        layers: Of the model; they share CSR's dictionaries.
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
    return codec

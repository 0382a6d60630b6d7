"""Dictionaries, tokens and a rope for tests of CSR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.codecs._files import save
from kvpolicy.codecs.csr.csr import CSR, CSRCodes
from kvpolicy.protocols import At, StageStore

B = 2
H = 3
G = 2
C = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write_dictionaries(path: Path) -> Path:
    """Random dictionaries of several head dimensions; layers 1 and 2 share theirs."""
    for dim in (16, 32, 128):
        sides = {"keys.pre": dim, "keys.post": dim, **{f"values.sn{sn}": dim // sn for sn in (1, 2, 4)}}
        groups = {name: [[0], [1, 2]] for name in sides} | {"values.sn4": [[0, 1, 2, 3]]}
        tensors = {
            f"{name}.{j}": torch.nn.functional.normalize(normal(width, 50 + 20 * j, seed=j), dim=0).half()
            for name, width in sides.items()
            for j in range(len(groups[name]))
        }
        save(path / str(dim), "csr", {"model": None, "head_dim": dim, "groups": groups}, tensors)
    return path


def made(folder: Path, dim: int = 16, window: int = 2, layer_idx: int = 0, **fields: Any) -> tuple[CSR, StageStore]:
    fields = {"prompt_atoms": window, "residual_length": 0, "block_size": 4, **fields}
    csr = CSR(dictionary=str(folder / str(dim)), **fields)
    atoms = (normal(B, H, window, dim, seed=90), normal(B, H, window, dim, seed=91)) if window else None
    return csr, StageStore(csr.alloc(B, H, C, dim, "cpu"), csr.load_calibration(layer_idx, "cpu"), atoms)


def at(*slots: int) -> Tensor:
    return torch.tensor(slots).expand(B, H, -1)


def flags(*values: bool) -> Tensor:
    return torch.tensor(values).expand(B, H, -1)


def tokens(count: int, dim: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(B, H, count, dim, seed=10 + seed), normal(B, H, count, dim, seed=50 + seed) * 3


def none_occupied() -> Tensor:
    return torch.zeros(B, H, C, dtype=torch.bool)


def write_all(csr: CSR, store: StageStore, keys: Tensor, values: Tensor) -> None:
    count = keys.shape[2]
    csr.write(store, keys, values, at(*range(count)), flags(*[True] * count), none_occupied())


def copy(store: StageStore) -> StageStore:
    return store._replace(codes=CSRCodes(*(part.clone() for part in store.codes)))


def part(store: StageStore, b: slice, h: slice) -> StageStore:
    """Some rows and KV heads, as if they were alone."""
    atoms = None if store.atoms is None else (store.atoms[0][b, h], store.atoms[1][b, h])
    return StageStore(CSRCodes(*(codes[b, h].clone() for codes in store.codes)), store.calibration, atoms)


def same(one: StageStore, other: StageStore) -> bool:
    return all(map(torch.equal, one.codes, other.codes))


class Quarter:
    """A rope that swaps the halves of a key by a token's place, as a rotary embedding does."""

    def __init__(self, slots: int, dim: int, held: int | None = None) -> None:
        self.occupied = (torch.arange(slots) < (slots if held is None else held)).expand(B, H, -1)
        self.angle = torch.linspace(0, 2, slots).expand(B, H, -1)
        self.half = dim // 2

    def _turned(self, x: Tensor, angle: Tensor) -> Tensor:
        one, two = x.split(self.half, -1)
        cos = angle.cos()[..., None]
        sin = angle.sin()[..., None]
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    def keys(self, keys: Tensor, at: At) -> Tensor:
        return self._turned(keys, self.angle[..., at] if isinstance(at, slice) else self.angle.gather(-1, at))

    def queries(self, queries: Tensor, distance: int) -> Tensor:
        return self._turned(queries, torch.full(queries.shape[:3], -float(distance)))

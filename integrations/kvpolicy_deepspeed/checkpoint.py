"""Checkpoints of safetensors, read file by file, and each tensor only in part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.text.errors import KVPolicyError

INDEX = "model.safetensors.index.json"
PATTERNS = ["*.json", "*.safetensors"]
Take = Callable[..., Tensor]


class Piece(NamedTuple):
    """A tensor of a checkpoint, which is read when it is needed.

    Attributes:
        shape: The shape of the whole tensor.
        take: Reads the slice of an index (a tuple of slices), or the whole tensor without one.
    """

    shape: tuple[int, ...]
    take: Take


class Checkpoint(NamedTuple):
    """The safetensors files of a model.

    Attributes:
        folder: The folder of the checkpoint.
        files: The files, in order.
    """

    folder: Path
    files: tuple[Path, ...]

    @classmethod
    def find(cls, path: str) -> Checkpoint:
        """Find the files of a model in a folder, or by its name on the Hub.

        Raises:
            KVPolicyError: If a safetensors file is missing.
        """
        folder = Path(path)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(path, allow_patterns=PATTERNS, ignore_patterns=["*/*"]))
        index = folder / INDEX
        if index.exists():
            names: Sequence[str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = tuple(folder / name for name in sorted(set(names)))
        else:
            files = (folder / "model.safetensors",)
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise KVPolicyError(
                f"The checkpoint {path} must be complete and in safetensors, got one without {missing[0]}; try "
                "converting it with save_pretrained of transformers, or downloading the missing file."
            )
        return cls(folder, files)

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Yield the name of each tensor and the tensor, with one file open at a time."""
        for file in self.files:
            with _open(file) as handle:
                for key in handle.keys():  # noqa: SIM118 (not a mapping)
                    lazy = handle.get_slice(key)
                    yield key, Piece(tuple(lazy.get_shape()), _taker(lazy, handle, key))

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point tensor."""
        for _, piece in self.pieces():
            one = piece.take(*(slice(0, 1) for _ in piece.shape))
            if one.is_floating_point():
                return one.dtype
        return torch.float32


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt", device="cpu")


def _taker(lazy: Any, handle: Any, key: str) -> Take:
    def take(*index: slice) -> Tensor:
        return lazy[index] if index else handle.get_tensor(key)

    return take


def of_tensors(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Piece]]:
    """Yield tensors in memory like those of a checkpoint; each is removed from `tensors`, so that it can be freed."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        yield name, Piece(tuple(tensor.shape), _picker(tensor))


def _picker(tensor: Tensor) -> Take:
    def take(*index: slice) -> Tensor:
        return tensor[index]

    return take

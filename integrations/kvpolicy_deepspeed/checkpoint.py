"""Reading a checkpoint file by file, and of each tensor only what is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError

INDEX = "model.safetensors.index.json"
PATTERNS = ["*.json", "*.safetensors"]
Take = Callable[..., Tensor]


class Piece(NamedTuple):
    """A tensor that is read in part.

    Attributes:
        shape: Of the whole.
        take: Read what an index (a tuple of slices) asks for.
    """

    shape: tuple[int, ...]
    take: Take


class Checkpoint(NamedTuple):
    """A model's tensors in safetensors files.

    Attributes:
        folder: Where it is.
        files: The files, in order.
    """

    folder: Path
    files: tuple[Path, ...]

    @classmethod
    def find(cls, path: str) -> Checkpoint:
        """Find a model's files: in a folder, or by its name on the hub.

        Raises:
            KVPolicyError: Where there are no safetensors.
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
                f"{path} has no {missing[0]}, and only safetensors are read: convert the checkpoint with "
                "transformers' save_pretrained, or download the missing file."
            )
        return cls(folder, files)

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Every tensor by its name, one file open at a time."""
        for file in self.files:
            with _open(file) as handle:
                for key in handle.keys():  # noqa: SIM118 (no mapping)
                    lazy = handle.get_slice(key)
                    yield key, Piece(tuple(lazy.get_shape()), _taker(lazy, handle, key))

    def dtype(self) -> torch.dtype:
        """Of the first floating-point tensor."""
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
    """Tensors in memory, as a checkpoint gives them; each is let go once it was read."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        yield name, Piece(tuple(tensor.shape), _picker(tensor))


def _picker(tensor: Tensor) -> Take:
    def take(*index: slice) -> Tensor:
        return tensor[index]

    return take

"""Files of saved caches: a header and tensors in one safetensors file, verified whenever it is read.

The header is JSON in the metadata of the file. A hash covers the header and every tensor, so that a file that was
truncated or edited is refused. Nothing in a file is executed: there is no pickle in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.engine.state import owned
from kvpolicy.hf.cache_header import FORMAT, KEY, header_of, not_as_written, reading
from kvpolicy.hf.file_header import check_header
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.formats import replacing, stamp

TOKENS = "tokens"
"""The name of the token ids in a file, [B, N] int64."""

COMPRESSIONS = (None, "zlib")
"""Accepted values of the argument `compress`."""

MOST_INFLATED = 512
"""Bytes that the compressed tensors of a file may become, for each byte of the file.

A slot without a token compresses to nearly nothing, but its position is stored as it is, in 4 bytes, so that the codes
of a head dimension of up to 1,024 at 8 bits are within it.
"""


class CacheFile(NamedTuple):
    """The content of a file.

    Attributes:
        header: The description of the cache by `saved_cache`.
        tensors: Its tensors by name, on the CPU.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def rank_path(path: str | os.PathLike[str], rank: int, size: int) -> Path:
    """The file of one rank: the path itself, or one numbered as transformers numbers the shards of a checkpoint.

    Raises:
        KVPolicyTypeError: If it is no path.

    Examples:
        >>> rank_path("a/doc.safetensors", 0, 2).name
        'doc-00001-of-00002.safetensors'
    """
    if not isinstance(path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise KVPolicyTypeError(
            f"The path of a cache file must be a string or a Path, got {type(path).__name__}; try 'cache.safetensors'."
        )
    whole = Path(path).expanduser()
    return whole if size == 1 else whole.with_name(f"{whole.stem}-{rank + 1:05}-of-{size:05}{whole.suffix}")


def write(path: Path, content: CacheFile, compress: str | None = None) -> None:
    """Write a file atomically.

    Args:
        path: The file, which is replaced if it exists.
        content: The content to write.
        compress: `zlib` to compress the tensors of codes.

    Raises:
        KVPolicyError: If `compress` is unknown, the path is a folder, its folder does not exist, or a field of the
            header is of another kind.
    """
    from safetensors.torch import save_file

    if compress not in COMPRESSIONS:
        raise KVPolicyError(f"compress must be one of {', '.join(map(repr, COMPRESSIONS))}, got {compress!r}.")
    if path.is_dir():
        raise KVPolicyError(
            f"A cache file must be a file, got the folder {str(path)!r}; try {path / 'cache.safetensors'}."
        )
    if not path.parent.is_dir():
        raise KVPolicyError(f"The folder of a cache file must exist, got {str(path)!r}; try creating {path.parent}.")
    tensors = {name: _plain(tensor) for name, tensor in content.tensors.items()}
    packed, small = _pack(tensors) if compress else ({}, {})
    tensors |= small
    header = {**content.header, **stamp(FORMAT), "packed": packed}
    header.pop("sha256", None)
    check_header(header, str(path))
    header["sha256"] = _digest(header, tensors)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(header, allow_nan=False)})


def read_tokens(path: Path) -> Tensor:
    """The token ids in a file, [B, N] int64, without reading its other tensors.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, was truncated or edited, or has none.
    """
    from safetensors import safe_open

    with reading(path), safe_open(path, framework="pt") as file:
        return file.get_tensor(TOKENS).clone()


def read(path: Path, *, mapped: bool = True) -> CacheFile:
    """Read and verify a file; no more than `MOST_INFLATED` times its bytes are allocated.

    Args:
        path: The file.
        mapped: Whether its tensors may be mapped into memory. A process that must survive that the file is truncated
            meanwhile reads it whole.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, has a newer format, was truncated or edited, or a field
            is of another kind.
    """
    header, tensors = _read_mapped(path) if mapped else _read_whole(path)
    if header.get("sha256") != _digest({key: value for key, value in header.items() if key != "sha256"}, tensors):
        raise not_as_written(path)
    check_header(header, str(path))
    packed: dict[str, tuple[str, list[int]]] = header["packed"]
    if any(name not in tensors or tensors[name].dtype != torch.uint8 for name in packed):
        raise not_as_written(path)
    whole = sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in packed.values())
    if whole > MOST_INFLATED * path.stat().st_size:
        raise KVPolicyError(
            f"The cache file {str(path)!r} must not decompress to more than {MOST_INFLATED} times its size, got "
            "compressed tensors that would; save the cache again."
        )
    for name, (dtype, shape) in packed.items():
        try:
            tensors[name] = _inflated(tensors[name], getattr(torch, dtype), shape)
        except (zlib.error, ValueError, RuntimeError) as error:  # torch refuses some shapes without elements
            raise not_as_written(path) from error
    return CacheFile(header, tensors)


def _read_mapped(path: Path) -> CacheFile:
    from safetensors import safe_open

    with reading(path), safe_open(path, framework="pt") as file:
        header = header_of(path, file.metadata())
        return CacheFile(header, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _read_whole(path: Path) -> CacheFile:
    from safetensors.torch import load

    with reading(path):
        data = path.read_bytes()
        # What `load` accepts begins with the length of a JSON object; it does not return the metadata in it.
        tensors = load(data)
        start = 8
        described: Any = json.loads(data[start : start + int.from_bytes(data[:start], "little")])
        return CacheFile(header_of(path, described.get("__metadata__")), tensors)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor on the CPU with a storage of its own size: safetensors writes no views."""
    return owned(tensor.detach().cpu().contiguous())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Compress the tensors of codes, unless `read` would refuse the result.

    Returns:
        The dtype and shape of each compressed tensor, and its bytes, [n] uint8.
    """
    small = {name: _deflated(tensor) for name, tensor in tensors.items() if ".codes." in name}
    blobs = {name: blob for name, blob in small.items() if blob.nbytes < tensors[name].nbytes}
    stored = sum(blobs.get(name, tensor).nbytes for name, tensor in tensors.items())
    if sum(tensors[name].nbytes for name in blobs) > MOST_INFLATED * stored:
        return {}, {}
    names = {name: [str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)] for name in blobs}
    return names, blobs


def _deflated(tensor: Tensor) -> Tensor:
    """The compressed bytes of a tensor, [n] uint8."""
    return torch.frombuffer(bytearray(zlib.compress(_bytes(tensor))), dtype=torch.uint8)


def _inflated(blob: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    # Never more bytes than the header says, whatever the compressed ones would become; 0 would mean any number.
    found = zlib.decompressobj().decompress(_bytes(blob), max(whole.nbytes, 1))
    _bytes(whole)[:] = found
    return whole

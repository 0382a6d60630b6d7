"""Files of saved caches: a header and tensors in one safetensors file, verified whenever it is read.

The header is JSON in the metadata of the file. A hash covers the header and every tensor, so that a file that was
truncated or edited is refused. Nothing in a file is executed: there is no pickle in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.formats import check_format, replacing, stamp

FORMAT = 1
"""Version of the file format; newer ones are refused."""

KEY = "kvpolicy_cache"
"""The entry of the metadata that holds the header."""

COMPRESSIONS = (None, "zlib")
"""What may be passed as `compress`."""


class CacheFile(NamedTuple):
    """The content of a file.

    Attributes:
        header: What `saved_cache` says of the cache.
        tensors: Its tensors by name, on the CPU.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def rank_path(path: str | os.PathLike[str], rank: int, size: int) -> Path:
    """The file of one rank: the path itself, or one numbered as transformers numbers the shards of a checkpoint.

    Examples:
        >>> rank_path("a/doc.safetensors", 0, 2).name
        'doc-00001-of-00002.safetensors'
    """
    whole = Path(path).expanduser()
    return whole if size == 1 else whole.with_name(f"{whole.stem}-{rank + 1:05}-of-{size:05}{whole.suffix}")


def write(path: Path, content: CacheFile, compress: str | None = None) -> None:
    """Write a file atomically.

    Args:
        path: The file, which is replaced if it exists.
        content: What to write.
        compress: `zlib` to compress the tensors of codes.

    Raises:
        KVPolicyError: If `compress` is unknown, or the folder does not exist.
    """
    from safetensors.torch import save_file

    if compress not in COMPRESSIONS:
        raise KVPolicyError(f"compress must be one of {', '.join(map(repr, COMPRESSIONS))}, got {compress!r}.")
    if not path.parent.is_dir():
        raise KVPolicyError(f"The folder of a cache file must exist, got {str(path)!r}; try creating {path.parent}.")
    packed: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in content.tensors.items():
        plain = _plain(tensor)
        small = _deflated(plain) if compress and ".codes." in name else None
        if small is not None:
            packed[name] = [str(plain.dtype).removeprefix("torch."), list(plain.shape)]
        tensors[name] = plain if small is None else small
    header = {**content.header, **stamp(FORMAT), "packed": packed}
    header.pop("sha256", None)
    header["sha256"] = _digest(header, tensors)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(header, allow_nan=False)})


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, without reading its tensors, so that it is not verified.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, or has a newer format.
    """
    return _open(path, tensors=False).header


def read(path: Path) -> CacheFile:
    """Read and verify a file.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, has a newer format, or was truncated or edited.
    """
    header, tensors = _open(path, tensors=True)
    if header.get("sha256") != _digest({key: value for key, value in header.items() if key != "sha256"}, tensors):
        raise _not_as_written(path)
    for name, (dtype, shape) in header["packed"].items():
        tensors[name] = _inflated(tensors[name], getattr(torch, dtype), shape)
    return CacheFile(header, tensors)


def _open(path: Path, *, tensors: bool) -> CacheFile:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise KVPolicyError(f"A cache file must exist, got {str(path)!r}; try creating it with kvpolicy cache make.")
    try:
        with safe_open(path, framework="pt") as file:
            header: Any = json.loads((file.metadata() or {}).get(KEY, "null"))
            if not isinstance(header, dict):
                raise _no_cache(path)
            check_format(header, FORMAT, f"The cache file {str(path)!r}")
            return CacheFile(header, {name: file.get_tensor(name) for name in file.keys()} if tensors else {})  # noqa: SIM118
    except (SafetensorError, RecursionError) as error:
        raise _not_as_written(path) from error
    except json.JSONDecodeError as error:
        raise _no_cache(path) from error


def _plain(tensor: Tensor) -> Tensor:
    """A tensor on the CPU with a storage of its own size: safetensors writes no views."""
    plain = tensor.detach().cpu().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _deflated(tensor: Tensor) -> Tensor | None:
    """The compressed bytes of a tensor, [n] uint8; None if they are not fewer."""
    blob = zlib.compress(_bytes(tensor))
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if len(blob) < tensor.nbytes else None


def _inflated(blob: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    # Never more bytes than the header says, whatever the compressed ones would become.
    found = zlib.decompressobj().decompress(_bytes(blob), whole.nbytes)
    _bytes(whole)[:] = found
    return whole


def _not_as_written(path: Path) -> KVPolicyError:
    return KVPolicyError(
        f"The cache file {str(path)!r} must be as it was written, got a truncated or edited one; save the cache again."
    )


def _no_cache(path: Path) -> KVPolicyError:
    return KVPolicyError(
        f"A cache file must be one that PolicyCache.save wrote, got {str(path)!r}, which has no header of kvpolicy."
    )

"""Files of saved caches: a header and tensors in one safetensors file, verified whenever it is read.

The header is JSON in the metadata of the file. A hash covers the header and every tensor, so that a file that was
truncated or edited is refused. Nothing in a file is executed: there is no pickle in it. That its content fits the model
is checked before tensors are allocated for it.
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

from kvpolicy.engine.snapshot import below
from kvpolicy.engine.state import owned
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.cache_header import FORMAT, KEY, check_header, header_of, not_as_written, reading
from kvpolicy.hf.discovery import ROPE_DELTAS
from kvpolicy.hf.states import is_state
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.formats import expanded, reason_of, replacing, stamp

TOKENS = "tokens"
"""The name of the token ids in a file, [B, N] int64."""

CODES = ".codes."
"""A part of the names of tensors of codes, which alone may be compressed."""

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
    whole = expanded(path)
    return whole if size == 1 else whole.with_name(f"{whole.stem}-{rank + 1:05}-of-{size:05}{whole.suffix}")


def found_path(path: str | os.PathLike[str], rank: int, size: int) -> Path:
    """The file to read on a rank: its own, or that of the whole model if there is no other.

    Raises:
        KVPolicyTypeError: If it is no path.
    """
    own = rank_path(path, rank, size)
    whole = rank_path(path, 0, 1)
    return whole if os.path.isfile(whole) and not os.path.isfile(own) else own


def check_path(path: Path) -> None:
    """Refuse a path at which no file can be.

    Raises:
        KVPolicyError: If it is a folder, or its folder does not exist.
    """
    if os.path.isdir(path):
        raise KVPolicyError(
            f"A cache file must be a file, got the folder {str(path)!r}; try {path / 'cache.safetensors'}."
        )
    if not os.path.isdir(path.parent):
        raise KVPolicyError(f"The folder of a cache file must exist, got {str(path)!r}; try creating {path.parent}.")


def write(path: Path, content: CacheFile, *, deflates: bool = False) -> None:
    """Write a file atomically.

    Args:
        path: The file, which is replaced if it exists.
        content: The content to write.
        deflates: Whether to compress the tensors of codes.

    Raises:
        KVPolicyError: As `check_path`, or if nothing can be written there, or a field of the header is of another kind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_path(path)
    tensors = {name: _plain(tensor) for name, tensor in content.tensors.items()}
    packed, small = _pack(tensors) if deflates else ({}, {})
    tensors |= small
    # Earlier versions read a file without a form.
    header = {**content.header, **stamp(FORMAT if "form" in content.header else 1), "packed": packed}
    header.pop("sha256", None)
    check_header(header, str(path))
    header["sha256"] = _digest(header, tensors)
    try:
        with replacing(path) as temporary:
            temporary.touch()  # names the reason where nothing can be written; safetensors has a text alone
            mode = temporary.stat().st_mode
            # A single entry: the order of several would differ from file to file.
            save_file(tensors, temporary, metadata={KEY: json.dumps(header, allow_nan=False)})
            temporary.chmod(mode)  # safetensors lets nobody else read its files, whatever the umask says
    except (OSError, SafetensorError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else f"an error of safetensors ({error})"
        raise KVPolicyError(
            f"The cache file {str(path)!r} must be writable, got {reason}; try another folder, or free some space."
        ) from error


def read_tokens(path: Path) -> Tensor:
    """The token ids in a file, [B, N] int64, without reading its other tensors.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, was truncated or edited, or has none.
    """
    from safetensors import safe_open

    if not _is_text(path):
        return _read_whole(path).tensors[TOKENS]
    with reading(path), safe_open(path, framework="pt") as file:
        return file.get_tensor(TOKENS).clone()


def read(path: Path, *, mapped: bool = True) -> CacheFile:
    """Read and verify a file; no more than `MOST_INFLATED` times the bytes of its tensors are allocated.

    Args:
        path: The file.
        mapped: Whether its tensors may be mapped into memory. A process that must survive that the file is truncated
            meanwhile reads it whole.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, has a newer format, was truncated or edited, or a field
            is of another kind.
    """
    header, tensors = _read_mapped(path) if mapped and _is_text(path) else _read_whole(path)
    if header.get("sha256") != _digest({key: value for key, value in header.items() if key != "sha256"}, tensors):
        raise not_as_written(path)
    check_header(header, str(path))
    packed: dict[str, tuple[str, list[int]]] = header["packed"]
    # Positions among them would say how large the keys and values of a form with loss become.
    if any(name not in tensors or CODES not in name or tensors[name].dtype != torch.uint8 for name in packed):
        raise not_as_written(path)
    whole = sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in packed.values())
    if whole > MOST_INFLATED * sum(tensor.nbytes for tensor in tensors.values()):
        raise KVPolicyError(
            f"The cache file {str(path)!r} must not decompress to more than {MOST_INFLATED} times its size, got "
            "compressed tensors that would; save the cache again."
        )
    for name, (dtype, shape) in packed.items():
        try:
            found = _inflated(tensors[name], getattr(torch, dtype), shape)
        except (ValueError, RuntimeError) as error:  # torch refuses some shapes without elements
            raise not_as_written(path) from error
        if found is None:
            raise not_as_written(path)
        tensors[name] = found
    return CacheFile(header, tensors)


def _read_mapped(path: Path) -> CacheFile:
    from safetensors import safe_open

    with reading(path), safe_open(path, framework="pt") as file:
        header = header_of(path, file.metadata())
        return CacheFile(header, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _is_text(path: Path) -> bool:
    """Whether PyTorch can map a file: not if its name is in another encoding than UTF-8."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
    small = {name: deflated(_bytes(tensor)) for name, tensor in tensors.items() if CODES in name}
    blobs = {name: blob for name, blob in small.items() if blob.nbytes < tensors[name].nbytes}
    stored = sum(blobs.get(name, tensor).nbytes for name, tensor in tensors.items())
    if sum(tensors[name].nbytes for name in blobs) > MOST_INFLATED * stored:
        return {}, {}
    names = {name: [str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)] for name in blobs}
    return names, blobs


def deflated(data: bytes | memoryview) -> Tensor:
    """The bytes after compression, [n] uint8."""
    return torch.frombuffer(bytearray(zlib.compress(data)), dtype=torch.uint8)


def inflated(blob: Tensor, size: int) -> bytes | None:
    """The bytes that `deflated` was given; no more than one too many are made, whatever the blob would become.

    Args:
        blob: [n] uint8.
        size: How many there must be.

    Returns:
        The bytes; None if there are more or fewer, or the blob or its rest is something else.
    """
    reader = zlib.decompressobj()
    try:
        # One more would be one too many; 0 would mean any number.
        found = reader.decompress(_bytes(blob), size + 1)
    except zlib.error:
        return None
    is_whole = len(found) == size and reader.eof and not reader.unused_data
    return found if is_whole else None


def _inflated(blob: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor | None:
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    found = inflated(blob, whole.nbytes)
    if found is None:
        return None
    _bytes(whole)[:] = found
    return whole


def check_content(content: CacheFile, attachment: Attachment, what: str) -> None:
    """Check that a file has the layers of a model, and tensors of as many rows as its header says.

    Args:
        content: The content of the file, with a header that passed its checks.
        attachment: The attachment of the model.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: Naming what does not fit.
    """
    check_layers(content.header, attachment, what)
    _refuse(_tensor_difference(content, attachment), what)


def check_layers(header: Mapping[str, Any], attachment: Attachment, what: str) -> None:
    """Check that a file has the layers of a model, with all heads if it is of a whole one.

    Args:
        header: A header that passed its checks.
        attachment: The attachment of the model.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: Naming what does not fit.
    """
    _refuse(_layer_difference(header, attachment), what)


def _refuse(found: str, what: str) -> None:
    if found:
        raise KVPolicyError(f"The content of the cache file {what!r} must have {found}; save the cache again.")


def _layer_difference(header: Mapping[str, Any], attachment: Attachment) -> str:
    """How the layers of a header differ from those of the model; empty if they do not."""
    model = attachment.model_shape
    for name, indices in (("layers", model.evictable), ("windows", model.unmanaged)):
        if header[name].keys() != {*map(str, indices)}:
            return f"the layers of the model in {name}, got others"
    whole = [header["rows"], model.whole.heads, model.whole.head_dim]
    for index, layer in header["layers"].items():
        # How many heads a rank has is in its tensors too, and `snapshot.put` compares them.
        expected = whole if header["ranks"]["size"] == 1 else [whole[0], layer["shape"][1], whole[2]]
        if layer["shape"] != expected or layer["shape"][1] > model.heads:
            return f"{expected} in layers.{index}.shape, got {layer['shape']}"
        if layer["group"] != model.whole.group and header["ranks"]["size"] == 1:
            return f"{model.whole.group} in layers.{index}.group, got {layer['group']}"
    wrong = [index for index, columns in header["windows"].items() if columns != header["columns"]]
    if wrong:
        return f"{header['columns']} columns in windows.{wrong[0]}, got {header['windows'][wrong[0]]}"
    return ""


def _tensor_difference(content: CacheFile, attachment: Attachment) -> str:
    """How the tensors besides those of policies differ from what the header says; empty if they do not."""
    header, held = content
    rows = header["rows"]
    columns = header["columns"]
    expected: dict[str, tuple[torch.dtype, list[int]]] = {"digest": (torch.int64, [rows])}
    if header["has_tokens"]:
        expected[TOKENS] = torch.int64, [rows, columns]
    if header.get("has_rope_deltas"):
        expected[ROPE_DELTAS] = torch.int64, [rows]
    for index in attachment.model_shape.evictable:
        expected[f"layers.{index}.length"] = torch.int64, [rows]
        expected[f"layers.{index}.columns"] = torch.int64, []
    for name, (dtype, size) in expected.items():
        tensor = held.get(name)
        if tensor is None or tensor.dtype != dtype or list(tensor.shape) != size:
            return f"the tensor {name} as {dtype} {size}, got {_described(tensor)}"
        if name.endswith(".columns") and int(tensor) != columns:
            return f"{columns} in the tensor {name}, got {int(tensor)}"
    if not header["has_tokens"] and TOKENS in held:
        return "no token ids if has_tokens is false, got some"
    return _state_difference(content, attachment) or _window_difference(content, attachment)


def _state_difference(content: CacheFile, attachment: Attachment) -> str:
    """How the states of layers differ from those of the model; empty if they do not."""
    header, held = content
    states = attachment.model_shape.states
    dtypes = {getattr(torch, header["dtype"]): attachment.model_shape.shape.dtype}  # they differ under autocast
    for index in range(attachment.model_shape.depth):
        found = {name: t for name, t in below(held, f"layers.{index}.").items() if is_state(name)}
        if any(not t.dim() or t.shape[0] != header["rows"] for t in found.values()):
            return f"{header['rows']} row(s) in each state of layer {index}, got others"
        expected = header["rows"] * states[index].nbytes if index in states else 0
        if sum(t.numel() * dtypes.get(t.dtype, t.dtype).itemsize for t in found.values()) != expected:
            return f"states of {expected} bytes in layer {index}, got {sum(t.nbytes for t in found.values())}"
    return ""


def _window_difference(content: CacheFile, attachment: Attachment) -> str:
    """How the tensors of layers that no policy manages differ from those of the model; empty if they do not."""
    header, held = content
    dtype = getattr(torch, header["dtype"])
    # Under autocast, a stock layer holds keys as their rotation leaves them: in the dtype of the model.
    dtypes = {dtype, attachment.model_shape.shape.dtype}
    for index, window in attachment.model_shape.unmanaged.items():
        shape = attachment.model_shape.unmanaged_shapes[index]
        least = min(header["columns"], window - 1)  # more are held while the past is recorded
        for side, size in (("keys", shape.head_dim), ("values", shape.held_value_dim)):
            name = f"layers.{index}.{side}"
            tensor = held.get(name)
            if tensor is None or tensor.dtype not in dtypes or tensor.dim() != 4:
                return f"the tensor {name} as {dtype} of 4 dimensions, got {_described(tensor)}"
            rows, heads, tokens, dim = tensor.shape
            sized = (rows, dim) == (header["rows"], size) and least <= tokens <= header["columns"]
            # A rank may have fewer heads than others.
            if not sized or heads > shape.heads or (heads < shape.heads and header["ranks"]["size"] == 1):
                return (
                    f"the tensor {name} as [{header['rows']}, {shape.heads}, {least}, {size}], got {_described(tensor)}"
                )
    return ""


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"

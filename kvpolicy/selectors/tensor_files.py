"""Files of tensors of each layer of a model, which a selector needs: written, read and checked in one way.

A file is in the format of safetensors. One entry of the metadata, which names the kind of the file, is JSON:

    {"format": 1, "kvpolicy": "0.2.0", "model": {...}, "made": {...}, "sha256": "..."}

`model` describes the model as other calibrations do, or is null for a file that fits any model of its shapes; `made`
says from which text and with which options the file was made. The hash covers all of this and the tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.embedded_names import EMBEDDED, embedded_file
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format, replace_file, stamp
from kvpolicy.text.model_identity import check_same_model

Content = TypeVar("Content")


class Parsed(NamedTuple):
    """The content of a file, before the names and shapes of its tensors are looked at.

    Attributes:
        tensors: Its tensors by name, on the CPU.
        model: The model that the file is for; None if the file does not say.
        made: How the file was made.
    """

    tensors: dict[str, Tensor]
    model: dict[str, Any] | None
    made: dict[str, Any] | None


@dataclass(frozen=True)
class FileKind(Generic[Content]):
    """One kind of file.

    Attributes:
        noun: What it is called in messages, such as `filter file`.
        key: The entry of the metadata that describes the file.
        asset: Name of the file of an embedded model, which is part of the package.
        command: The command that makes one.
        parse: From what the file holds, and its name for messages, to its content.
        format: Version of the file format; newer ones are refused.
    """

    noun: str
    key: str
    asset: str
    command: str
    parse: Callable[[Parsed, str], Content]
    format: int = 1

    @property
    def remedy(self) -> str:
        """Advice for the user, for messages."""
        return f"try {self.command}"

    def named(self, path: str) -> str:
        """The name of a file for messages."""
        return f"The {self.noun} {path!r}"

    def save(self, path: str | os.PathLike[str], content: Parsed) -> None:
        """Write a file; an existing one is replaced.

        Args:
            path: The file.
            content: Its content.

        Raises:
            KVPolicyError: If the file cannot be written.
        """
        from safetensors.torch import save

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in content.tensors.items()}
        facts = stamp(self.format) | {"model": content.model, "made": content.made}
        facts["sha256"] = digest(facts, tensors)
        blob = save(tensors, metadata={"format": "pt", self.key: json.dumps(facts, allow_nan=False)})
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, blob)
        except OSError as error:
            raise KVPolicyError(
                f"{self.named(str(path))} must be writable, got {error.strerror}; try another file."
            ) from error

    def load(self, path: str) -> Content:
        """Read a file; it is read again only after it has changed.

        Args:
            path: The file, or the name of an embedded model, `tiny` or `tiny-4k`.

        Raises:
            KVPolicyError: If it cannot be read, is of another kind, or was edited or damaged.
        """
        if path in EMBEDDED:
            return _embedded(self, path)
        where = Path(path).expanduser().absolute()  # a relative path in a cache key would not name one file
        try:
            found = where.stat()
        except (OSError, ValueError) as error:
            raise self._unreadable(path, error) from error
        # The times and sizes are part of the cache key alone, so that a file is read again after it was replaced.
        return _load(self, path, str(where), (found.st_mtime_ns, found.st_size, found.st_ino))

    def parsed(self, blob: bytes, path: str) -> Content:
        """The content of the bytes of a file; see `load`."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        what = self.named(path)
        try:
            with torch.inference_mode(False):  # whatever mode reads the file first, others use its tensors
                tensors = load(blob)
        except (SafetensorError, ValueError, KeyError) as error:
            raise KVPolicyError(
                f"{what} must be a safetensors file, got one that cannot be parsed; {self.remedy}."
            ) from error
        facts = _facts(blob, self.key)
        if facts is None:
            raise KVPolicyError(f"{what} must be written by kvpolicy, got one that does not say so; {self.remedy}.")
        # Before the hash, which a newer format may compute in another way: the message must name the version.
        check_format(facts, self.format, what)
        if facts.get("sha256") != digest({key: value for key, value in facts.items() if key != "sha256"}, tensors):
            raise KVPolicyError(f"{what} must be as it was written, got an edited or damaged one; {self.remedy}.")
        return self.parse(Parsed(tensors, facts.get("model"), facts.get("made")), path)

    def check_model(self, path: str, wanted: Mapping[str, Any] | None, model: ModelInfo) -> None:
        """Refuse a model that a file was not made for.

        Args:
            path: The file as the user wrote it.
            wanted: The model of the file; None for one that fits any model of its shapes.
            model: The model to check.

        Raises:
            KVPolicyError: If sizes or weights differ.
        """
        if wanted is not None:
            check_same_model(wanted, self.named(path), model, remedy=f"{self.remedy} on this model")

    def _unreadable(self, path: str, error: Exception) -> KVPolicyError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return KVPolicyError(
            f"The {self.noun} must be a readable file or {' or '.join(EMBEDDED)}, got {path!r} ({reason}); "
            f"{self.remedy}."
        )


@functools.cache
def _embedded(kind: FileKind[Any], name: str) -> Any:
    return kind.parsed(embedded_file(name, kind.asset).read_bytes(), name)


@functools.lru_cache(maxsize=32)
def _load(kind: FileKind[Any], path: str, where: str, _changed: tuple[int, ...]) -> Any:
    try:
        blob = Path(where).read_bytes()
    except OSError as error:
        raise kind._unreadable(path, error) from error  # pyright: ignore[reportPrivateUsage]
    return kind.parsed(blob, path)


def digest(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The hash of a file's description, without the hash, and of its tensors."""
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _facts(blob: bytes, key: str) -> dict[str, Any] | None:
    """The description of a file that safetensors can read; None if it has none."""
    start = 8  # `load` returns no metadata; they follow the length of the header
    header: Any = json.loads(blob[start : start + int.from_bytes(blob[:start], "little")])
    try:
        facts: Any = json.loads((header.get("__metadata__") or {}).get(key, "null"))
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", facts) if isinstance(facts, dict) else None

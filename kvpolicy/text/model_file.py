"""Files about a model: written, hashed, read once and refused in one way, whatever is in them.

A kind of file is a subclass of `ModelFile`, of which there is one object. It says what the file is called, which
command makes it, and how its content becomes bytes and comes back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from kvpolicy.text.embedded_names import EMBEDDED, embedded_file
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import replace_file
from kvpolicy.text.output import check_is_file, check_output, refuse_other

Content = TypeVar("Content")

SAME = "a {} of the same model, text and options"
"""A finished file that is replaced unasked, in words for `refuse_other`."""

REMEDY = "--force (from Python, force=True)"
"""How to replace another one."""

_known: dict[tuple[ModelFile[Any], str], tuple[object, Any]] = {}
"""Content that was read, by kind and place, with the times and sizes of its files: a changed file is read again."""


class ModelFile(ABC, Generic[Content]):
    """One kind of file. Its content is shared by all callers that load it and must not be modified.

    Attributes:
        noun: What it is called in messages, such as `filter file`.
        command: The command that makes one.
        asset: The name that a file of an embedded model has, which is part of the package; empty if there is none.
        format: Version of the file format; newer ones are refused.
    """

    noun: str
    command: str
    asset: str = ""
    format: int = 1

    @property
    def remedy(self) -> str:
        """Advice for the user, for messages."""
        return f"try {self.command}"

    def named(self, path: str) -> str:
        """The name of a file for messages."""
        return f"The {self.noun} {path!r}"

    def wrong(self, path: str, must: str, got: object, remedy: str = "") -> KVPolicyError:
        """The refusal of a file.

        Args:
            path: The file as the user wrote it.
            must: What it must do, in words.
            got: What it does instead.
            remedy: Advice for the user, if not that for all files.
        """
        return KVPolicyError(f"{self.named(path)} must {must}, got {got}; {remedy or self.remedy}.")

    def load(self, path: str) -> Content:
        """Read a file; it is read again only after it has changed.

        Args:
            path: The file, or the name of an embedded model, `tiny` or `tiny-4k`, if those have one; a file of this
                name can be given as `./tiny`.

        Raises:
            KVPolicyError: If it cannot be read, is of another kind or of a newer version, or was edited or damaged.
        """
        is_embedded = bool(self.asset) and path in EMBEDDED
        where = embedded_file(path, self.asset) if is_embedded else Path(os.path.expanduser(path))
        try:
            key = self, os.path.realpath(str(where))
            parts = self.parts(where, path)
        except KVPolicyError:
            raise
        except (OSError, ValueError) as error:
            raise self.unreadable(error, path) from error
        # Taken before the files are read: if they change meanwhile, it is out of date and the next call reads again.
        version = tuple(map(version_of, parts))
        known = _known.get(key)
        if known is None or known[0] != version:
            known = _known[key] = version, self.parse(parts, path)
        return known[1]

    def save(self, path: str | os.PathLike[str], content: Content) -> None:
        """Write a file; an existing one is replaced.

        Raises:
            KVPolicyError: If the file cannot be written.
        """
        try:
            for name, blob in self.encode(content).items():
                file = Path(os.path.expanduser(path)) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(file, blob)
        except OSError as error:
            raise self.wrong(str(path), "be writable", error.strerror or error, "try another file") from error

    def parts(self, where: Any, path: str) -> Sequence[Any]:
        """The files that are read: paths, or resources of the package."""
        return [where]

    @abstractmethod
    def encode(self, content: Content) -> Mapping[str, bytes]:
        """The bytes of each file of a folder by name, in the order in which they are written; "" names a file alone."""

    @abstractmethod
    def parse(self, parts: Sequence[Any], path: str) -> Content:
        """The content of the files; see `load`."""

    def read(self, part: Any, path: str) -> bytes:
        """The bytes of one of the files."""
        try:
            return cast(bytes, part.read_bytes())
        except (OSError, ValueError) as error:
            raise self.unreadable(error, path) from error

    def unreadable(self, error: OSError | ValueError, path: str) -> KVPolicyError:
        """The refusal of a file that cannot be read."""
        reason = error.strerror if isinstance(error, OSError) else error
        return KVPolicyError(
            f"The {self.noun} must be a readable file or {' or '.join(EMBEDDED)}, got {path!r} ({reason}); "
            f"{self.remedy}."
        )


class CalibrationKind(ModelFile[Content]):
    """A kind of file that is calibrated: from a model and a text, with options."""

    @abstractmethod
    def content(self, found: Any, model: dict[str, Any], made: dict[str, Any]) -> Content:
        """The content of a file.

        Args:
            found: What was found; None before.
            model: The model.
            made: How it was made: the text, the options.
        """

    def compared(self, content: Content) -> object:
        """The facts that must be equal for a file to be replaced unasked: by default the model, and how it was made."""
        made: Any = content
        return without_name(made.model), made.made

    def check_output(self, out: str | Path, inputs: Iterable[str | Path | None], *, force: bool) -> None:
        """Refuse a place in which something else would be lost; see `kvpolicy.text.output.check_output`."""
        out = os.path.expanduser(out)
        check_output(out, SAME.format("calibration"), inputs=inputs, is_own=self.load, force=force)

    def check_free(self, out: str | Path, content: Content, *, force: bool) -> None:
        """Refuse a place unless it is free, or holds a file of the same model and text with the same options.

        Args:
            out: The file.
            content: The content to be written, as far as it is known before calibrating.
            force: Whether to accept a file that holds something else.

        Raises:
            KVPolicyError: If it cannot be written there, or the file holds something else.
        """
        out = os.path.expanduser(out)
        check_is_file(out)
        if force or not Path(out).exists():
            return
        try:
            is_same = self.compared(self.load(str(Path(out).absolute()))) == self.compared(content)
        except KVPolicyError:
            is_same = False
        if not is_same:
            refuse_other(out, SAME.format("calibration"), REMEDY)


def version_of(part: Any) -> tuple[int, ...]:
    """Time, size and inode of a file, which change with its content; empty for what is not on disk, as in a zip."""
    try:
        stat = os.stat(os.path.expanduser(part))
    except (OSError, ValueError, TypeError):
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def versions_in(value: Any) -> tuple[tuple[int, ...], ...]:
    """The versions of all files and folders that nested values name, to be a part of what a cache is looked up by.

    Examples:
        >>> versions_in(["auto", 3])
        ()
    """
    parts = [
        part
        for path in map(Path, map(os.path.expanduser, paths_in(value)))
        for part in (sorted(path.iterdir()) if path.is_dir() else [path])
    ]
    return tuple(map(version_of, parts))


def paths_in(value: Any) -> list[str]:
    """The files and folders that exist, of those that nested values name."""
    return [name for name in _strings(value) if name and _exists(name)]


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested values."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _strings(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        nested = cast("dict[Any, Any] | list[Any] | tuple[Any, ...]", value)
        for each in nested.values() if isinstance(nested, dict) else nested:
            yield from _strings(each)


def _exists(name: str) -> bool:
    try:
        return Path(os.path.expanduser(name)).exists()
    except (OSError, ValueError):  # no path
        return False


def without_name(model: Mapping[str, Any] | None) -> dict[str, Any]:
    """The description of a model without its name, which may differ for the same weights."""
    return {key: value for key, value in (model or {}).items() if key != "name"}


def parse_json(blob: bytes | str, what: str, remedy: str) -> Any:
    """The content of a JSON file.

    Args:
        blob: Its bytes.
        what: Its name, for the message.
        remedy: Advice for the user, for the message.

    Raises:
        KVPolicyError: If it is no JSON.
    """
    try:
        return json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(f"{what} must be JSON, got one that cannot be parsed; {remedy}.") from error


def pack_tensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)


def unpack_tensors(blob: bytes, what: str, remedy: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, on the CPU; see `parse_json`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        with torch.inference_mode(False):  # whatever mode reads the file first, others use its tensors
            return load(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise KVPolicyError(f"{what} must be a safetensors file, got one that cannot be parsed; {remedy}.") from error


def digest(facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> str:
    """The hash of a file's description, without the hash, and of its tensors."""
    told = {key: value for key, value in facts.items() if key != "sha256"}
    found = hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
    for name, tensor in sorted((tensors or {}).items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_digest(facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None, what: str, remedy: str) -> None:
    """Refuse a file whose description or tensors are not those that its hash was made of."""
    if facts.get("sha256") != digest(facts, tensors):
        raise KVPolicyError(f"{what} must be as it was written, got an edited or damaged one; {remedy}.")

"""Calibration files: a folder with tensors and metadata, verified whenever it is read."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.embedded_names import EMBEDDED, embedded_file
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import replace_file
from kvpolicy.text.model_identity import check_same_model
from kvpolicy.text.version import __version__

FORMAT = 1
"""Version of the file format; newer ones are refused."""

TENSORS = "tensors.safetensors"
FACTS = "calibration.json"
NAMES = (TENSORS, FACTS)
"""The files of a folder."""


@dataclass(frozen=True, eq=False)
class CalibrationFile:
    """The content of a calibration folder. It is shared by all callers that load it and must not be modified.

    Compared by identity: a calibration that was read again is another one.

    Attributes:
        meta: Metadata of the calibration; `model` is None or describes a model (see `check_model`).
        tensors: The tensors by name, on the CPU.
    """

    meta: dict[str, Any]
    tensors: dict[str, Tensor]


class _Folder(Protocol):
    """A folder on disk or inside a package."""

    def __truediv__(self, name: str, /) -> Any: ...

    def is_dir(self) -> bool: ...


_Stamp = tuple[int, ...]
_loaded: dict[str, tuple[_Stamp, str, CalibrationFile]] = {}


def load(folder: str, method: str) -> CalibrationFile:
    """Read a calibration; it is read again only after its files have changed.

    Args:
        folder: The folder, or the name of an embedded model, `tiny` or `tiny-4k`, whose calibration is part of the
            package; a folder of this name can be given as `./tiny`.
        method: The method that the calibration must be for, such as `csr`.

    Raises:
        KVPolicyError: If the folder is missing or damaged, was edited, or is of another method or a newer version.

    Examples:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, "csr", {"model": None, "head_dim": 2}, {"values.sn1.0": torch.eye(2)})
        ...     load(folder, "csr").tensors["values.sn1.0"].shape
        torch.Size([2, 2])
    """
    embedded = folder in EMBEDDED
    where: _Folder = embedded_file(folder, method) if embedded else Path(folder).expanduser()
    if not where.is_dir():
        raise KVPolicyError(
            f"The calibration must be a folder or {' or '.join(EMBEDDED)}, got {folder!r}; try creating one with "
            f"kvpolicy calibrate {method}."
        )
    key = f"{folder}:{method}" if embedded else str(Path(folder).expanduser().resolve())
    # Taken before the files are read: if they change meanwhile, the stamp is out of date and the next call reads again.
    stamp = _stamp(where)
    known = _loaded.get(key)
    if known is None or known[0] != stamp:
        _loaded[key] = known = (stamp, *_read(where, folder, method))
    if known[1] != method:
        raise KVPolicyError(
            f"The calibration {folder!r} must be for {method}, got one for {known[1]}; try creating one with kvpolicy "
            f"calibrate {method}."
        )
    return known[2]


def save(folder: str | os.PathLike[str], method: str, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a calibration; existing files are replaced, each of them atomically.

    Args:
        folder: The folder, which is created if it does not exist.
        method: The method that the calibration is for.
        meta: Metadata that JSON can represent, with `model` (see `check_model`).
        tensors: The tensors by name.
    """
    from safetensors.torch import save as to_bytes

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    blob = to_bytes({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    facts: dict[str, Any] = {
        "format": FORMAT,
        "kvpolicy": __version__,
        "method": method,
        "tensors_sha256": hashlib.sha256(blob).hexdigest(),
        "meta": meta,
    }
    facts["sha256"] = _digest(facts)
    # The two files are not replaced together. Between the two, the hash in the old metadata does not match the new
    # tensors, so that a reader refuses them instead of mixing two calibrations.
    replace_file(path / TENSORS, blob)
    replace_file(path / FACTS, (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode())


def written(folder: Path) -> tuple[str, CalibrationFile] | None:
    """The method and content of the calibration in a folder; None if there is none, or a damaged one."""
    try:
        return _read(folder, str(folder), "")
    except ValueError:
        return None


def is_part(path: str) -> bool:
    """Whether a file is one of a calibration, intact or damaged: its folder has the metadata of one."""
    facts: Any = json.loads((Path(path).parent / FACTS).read_text(encoding="utf-8"))
    return isinstance(facts, dict) and {"method", "tensors_sha256", "meta"} <= facts.keys()


def check_model(calibration: CalibrationFile, folder: str, model: ModelInfo) -> None:
    """Refuse a model that a calibration was not made for.

    Args:
        calibration: The calibration. If its `meta["model"]` is None, it fits any model with `meta["head_dim"]`. Else it
            has `name`, `type`, `layers`, `heads`, `head_dim` and `weights`: the weight fingerprint of 64 numbers, or
            None.
        folder: The folder as the user wrote it.
        model: The model to check.

    Raises:
        KVPolicyError: If the sizes or the weights differ.
    """
    wanted: dict[str, Any] | None = calibration.meta.get("model")
    if wanted is None:
        dim = calibration.meta.get("head_dim", model.head_dim)
        if dim != model.head_dim:
            raise KVPolicyError(
                f"The calibration {folder!r} must be for a head dimension of {model.head_dim}, got {dim}; try kvpolicy "
                "calibrate on this model."
            )
        return
    check_same_model(wanted, f"The calibration {folder!r}", model)


def _stamp(where: _Folder) -> _Stamp:
    """Times, sizes and inodes of the files; empty for a folder that is not on disk, such as in a zipped package."""
    found: list[int] = []
    for name in (TENSORS, FACTS):
        path = where / name
        if isinstance(path, Path) and path.is_file():
            stat = path.stat()
            found += [stat.st_mtime_ns, stat.st_size, stat.st_ino]
    return tuple(found)


def _read(where: _Folder, folder: str, method: str) -> tuple[str, CalibrationFile]:
    remedy = f"try creating it again with kvpolicy calibrate {method}"
    facts = _facts(_bytes(where, FACTS, folder, remedy), folder, remedy)
    blob = _bytes(where, TENSORS, folder, remedy)
    if hashlib.sha256(blob).hexdigest() != facts["tensors_sha256"]:
        raise KVPolicyError(
            f"The file {TENSORS} of the calibration {folder!r} must be as it was written, got a truncated or edited "
            f"one; {remedy}."
        )
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        tensors = from_bytes(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise KVPolicyError(
            f"The file {TENSORS} of the calibration {folder!r} must be a safetensors file, got one that cannot be "
            f"parsed; {remedy}."
        ) from error
    return facts["method"], CalibrationFile(facts["meta"], tensors)


def _bytes(where: _Folder, name: str, folder: str, remedy: str) -> bytes:
    try:
        return cast(bytes, (where / name).read_bytes())
    except OSError as error:
        reason = "none" if isinstance(error, FileNotFoundError) else "one that cannot be opened"
        raise KVPolicyError(
            f"The calibration {folder!r} must contain the file {name}, got {reason}; {remedy}."
        ) from error


def _facts(blob: bytes, folder: str, remedy: str) -> dict[str, Any]:
    """The content of the JSON file, verified against its hash."""
    name = f"The file {FACTS} of the calibration {folder!r}"
    try:
        facts: Any = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(f"{name} must be JSON, got one that cannot be parsed; {remedy}.") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
        raise KVPolicyError(f"{name} must be written by kvpolicy, got one without its fields; {remedy}.")
    # Before the hash, which a newer format may compute in another way: the message must name the version.
    if facts["format"] > FORMAT:
        raise KVPolicyError(
            f"The calibration {folder!r} must have format {FORMAT} or older, got format {facts['format']} of kvpolicy "
            f"{facts.get('kvpolicy')}; try updating kvpolicy, or {remedy.removeprefix('try ')}."
        )
    if facts.get("sha256") != _digest({name: value for name, value in facts.items() if name != "sha256"}):
        raise KVPolicyError(f"{name} must be as it was written, got an edited or damaged one; {remedy}.")
    return facts


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

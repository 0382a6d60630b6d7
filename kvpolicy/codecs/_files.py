"""Calibrated tensors on disk: a folder with tensors and the facts about them, checked whenever it is read."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.spec.errors import KVPolicyError

FORMAT = 1
"""Version of the files' layout; a reader refuses a newer one."""

EMBEDDED = "tiny"
"""The folder's name that stands for the calibration of the embedded model; another folder of that name is `./tiny`."""

TENSORS, FACTS = "tensors.safetensors", "calibration.json"
_ALIKE = 0.99


class Calibrated(NamedTuple):
    """What a folder holds. It is shared by all who load it: do not change it.

    Attributes:
        meta: Facts that the calibration wrote; `model` is None or what the model is (see `check_model`).
        tensors: By name, on the CPU.
    """

    meta: dict[str, Any]
    tensors: dict[str, Tensor]


class _Folder(Protocol):
    """What is read of a folder, whether on disk or inside a package."""

    def __truediv__(self, name: str, /) -> Any: ...

    def is_dir(self) -> bool: ...


_Stamp = tuple[int, ...]
_loaded: dict[str, tuple[_Stamp, str, Calibrated]] = {}


def load(folder: str, method: str) -> Calibrated:
    """Read a calibration, once for each state of its files.

    Args:
        folder: The folder, or `tiny` for the one of the embedded model, which ships with the package.
        method: Which calibration it must be, such as `csr`.

    Raises:
        KVPolicyError: Where the folder is missing, damaged, edited, of another method or from a newer version.

    Examples:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, "csr", {"model": None, "head_dim": 2}, {"values.sn1.0": torch.eye(2)})
        ...     load(folder, "csr").tensors["values.sn1.0"].shape
        torch.Size([2, 2])
    """
    where: _Folder = files("kvpolicy") / "assets" / method if folder == EMBEDDED else Path(folder).expanduser()
    if not where.is_dir():
        raise KVPolicyError(
            f"The calibration {folder!r} is no folder: make it with kvpolicy calibrate {method}, or give "
            f"{EMBEDDED!r} for that of the embedded model."
        )
    key = f"{EMBEDDED}:{method}" if folder == EMBEDDED else str(Path(folder).expanduser().resolve())
    stamp = _stamp(where)
    known = _loaded.get(key)
    if known is None or known[0] != stamp:
        _loaded[key] = known = (stamp, *_read(where, folder, method))
    if known[1] != method:
        raise KVPolicyError(
            f"The calibration {folder!r} is one for {known[1]}, not for {method}: make one with kvpolicy calibrate "
            f"{method}."
        )
    return known[2]


def save(folder: str | os.PathLike[str], method: str, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a calibration; files that are there are replaced, each at once.

    Args:
        folder: The folder, which is made where it does not exist.
        method: Which calibration it is.
        meta: What JSON can hold, with `model` (see `check_model`).
        tensors: By name.
    """
    from safetensors.torch import save as to_bytes

    from kvpolicy import __version__

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
    replace_file(path / TENSORS, blob)
    replace_file(path / FACTS, (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode())


def written(folder: Path) -> tuple[str, Calibrated] | None:
    """The method and the content of the calibration in a folder; None where none is whole, so that it can be redone."""
    try:
        return _read(folder, str(folder), "")
    except ValueError:
        return None


def check_model(found: Calibrated, folder: str, model: ModelInfo) -> None:
    """Refuse a model other than the one that a calibration was made for.

    Args:
        found: The calibration. Its `meta["model"]` is None, and then any model with `meta["head_dim"]` fits, or has
            `name`, `type`, `layers`, `heads`, `head_dim` and `weights`: 64 of its numbers, or None.
        folder: What the user called it.
        model: The model at hand.

    Raises:
        KVPolicyError: Where the sizes or the weights differ.
    """
    wanted: dict[str, Any] | None = found.meta.get("model")
    if wanted is None:
        dim = found.meta.get("head_dim", model.head_dim)
        if dim != model.head_dim:
            raise KVPolicyError(
                f"The calibration {folder!r} is for a head dimension of {dim}, and the model's is {model.head_dim}: "
                "make one for it with kvpolicy calibrate."
            )
        return
    for field, what in (("layers", "layers"), ("heads", "KV heads"), ("head_dim", "numbers in a head")):
        has = getattr(model, field)
        if wanted[field] != has:
            raise _other(folder, wanted, f"which has {wanted[field]} {what}, and this one has {has}")
    if model.weights is not None and wanted.get("weights") is not None and not _alike(wanted["weights"], model.weights):
        raise _other(folder, wanted, "whose weights differ from this one's")


def replace_file(path: Path, blob: bytes) -> None:
    """Write a file beside the old one, then put it in its place, so that no reader sees half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(blob)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _stamp(where: _Folder) -> _Stamp:
    """What changes when a file is replaced; nothing for what is not on disk, such as a zipped package."""
    found: list[int] = []
    for name in (TENSORS, FACTS):
        path = where / name
        if isinstance(path, Path) and path.is_file():
            stat = path.stat()
            found += [stat.st_mtime_ns, stat.st_size, stat.st_ino]
    return tuple(found)


def _read(where: _Folder, folder: str, method: str) -> tuple[str, Calibrated]:
    again = f"make it again with kvpolicy calibrate {method}"
    facts = _facts(_bytes(where, FACTS, folder, again), folder, again)
    blob = _bytes(where, TENSORS, folder, again)
    if hashlib.sha256(blob).hexdigest() != facts["tensors_sha256"]:
        raise KVPolicyError(f"The file {TENSORS} of the calibration {folder!r} is truncated or was changed: {again}.")
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    try:
        tensors = from_bytes(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise KVPolicyError(f"The file {TENSORS} of the calibration {folder!r} cannot be read: {again}.") from error
    return facts["method"], Calibrated(facts["meta"], tensors)


def _bytes(where: _Folder, name: str, folder: str, again: str) -> bytes:
    try:
        return cast(bytes, (where / name).read_bytes())
    except OSError as error:
        reason = "is missing from" if isinstance(error, FileNotFoundError) else "cannot be read in"
        raise KVPolicyError(f"The file {name} {reason} the calibration {folder!r}: {again}.") from error


def _facts(blob: bytes, folder: str, again: str) -> dict[str, Any]:
    """The JSON file's content, whole and unchanged."""
    try:
        facts: Any = json.loads(blob)
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(f"The file {FACTS} of the calibration {folder!r} is not JSON: {again}.") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
        raise KVPolicyError(f"The file {FACTS} of the calibration {folder!r} is none that kvpolicy wrote: {again}.")
    if facts["format"] > FORMAT:
        raise KVPolicyError(
            f"The calibration {folder!r} was written by kvpolicy {facts.get('kvpolicy')}, which is newer than this "
            f"one: update kvpolicy, or {again}."
        )
    if facts.get("sha256") != _digest({name: value for name, value in facts.items() if name != "sha256"}):
        raise KVPolicyError(f"The file {FACTS} of the calibration {folder!r} was changed by hand or damaged: {again}.")
    return facts


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _alike(stored: list[float], weights: Tensor) -> bool:
    ours, theirs = torch.tensor(stored, dtype=torch.float64), weights.detach().double().cpu().flatten()
    return len(ours) == len(theirs) and bool(torch.cosine_similarity(ours, theirs, dim=0) >= _ALIKE)


def _other(folder: str, wanted: dict[str, Any], why: str) -> KVPolicyError:
    return KVPolicyError(
        f"The calibration {folder!r} was made for another model ({wanted['type']} {wanted['name']!r}, {why}): run "
        "kvpolicy calibrate on this one."
    )

"""Calibration files: a folder with tensors and metadata, verified whenever it is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.embedded_names import EMBEDDED, embedded_file
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import stamp
from kvpolicy.text.model_file import (
    REMEDY,
    CalibrationKind,
    check_digest,
    digest,
    pack_tensors,
    parse_json,
    unpack_tensors,
    without_name,
)
from kvpolicy.text.model_identity import check_same_model
from kvpolicy.text.output import check_output

TENSORS = "tensors.safetensors"
FACTS = "calibration.json"


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


class CalibrationFolder(CalibrationKind[CalibrationFile]):
    """The calibrations of one method, each a folder.

    Args:
        method: The method, such as `csr`.
    """

    noun = "calibration"

    def __init__(self, method: str) -> None:
        """Describe the folders of a method."""
        self.asset = method
        self.command = f"kvpolicy calibrate {method}"

    def parts(self, where: Any, path: str) -> Sequence[Any]:
        """The metadata first, since they say what to expect."""
        if not where.is_dir():
            shipped = [name for name in EMBEDDED if embedded_file(name, self.asset).is_dir()]
            raise KVPolicyError(
                f"The calibration must be {' or '.join(['a folder', *shipped])}, got {path!r}; try creating one with "
                f"{self.command}."
            )
        return [where / FACTS, where / TENSORS]

    @property
    def remedy(self) -> str:
        """Advice for the user about a folder that is there."""
        return f"try creating it again with {self.command}"

    def parse(self, parts: Sequence[Any], path: str) -> CalibrationFile:
        """See `ModelFile`."""
        method, content = self._verified(parts, path)
        if method != self.asset:
            raise KVPolicyError(
                f"The calibration {path!r} must be for {self.asset}, got one for {method}; try creating one with "
                f"{self.command}."
            )
        return content

    def encode(self, content: CalibrationFile) -> dict[str, bytes]:
        """See `ModelFile`."""
        blob = pack_tensors(content.tensors)
        facts = stamp(self.format) | {
            "method": self.asset,
            "tensors_sha256": hashlib.sha256(blob).hexdigest(),
            "meta": content.meta,
        }
        facts["sha256"] = digest(facts)
        text = json.dumps(facts, indent=1, allow_nan=False) + "\n"
        # The two files are not replaced together. Between the two, the hash in the old metadata does not match the new
        # tensors, so that a reader refuses them instead of mixing two calibrations.
        return {TENSORS: blob, FACTS: text.encode()}

    def content(self, found: dict[str, Tensor] | None, model: dict[str, Any], made: dict[str, Any]) -> CalibrationFile:
        """See `CalibrationKind`."""
        return CalibrationFile({"model": model} | made, found or {})

    def unreadable(self, error: OSError | ValueError, path: str) -> KVPolicyError:
        """The refusal of a folder in which a file is missing."""
        name = Path(getattr(error, "filename", None) or FACTS).name
        reason = "none" if isinstance(error, FileNotFoundError) else "one that cannot be opened"
        return KVPolicyError(f"The calibration {path!r} must contain the file {name}, got {reason}; {self.remedy}.")

    def compared(self, content: CalibrationFile) -> dict[str, Any]:
        """Metadata by the names of the command's options; the name of the model is not compared."""
        meta = content.meta
        flat = {key: value for key, value in meta.items() if key not in ("options", "head_dim")}
        flat |= meta.get("options", {})
        flat["model"] = None if meta.get("model") is None else without_name(meta["model"])
        flat["text"] = flat.pop("text_sha256", None)
        return flat

    def check_output(self, out: str | Path, inputs: Iterable[str | Path | None], *, force: bool) -> None:
        """Refuse a file, and a folder in which something of no calibration has a name of ours."""
        out = os.path.expanduser(out)
        if Path(out).exists() and not Path(out).is_dir():
            raise KVPolicyError(f"The folder to write must be a folder, got the file {str(out)!r}; try another name.")
        given = list(inputs)
        for name in (TENSORS, FACTS):
            check_output(Path(out) / name, "a calibration's", inputs=given, is_own=_is_part, force=force)

    def check_free(self, out: str | Path, content: CalibrationFile, *, force: bool) -> None:
        """Refuse a folder with a finished calibration of another method, model or text, or with other options.

        A folder without a calibration, with damaged tensors or with the same one is accepted.
        """
        out = os.path.expanduser(out)
        self.check_output(out, (), force=force)
        if force:
            return
        try:
            method, existing = self._verified([Path(out) / FACTS, Path(out) / TENSORS], str(out))
        except ValueError:
            return
        # Through JSON, so that tuples compare equal to the lists that were read from the file.
        wanted = json.loads(json.dumps(self.compared(content)))
        found = self.compared(existing)
        different = [name for name, value in wanted.items() if found.get(name) != value]
        different = different if method == self.asset else ["method"]
        if different:
            raise KVPolicyError(
                f"The folder {str(out)!r} must not hold another finished calibration, got one that differs in "
                f"{', '.join(different)}; try another folder, or {REMEDY} to replace it."
            )

    def _verified(self, parts: Sequence[Any], path: str) -> tuple[str, CalibrationFile]:
        """The method and the content of a folder."""
        facts = self._facts(self.read(parts[0], path), path)
        blob = self.read(parts[1], path)
        what = f"The file {TENSORS} of the calibration {path!r}"
        if hashlib.sha256(blob).hexdigest() != facts["tensors_sha256"]:
            raise KVPolicyError(f"{what} must be as it was written, got a truncated or edited one; {self.remedy}.")
        return facts["method"], CalibrationFile(facts["meta"], unpack_tensors(blob, what, self.remedy))

    def _facts(self, blob: bytes, path: str) -> dict[str, Any]:
        """The content of the JSON file, verified against its hash."""
        what = f"The file {FACTS} of the calibration {path!r}"
        facts = parse_json(blob, what, self.remedy)
        if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
            raise KVPolicyError(f"{what} must be written by kvpolicy, got one without its fields; {self.remedy}.")
        # Before the hash, which a newer format may compute in another way: the message must name the version.
        if facts["format"] > self.format:
            raise KVPolicyError(
                f"The calibration {path!r} must have format {self.format} or older, got format {facts['format']} of "
                f"kvpolicy {facts.get('kvpolicy')}; try updating kvpolicy, or {self.remedy.removeprefix('try ')}."
            )
        check_digest(facts, None, what, self.remedy)
        return facts


folder_of = cache(CalibrationFolder)
"""The calibrations of a method; always the same object."""


def load(folder: str, method: str) -> CalibrationFile:
    """Read a calibration of a method, such as `csr`; see `ModelFile.load`.

    Examples:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder, "csr", {"model": None, "head_dim": 2}, {"values.sn1.0": torch.eye(2)})
        ...     load(folder, "csr").tensors["values.sn1.0"].shape
        torch.Size([2, 2])
    """
    return folder_of(method).load(folder)


def save(folder: str | os.PathLike[str], method: str, meta: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a calibration; existing files are replaced, each of them atomically.

    Args:
        folder: The folder, which is created if it does not exist.
        method: The method that the calibration is for.
        meta: Metadata that JSON can represent, with `model` (see `check_model`).
        tensors: The tensors by name.
    """
    folder_of(method).save(folder, CalibrationFile(meta, tensors))


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
    if wanted is not None:
        check_same_model(wanted, f"The calibration {folder!r}", model)
        return
    dim = calibration.meta.get("head_dim", model.head_dim)
    if dim != model.head_dim:
        raise KVPolicyError(
            f"The calibration {folder!r} must be for a head dimension of {model.head_dim}, got {dim}; try kvpolicy "
            "calibrate on this model."
        )


def check_heads(
    folder: str, method: str, heads: int, dim: int, model: ModelInfo, *, may_be_shared: bool = True
) -> None:
    """Refuse calibrated tensors for other KV heads than those of a model.

    Args:
        folder: The folder as the user wrote it.
        method: The method that the calibration is for.
        heads: The KV heads that the tensors are for.
        dim: Their dimension.
        model: The model to check.
        may_be_shared: Whether all heads may share the tensors, which are then those of one head.

    Raises:
        KVPolicyError: If the heads or their dimension differ.
    """
    if dim != model.head_dim or (heads != model.heads and not (may_be_shared and heads == 1)):
        raise KVPolicyError(
            f"The calibration {folder!r} must be for {model.heads} KV heads of dimension {model.head_dim}, as the "
            f"model has, got {heads} of dimension {dim}; try kvpolicy calibrate {method} on this model."
        )


def layer_tensor(folder: str, method: str, name: str, layer_idx: int, options: str = "") -> Tensor:
    """A calibrated tensor of a layer, as it was written.

    Args:
        folder: The folder as the user wrote it.
        method: The method that the calibration is for.
        name: The name of the tensor.
        layer_idx: The layer.
        options: What a calibration with this tensor is made with, for the refusal; empty if each has it.

    Raises:
        KVPolicyError: If the calibration has no such tensor.
    """
    found = load(folder, method).tensors.get(f"{name}.{layer_idx}")
    if found is None:
        raise KVPolicyError(
            f"The calibration {folder!r} must contain {name} for layer {layer_idx}, got none; try kvpolicy calibrate "
            f"{method} on this model{options and f', with {options}'}."
        )
    return found


def _is_part(path: str) -> bool:
    """Whether a file is one of a calibration, intact or damaged: its folder has the metadata of one."""
    facts: Any = json.loads((Path(path).parent / FACTS).read_text(encoding="utf-8"))
    return isinstance(facts, dict) and {"method", "tensors_sha256", "meta"} <= facts.keys()

"""Protection of finished calibrations: one is replaced by a different one only on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvpolicy.codecs import _files
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.output import check_is_file, check_output, refuse_other

Content = TypeVar("Content")

SAME = "a {} of the same model, text and options"
"""What a finished file may be without being lost, for `refuse_other`."""

REMEDY = "--force (from Python, force=True)"
"""How to replace another one."""


def check_free_file(
    out: str | Path,
    load: Callable[[str], Content],
    facts: Content,
    compared: Callable[[Content], object],
    *,
    force: bool,
) -> None:
    """Refuse a file unless it does not exist, or holds a calibration of the same model and text with the same options.

    Args:
        out: The file.
        load: Reads such a file.
        facts: The content to be written, as far as it is known before calibrating.
        compared: What of the content must be equal.
        force: Whether to accept a file that holds something else.

    Raises:
        KVPolicyError: If it is a folder, or the file holds something else.
    """
    check_is_file(out)
    if force or not Path(out).exists():
        return
    try:
        is_same = compared(load(str(Path(out).absolute()))) == compared(facts)
    except KVPolicyError:
        is_same = False
    if not is_same:
        refuse_other(out, SAME.format("calibration"), REMEDY)


def without_name(model: Mapping[str, Any] | None) -> dict[str, Any]:
    """The description of a model without its name, which may differ for the same weights."""
    return {key: value for key, value in (model or {}).items() if key != "name"}


class Made(Protocol):
    """The content of a file that says what it was made of."""

    @property
    def model(self) -> dict[str, Any] | None:
        """The model that the file is for."""
        ...

    @property
    def made(self) -> dict[str, Any] | None:
        """How the file was made."""
        ...


def model_and_made(content: Made) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The content that must be equal: the model, of which the name is not compared, and how the file was made."""
    return without_name(content.model), content.made


def check_free(out: str | Path, method: str, facts: dict[str, Any], *, force: bool) -> None:
    """Refuse a folder with a finished calibration of another method, model or text, or with other options.

    A folder without a calibration, with damaged tensors or with the same one is accepted.

    Args:
        out: The folder.
        method: The method of the calibration to be written.
        facts: Its metadata, as far as they are known before calibrating.
        force: Whether to accept a folder with a different calibration.

    Raises:
        KVPolicyError: If it is a file, or the folder contains a different calibration.
    """
    check_free_folder(out, force=force)
    if force:
        return
    existing = _files.written(Path(out))
    if existing is None:
        return
    existing_method, calibration = existing
    if existing_method != method:
        differences = ["method"]
    else:
        # Through JSON, so that tuples compare equal to the lists that were read from the file.
        differences = _differences(_flat(calibration.meta), _flat(json.loads(json.dumps(facts))))
    if differences:
        raise KVPolicyError(
            f"The folder {str(out)!r} must not hold another finished calibration, got one that differs in "
            f"{', '.join(differences)}; try another folder, or {REMEDY} to replace it."
        )


def check_free_folder(out: str | Path, *, inputs: Iterable[str | Path | None] = (), force: bool) -> None:
    """Refuse a folder in which a calibration would replace other files.

    Args:
        out: The folder.
        inputs: What the command reads, as for `check_output`.
        force: Whether to replace files that no calibration wrote.

    Raises:
        KVPolicyError: If it is a file, or has a file with a name of ours that no calibration wrote.
    """
    if Path(out).exists() and not Path(out).is_dir():
        raise KVPolicyError(f"The folder to write must be a folder, got the file {str(out)!r}; try another name.")
    given = list(inputs)
    for name in _files.NAMES:
        check_output(Path(out) / name, "a calibration's", inputs=given, is_own=_files.is_part, force=force)


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Metadata by the names of the command's options; the name of the model is not compared."""
    flat = {key: value for key, value in facts.items() if key not in ("options", "head_dim")} | facts.get("options", {})
    model = flat.get("model")
    flat["model"] = None if model is None else without_name(model)
    flat["text"] = flat.pop("text_sha256", None)
    return flat


def _differences(existing: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name, value in new.items() if existing.get(name) != value]

"""Files that commands write: never an input, and nothing that kvpolicy did not write, unless the user says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import expanded, reason_of

_HEAD = 2**16
"""Bytes of a file in which a marker is looked for."""


def check_output(
    path: str | Path,
    what: str = "",
    *,
    inputs: Iterable[str | Path | None] = (),
    is_own: Callable[[str], Any] | None = None,
    force: bool = False,
) -> None:
    """Refuse to write a file where something else would be lost, before anything slow is done.

    Args:
        path: The file to write.
        what: Noun with its article for the files of this kind that are replaced, such as `a saved cache`; empty if
            none is.
        inputs: What the command reads: files, and folders, in which only files of this kind are replaced. None, names
            that are no paths, and `-` are left out.
        is_own: Reads a file; whether kvpolicy wrote one of this kind. It returns something false, or raises ValueError
            or OSError, if not. Without it, only a new file is written.
        force: Whether to replace any file that is no input.

    Raises:
        KVPolicyError: If the path is an input, a folder or a device, if its folder is a file, or if there is something
            else and `force` is false.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     notes = Path(folder) / "notes.txt"
        ...     check_output(notes, "a saved cache")
        ...     _ = notes.write_text("mine")
        ...     check_output(notes, "a saved cache", force=True)
        ...     check_output(notes, "a saved cache", inputs=[notes], force=True)
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: The file to write must not be an input of the command, got ...; try another file.
    """
    target = Path(path)
    check_is_file(target)
    if not target.exists():
        return
    owned = is_own is not None and _is_own(target, is_own)
    if any(_reads(given, target, owned) for given in inputs):
        raise KVPolicyError(
            f"The file to write must not be an input of the command, got {str(path)!r}; try another file."
        )
    if not (owned or force):
        refuse_other(path, what)


def refuse_other(path: str | Path, what: str = "", remedy: str = "--force") -> NoReturn:
    """Refuse to replace a file that holds something else.

    Args:
        path: The file.
        what: Noun with its article for what may be replaced; empty if nothing may.
        remedy: How to replace it all the same.

    Raises:
        KVPolicyError: Always.
    """
    found = f"or {what}, got something else" if what else "got one that exists"
    raise KVPolicyError(f"The file {str(path)!r} must be absent, {found}; try another file, or {remedy} to replace it.")


def check_is_file(path: str | Path) -> None:
    """Refuse a folder, a device, or a path below a file or a read-only folder in the place of a file to be written.

    Raises:
        KVPolicyError: If it is none that can be written as a file.
    """
    target = expanded(path)
    if os.path.islink(os.path.realpath(target)):
        raise KVPolicyError(f"The file to write must be a file, got a link to itself, {str(path)!r}; try another.")
    if target.is_dir():
        raise KVPolicyError(f"The file to write must be a file, got the folder {str(path)!r}; try a name in it.")
    if target.exists() and not target.is_file():
        raise KVPolicyError(f"The file to write must be a file, got the device {str(path)!r}; try another name.")
    above = next((folder for folder in target.parents if folder.exists()), None)
    if above is not None and not above.is_dir():
        raise KVPolicyError(f"The file to write must be in a folder, got {str(path)!r}; try another folder.")
    if above is not None and not os.access(above, os.W_OK):  # else it would be known only when all is computed
        raise KVPolicyError(
            f"The file to write must be in a folder that can be written to, got {str(path)!r}; try another folder."
        )


def has_marker(path: str | Path, marker: str) -> bool:
    """Whether a text file has a marker near its beginning."""
    with Path(path).open("rb") as file:
        return marker.encode() in file.read(_HEAD)


def check_new_folder(path: str | Path, own: str) -> None:
    """Refuse a folder that has something else in it.

    Args:
        path: The folder to write; it may be missing or empty.
        own: A file that a folder of this kind has, such as `pyvenv.cfg`.

    Raises:
        KVPolicyError: If it is a file, or has something else in it.
    """
    folder = Path(path)
    try:
        is_free = not folder.exists() or not any(folder.iterdir()) or (folder / own).is_file()
    except OSError as error:
        raise KVPolicyError(
            f"The folder to write must be a folder, got {str(path)!r} ({reason_of(error)}); try another one."
        ) from error
    if not is_free:
        raise KVPolicyError(
            f"The folder {str(path)!r} must be absent, empty, or one with {own}, got other files; try another folder."
        )


def _is_own(path: Path, is_own: Callable[[str], Any]) -> bool:
    try:
        return bool(is_own(str(path.absolute())))  # a name alone may be that of an embedded model
    except (ValueError, OSError):
        return False


def _reads(given: str | Path | None, target: Path, owned: bool) -> bool:
    """Whether a file is what a command reads."""
    if given is None or str(given) in ("", "-"):
        return False
    try:
        source = Path(given)
        if source.is_dir():
            return not owned and target.resolve().is_relative_to(source.resolve())
        return source.exists() and source.samefile(target)
    except (OSError, ValueError):  # no path at all, such as a long text
        return False

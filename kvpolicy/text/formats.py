"""Format versions of files and JSON output, and how files are replaced."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.tables import shorten
from kvpolicy.text.version import __version__


def stamp(number: int) -> dict[str, Any]:
    """The first entries of every file and dictionary that kvpolicy writes.

    Args:
        number: Version of the format; it grows whenever a reader of the old format would misread the new one.

    Examples:
        >>> sorted(stamp(1))
        ['format', 'kvpolicy']
    """
    return {"format": number, "kvpolicy": __version__}


def check_format(content: Mapping[str, Any], newest: int, what: object) -> None:
    """Refuse content that a newer kvpolicy wrote; content without a number is older than format versions.

    Args:
        content: The content that was read.
        newest: The newest format that this version reads.
        what: Its name, for the message.

    Raises:
        KVPolicyError: If the format is newer, or not an integer.

    Examples:
        >>> check_format({"format": 3, "kvpolicy": "9.0"}, 2, "a.json")
        Traceback (most recent call last):
        kvpolicy.KVPolicyError: a.json must have format 2 or older, got 3, written by kvpolicy 9.0; update kvpolicy.
    """
    number = content.get("format", 0)
    if not isinstance(number, int) or isinstance(number, bool):
        raise KVPolicyError(f"{what} must have an integer as its format, got {shorten(repr(number))}; create it again.")
    if number > newest:
        writer = shorten(str(content.get("kvpolicy", "(a newer version)")))
        raise KVPolicyError(
            f"{what} must have format {newest} or older, got {shorten(str(number))}, written by kvpolicy {writer}; "
            "update kvpolicy."
        )


def reason_of(error: OSError | UnicodeDecodeError) -> str:
    """Why a text cannot be read, without the name of its file.

    Examples:
        >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.txt"))
        'no such file or directory'
        >>> reason_of(IsADirectoryError(21, "Is a directory", "texts"))
        'a folder'
    """
    if isinstance(error, IsADirectoryError):
        return "a folder"
    if isinstance(error, OSError):
        return (error.strerror or type(error).__name__).lower()
    return f"an invalid byte at position {error.start:,}"


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with the home folder in place of `~`; that of a user who is not known stays as it is.

    Raises:
        KVPolicyError: If it has a null byte, which no name of a file has.

    Examples:
        >>> expanded("~no-such-user/a.txt").parts
        ('~no-such-user', 'a.txt')
    """
    found = os.path.expanduser(path)
    if "\0" in found:
        raise KVPolicyError(f"A path must be without null bytes, got {found!r}; try another one.")
    return Path(found)


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Write a file atomically, so that no reader sees a part of it.

    Args:
        path: The file. Of a symbolic link, the file that it leads to is replaced.

    Yields:
        The path to write to; the file there takes the place of `path` at the end, unless an error was raised. An
        error about it names `path`, which the user knows.

    Raises:
        OSError: If the file cannot be written, or is a device, in whose place a file would be of no use to others.
    """
    path = Path(os.path.realpath(path))
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EEXIST, "a device", str(path))
    # The number of a thread, which no other process has either: two threads may write the same file at once.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # a name that is too long for the write is so for the removal
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(path)
        raise


def replace_file(path: Path, blob: bytes) -> None:
    """Write bytes to a file atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(blob)

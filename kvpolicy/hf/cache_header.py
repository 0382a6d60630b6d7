"""The header of a cache file: JSON in the metadata of a safetensors file.

Neither PyTorch nor transformers is imported here, because importing them takes longer than reading a header.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpolicy.hf.file_header import check_header, parse_header
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format

FORMAT = 1
"""Version of the file format; newer ones are refused."""

KEY = "kvpolicy_cache"
"""The entry of the metadata that holds the header."""


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, without reading its tensors, so that only its fields are checked and not its hash.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, has a newer format, or a field is of another kind.
    """
    from safetensors import safe_open

    with reading(path), safe_open(path, framework="np") as file:  # "pt" would import PyTorch
        header = header_of(path, file.metadata())
    check_header(header, str(path))
    return header


def header_of(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The header in the metadata of a file, of which only the format version is checked.

    Raises:
        KVPolicyError: If there is none, or its format is newer.
    """
    header: Any = parse_header((metadata or {}).get(KEY, "null"))
    if not isinstance(header, dict):
        raise _no_cache(path)
    check_format(header, FORMAT, f"The cache file {str(path)!r}")
    return header


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Name a file that cannot be read in the errors.

    Raises:
        KVPolicyError: If the file is missing, is no cache file, or was truncated or edited.
    """
    from safetensors import SafetensorError

    if not path.is_file():
        raise KVPolicyError(f"A cache file must exist, got {str(path)!r}; try creating it with kvpolicy cache make.")
    try:
        yield
    except KVPolicyError:
        raise
    except (SafetensorError, OSError) as error:
        raise not_as_written(path) from error
    except ValueError as error:
        raise _no_cache(path) from error


def not_as_written(path: Path) -> KVPolicyError:
    """The error for a file that was truncated or edited."""
    return KVPolicyError(
        f"The cache file {str(path)!r} must be as it was written, got a truncated or edited one; save the cache again."
    )


def _no_cache(path: Path) -> KVPolicyError:
    return KVPolicyError(
        f"A cache file must be one that PolicyCache.save wrote, got {str(path)!r}, which has no header of kvpolicy."
    )

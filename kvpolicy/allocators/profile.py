"""A model's layer similarities on file, so that no prompt has to be measured before it is compressed."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsFloat, cast

from kvpolicy.spec.errors import KVPolicyError
from kvpolicy.spec.formats import check_format, stamp

FORMAT = 1
"""Version of the file; a reader refuses a newer one."""


def save_profile(path: str | os.PathLike[str], model_name: str, cosine: Iterable[SupportsFloat]) -> None:
    """Write the layers' mean cosines to a JSON file that `squeeze:profile=FILE` reads.

    Args:
        path: Where to write.
        model_name: Which model was measured, for readers of the file.
        cosine: One number per layer (a list or an [L] tensor).
    """
    values = [float(value) for value in cosine]
    content = stamp(FORMAT) | {"model": model_name, "layers": len(values), "cosine": values}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_profile(path: str | os.PathLike[str], layers: int) -> tuple[float, ...]:
    """Read the cosines that `save_profile` wrote.

    Args:
        path: A file.
        layers: How many layers the model has.

    Raises:
        KVPolicyError: Where there is no such file, it is no profile, or it is of a model with other layers.
    """
    try:
        status = os.stat(path)
        cosine = _read(os.fspath(path), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise KVPolicyError(f"The profile {os.fspath(path)!r} cannot be read: {error.strerror}.") from error
    if len(cosine) != layers:
        raise KVPolicyError(
            f"The profile {os.fspath(path)!r} is of a model with {len(cosine)} layers and this one has {layers}: "
            "record a profile of this model."
        )
    return cosine


@functools.lru_cache(maxsize=32)
def _read(path: str, _changed: int, _size: int) -> tuple[float, ...]:
    try:
        raw: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(f"The profile {path!r} is not JSON: record it with kvpolicy's save_profile.") from error
    content = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    listed = content.get("cosine")
    if not isinstance(listed, list) or not all(map(_is_number, cast("list[Any]", listed))):
        raise KVPolicyError(f"The profile {path!r} has no list of numbers called cosine: record it with save_profile.")
    check_format({"format": content.get("version"), **content}, FORMAT, f"The profile {path!r}")
    return tuple(float(value) for value in cast("list[float]", listed))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""Profiles: stored layer cosines of a model, so that prompts need not be measured before they are compressed."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsFloat, cast

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format, replace_file, stamp

FORMAT = 1
"""Version of the file format; newer ones are refused."""


def save_profile(path: str | os.PathLike[str], model_name: str, cosine: Iterable[SupportsFloat]) -> None:
    """Write the mean cosines of the layers to a JSON file that `squeeze:profile=FILE` reads.

    Args:
        path: The file.
        model_name: Name of the model, for information only.
        cosine: One number per layer: a list, or a tensor [L].
    """
    values = [float(value) for value in cosine]
    content = stamp(FORMAT) | {"model": model_name, "layers": len(values), "cosine": values}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), (json.dumps(content, indent=1) + "\n").encode())


def load_profile(path: str | os.PathLike[str], layers: int) -> tuple[float, ...]:
    """Read the cosines that `save_profile` wrote.

    Args:
        path: The file.
        layers: The number of layers of the model.

    Raises:
        KVPolicyError: If the file cannot be read, is not a profile, or is of a model with another number of layers.
    """
    try:
        where = Path(path).expanduser().absolute()  # a relative path in a cache key would not name one file
        status = where.stat()
        cosine = _read(os.fspath(path), where, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise KVPolicyError(
            f"The profile {os.fspath(path)!r} must be a readable file, got {error.strerror}; try kvpolicy.profile."
        ) from error
    if len(cosine) != layers:
        raise KVPolicyError(
            f"The profile {os.fspath(path)!r} must be of a model with {layers} layers, got {len(cosine)}; try "
            "kvpolicy.profile on this model."
        )
    return cosine


@functools.lru_cache(maxsize=32)
def _read(path: str, where: Path, _changed: int, _size: int) -> tuple[float, ...]:
    try:
        raw: Any = json.loads(where.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(
            f"The profile {path!r} must be JSON, got one that cannot be parsed; try kvpolicy.profile."
        ) from error
    content = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    cosine = content.get("cosine")
    if not isinstance(cosine, list) or not all(map(_is_number, cast("list[Any]", cosine))):
        raise KVPolicyError(
            f"The profile {path!r} must have a list of finite numbers called cosine, got {type(cosine).__name__}; try "
            "kvpolicy.profile."
        )
    check_format({"format": content.get("version"), **content}, FORMAT, f"The profile {path!r}")
    return tuple(float(value) for value in cast("list[float]", cosine))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

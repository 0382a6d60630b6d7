"""The header of a cache file, JSON in the metadata of a safetensors file: its fields, and the check of every one.

Neither PyTorch nor transformers is imported here, because importing them takes longer than reading a header.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format
from kvpolicy.text.limits import MAX_BYTES, MAX_SIZE
from kvpolicy.text.tables import shorten

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes in which keys and values may be stored."""

PACKED = (*DTYPES, "uint8", "int8", "int16", "int32", "int64", "bool")
"""Dtypes that a compressed tensor may have."""

MAX_DEPTH = 64
"""Lists and objects inside each other; a policy nests a few strategies."""

_MAX_SCALE = 2**20
"""The factor of the products of queries and keys is below 1 in most models."""

_MAX_METRIC = 2.0**40
"""Numbers of attention are at most as large as a prompt has tokens, or are logarithms."""


class _Kind(NamedTuple):
    """Kind of values of a field: a test, and its name in messages."""

    accepts: Callable[[Any], bool]
    name: str


class _Maybe(NamedTuple):
    """A field that may be null."""

    kind: Any


class _Table(NamedTuple):
    """An object with keys that are data, such as indices of layers."""

    key: _Kind
    kind: Any


def _integer(least: int, most: int) -> _Kind:
    return _Kind(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        f"an integer from {least} to 2^{most.bit_length() - 1}",
    )


def _one_of(names: tuple[str, ...]) -> _Kind:
    return _Kind(lambda value: value in names, f"one of {', '.join(names)}")


def _number(least: float, most: float) -> _Kind:
    return _Kind(
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most,
        f"a number from {least:g} to {most:g}",
    )


_TEXT = _Kind(lambda value: isinstance(value, str) and value.isprintable(), "printable text")
_FLAG = _Kind(lambda value: isinstance(value, bool), "true or false")
_OBJECT = _Kind(lambda value: isinstance(value, dict), "an object")
_ANY = _Kind(lambda value: True, "anything")
_INDEX = _Kind(lambda value: value.isascii() and value.isdigit() and len(value) < 6, "the index of a layer")
_SIZE = _integer(0, MAX_SIZE)
_COUNT = _integer(1, MAX_SIZE)
_STEPS = _integer(-MAX_SIZE, MAX_SIZE)
_BYTES = _integer(0, MAX_BYTES)
_LENGTHS = _Kind(
    lambda value: any(not _difference(value, kind, "") for kind in (_SIZE, [_SIZE])), "one length or a list"
)
_REAL = _Kind(lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number")

# The fields of an object by name; of those with a question mark, earlier versions did not write all. A list has any
# number of elements of its kind, and a tuple one of each.
_MODEL: dict[str, Any] = {
    "name": _TEXT,
    "type": _TEXT,
    "layers": _COUNT,
    "heads": _COUNT,
    "head_dim": _COUNT,
    "weights": _Maybe([_REAL]),
    "rope": _ANY,
}
_LAYER: dict[str, Any] = {
    "shape": (_COUNT, _COUNT, _COUNT),
    "group": _COUNT,
    "layout": (_SIZE, [_SIZE]),
    "schedule": ([_SIZE], _Maybe(_STEPS)),
    "free_steps": _Maybe(_STEPS),
    "capacity": _SIZE,
    "expected_len": [_SIZE],
    "reserved": _SIZE,
    "largest_block": _SIZE,
    "scale": _number(0, _MAX_SCALE),
    "may_exceed_plan": _FLAG,
    "rows?": ([_SIZE], [_SIZE], [_SIZE]),
    "pages?": (_SIZE, _SIZE),
    "reading?": (_FLAG, _FLAG, _SIZE),
}
_LAYER_PLAN: dict[str, Any] = {
    "layer_idx": _SIZE,
    "tokens": _SIZE,
    "layout": (_SIZE, [_SIZE]),
    "nbytes": _Table(_TEXT, _BYTES),
    "moved": _BYTES,
    "loaded?": _BYTES,
    "stored?": _BYTES,
    "pages": _Maybe((_SIZE, _SIZE)),
}
_PLAN: dict[str, Any] = {
    "batch": _COUNT,
    "full_nbytes": _BYTES,
    "measured": _FLAG,
    "note": _TEXT,
    "resident_nbytes": _BYTES,
    "tp": _COUNT,
    "peak_nbytes": _BYTES,
    "layers": [_LAYER_PLAN],
    "unmanaged": _Table(_INDEX, _BYTES),
    "columns?": _Maybe(_SIZE),
    "full_peak_nbytes?": _BYTES,
}
_HEADER: dict[str, Any] = {
    "format": _COUNT,
    "kvpolicy": _TEXT,
    "policy": _OBJECT,
    "spec": _TEXT,
    "model": _MODEL,
    "dtype": _one_of(DTYPES),
    "ranks": {"rank": _SIZE, "size": _COUNT, "queries": [_SIZE], "heads": [_SIZE]},
    "rows": _COUNT,
    "columns": _COUNT,
    "has_tokens": _FLAG,
    "has_rope_deltas?": _FLAG,
    "nbytes": _BYTES,
    "full_nbytes": _BYTES,
    "calibrations": _TEXT,
    "cache": {
        "prompt": _Maybe(_LENGTHS),
        "new": _Maybe(_SIZE),
        "end": _Maybe([_SIZE]),
        "cosines": _Maybe([[_number(-_MAX_METRIC, _MAX_METRIC)]]),
        "columns": _COUNT,
        "whole?": _FLAG,
        "counts_columns?": _FLAG,
    },
    "plan": _Maybe(_PLAN),
    "layers": _Table(_INDEX, _LAYER),
    "windows": _Table(_INDEX, _SIZE),
    "held?": _Table(_INDEX, (_SIZE, _SIZE)),
    "packed": _Table(_TEXT, (_one_of(PACKED), [_SIZE])),
    "form?": {"spec": _TEXT, "calibration": _TEXT},
}


def parse_header(text: str) -> object:
    """The JSON of a header.

    Raises:
        ValueError: If it is no JSON, or has numbers that are not finite or too long, or nests too deeply.
    """
    try:
        content = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("The JSON of a header must not nest that deeply.") from error
    _check_depth(content, MAX_DEPTH)
    return content


def check_header(header: Mapping[str, Any], what: str) -> None:
    """Check that every field of a header is of its kind, and that those that depend on each other agree.

    Args:
        header: The header; fields that are not known are ignored.
        what: The name of the file, for messages.

    Raises:
        KVPolicyError: Naming the field.
    """
    found = _difference(header, _HEADER, "") or _disagreement(header)
    if found:
        raise KVPolicyError(f"The header of the cache file {what!r} must have {found}; save the cache again.")


def _difference(value: Any, kind: Any, path: str) -> str:
    """The difference of a value from its kind, as the middle of a sentence; empty if there is none."""
    if isinstance(kind, _Kind):
        return "" if kind.accepts(value) else _instead(kind.name, path, value)
    if isinstance(kind, _Maybe):
        return "" if value is None else _difference(value, kind.kind, path)
    if isinstance(kind, _Table | dict):
        if not isinstance(value, dict):
            return _instead("an object", path, value)
        return (_table_difference if isinstance(kind, _Table) else _field_difference)(value, kind, path)
    if not isinstance(value, list):
        return _instead("a list", path, value)
    kinds = kind * len(value) if isinstance(kind, list) else kind
    if len(value) != len(kinds):
        return _instead(f"a list of {len(kinds)}", path, value)
    pairs = enumerate(zip(value, kinds, strict=True))
    return next(filter(None, (_difference(one, like, f"{path}[{index}]") for index, (one, like) in pairs)), "")


def _table_difference(value: dict[str, Any], kind: Any, path: str) -> str:
    for key, held in value.items():
        if not kind.key.accepts(key):
            return _instead(f"{kind.key.name} as a key", path, key)
        if found := _difference(held, kind.kind, f"{path}.{key}"):
            return found
    return ""


def _field_difference(value: dict[str, Any], fields: Any, path: str) -> str:
    for field, kind in fields.items():
        name = field.removesuffix("?")
        inner = f"{path}.{name}" if path else name
        if name not in value and field == name:
            return f"the field {inner}, got none"
        if name in value and (found := _difference(value[name], kind, inner)):
            return found
    return ""


def _instead(expected: str, path: str, value: object) -> str:
    return f"{expected} in {shorten(path)}, got {shorten(repr(value))}"


def _disagreement(header: Mapping[str, Any]) -> str:
    """Fields that do not agree with the number of rows, layers or ranks; empty if all do."""
    rows = header["rows"]
    layers = header["layers"]
    cache = header["cache"]
    ranks = header["ranks"]
    plan = header["plan"]
    for name, entries in _by_row(header):
        if len(entries) != rows:
            return f"an entry for each of {rows} rows in {name}, got {len(entries)}"
    for index, layer in layers.items():
        if layer["shape"][0] != rows:
            return f"{rows} rows in layers.{index}.shape, got {layer['shape'][0]}"
    for row in cache["cosines"] or ():
        if len(row) != len(layers):
            return f"a number for each of {len(layers)} layers in cache.cosines, got {len(row)}"
    if cache["columns"] != header["columns"]:
        return f"{header['columns']} columns in cache.columns, got {cache['columns']}"
    if ranks["rank"] >= ranks["size"]:
        return f"a rank below {ranks['size']} in ranks.rank, got {ranks['rank']}"
    for name in ("queries", "heads"):
        expected = ranks["size"] if ranks["size"] > 1 else 0
        if len(ranks[name]) != expected:
            return f"a number for each of {expected} ranks in ranks.{name}, got {len(ranks[name])}"
    if plan is not None and sorted(str(layer["layer_idx"]) for layer in plan["layers"]) != sorted(layers):
        return "the layers of the cache in plan.layers, got others"
    return ""


def _by_row(header: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """The lists with an entry for each row, and their names."""
    for name, value in header["cache"].items():
        if isinstance(value, list):
            yield f"cache.{name}", value
    for index, layer in header["layers"].items():
        yield f"layers.{index}.expected_len", layer["expected_len"]
        yield f"layers.{index}.schedule", layer["schedule"][0]
        for part in layer.get("rows", ()):
            yield f"layers.{index}.rows", part


def _check_depth(content: object, left: int) -> None:
    if not left:
        raise ValueError("The JSON of a header must not nest that deeply.")
    inner: list[object] = []
    if isinstance(content, dict):
        inner = [*content.values()]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    elif isinstance(content, list):
        inner = content  # pyright: ignore[reportUnknownVariableType]
    for value in inner:
        _check_depth(value, left - 1)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"The numbers of a header must be finite, got {shorten(text)}.")
    return number


FORMAT = 2
"""Version of the file format; newer ones are refused. Files without a form are written as format 1."""

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

    if os.path.isdir(path):
        raise KVPolicyError(f"A cache must be one file, got the folder {str(path)!r}; try a file in it.")
    if not os.path.isfile(path):  # false for a name that is too long, at which Path.is_file would raise
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

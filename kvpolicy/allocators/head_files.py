"""Head files: one number for each KV head of a model, from a calibration or from the authors of a method.

The format is JSON:

    {"format": 1, "model": {...}, "kind": "score", "heads": [[0.9, 0.1], [0.4, 0.7]], "sink": 64, "recent": 256}

`heads` has a row for each layer of the model, which is empty for a layer that no policy manages. `kind` is `score` (how
much of the context a head needs, compared between heads) or `share` (which fraction of the tokens it should hold).
`model` describes the model as other calibrations do, or is a name or null; `sink` and `recent`, the tokens of a head
that does not need the context, are optional.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.embedded_names import EMBEDDED, embedded_file
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format, replace_file, stamp
from kvpolicy.text.model_identity import check_same_model
from kvpolicy.text.tables import shorten

FORMAT = 1
"""Version of the file format; newer ones are refused."""

AUTHORS_TABLE = "full_attention_heads.tsv"
AUTHORS_CONFIG = "config.json"

_REMEDY = "try kvpolicy calibrate heads"
_HEADKV = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")

Kind = Literal["score", "share"]
Table = tuple[tuple[float, ...], ...]


class HeadFile(NamedTuple):
    """The content of a head file.

    Attributes:
        heads: A number for each KV head, or for each query head (`by_query`), by layer of the model; an empty row for a
            layer that no policy manages.
        kind: Meaning of the numbers: a score, or a share of the tokens.
        sinks: First tokens that a head keeps which does not need the context; None if the file does not say.
        recent: Newest tokens that such a head keeps; None if the file does not say.
        model: The model that the file is for, as in other calibrations; None if the file does not say.
        by_query: Whether the numbers are of query heads.
        made: How the file was made: the text, its options.
    """

    heads: Table
    kind: Kind = "score"
    sinks: int | None = None
    recent: int | None = None
    model: dict[str, Any] | None = None
    by_query: bool = False
    made: dict[str, Any] | None = None

    def by_head(self, heads: int) -> Table:
        """The numbers of each of the `heads` KV heads of a layer: of query heads, the mean of each group."""
        if not self.by_query:
            return self.heads
        groups = [[row[start : start + len(row) // heads] for start in _starts(row, heads)] for row in self.heads]
        return tuple(tuple(math.fsum(part) / len(part) for part in row) for row in groups)


def _starts(row: Sequence[float], heads: int) -> range:
    return range(0, len(row), max(len(row) // heads, 1))


def save_heads(path: str | os.PathLike[str], content: HeadFile) -> None:
    """Write a head file in the format of this module; an existing file is replaced.

    Args:
        path: The file.
        content: Its content.
    """
    blob = stamp(FORMAT) | {
        "model": content.model,
        "kind": content.kind,
        "heads": "ROWS",
        "sink": content.sinks,
        "recent": content.recent,
        "made": content.made,
    }
    # A row on a line of its own can be read and edited.
    text = json.dumps(blob, indent=1, allow_nan=False)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in content.heads)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, (text.replace('"heads": "ROWS"', f'"heads": [\n  {rows}\n ]') + "\n").encode())
    except OSError as error:
        raise KVPolicyError(
            f"The head file {str(path)!r} must be writable, got {error.strerror}; try another file."
        ) from error


def load_heads(path: str) -> HeadFile:
    """Read a head file; it is read again only after it has changed.

    Args:
        path: A file in the format of this module; a `.tsv` of DuoAttention's authors, or the folder that contains it,
            with `config.json` beside it; a JSON file of HeadKV's authors; or the name of an embedded model, `tiny` or
            `tiny-4k`, whose file is part of the package.

    Raises:
        KVPolicyError: If it cannot be read, or is no head file.

    Examples:
        >>> found = load_heads("tiny")
        >>> len(found.heads), len(found.heads[0]), found.kind
        (8, 4, 'score')
    """
    if path in EMBEDDED:
        return _embedded(path)
    where = Path(path).expanduser().absolute()  # a relative path in a cache key would not name one file
    try:
        where = where / AUTHORS_TABLE if where.is_dir() else where
        config = where.with_name(AUTHORS_CONFIG)
        paths = [where, config] if where.suffix == ".tsv" and config.is_file() else [where]
        changed = tuple((found.st_mtime_ns, found.st_size) for found in map(os.stat, paths))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    # `changed` is part of the cache key alone, so that a file is read again after it was replaced.
    return _load(path, tuple(map(str, paths)), changed)


def check_heads(content: HeadFile, path: str, model: ModelInfo) -> None:
    """Refuse a model that a head file is not for.

    Args:
        content: The content of the file.
        path: The file as the user wrote it.
        model: The model to check.

    Raises:
        KVPolicyError: If layers, heads or weights differ.
    """
    what = f"The head file {path!r}"
    if content.model is not None:
        check_same_model(content.model, what, model)
    layers = len(content.heads)
    # If some layers are not under the policy, rows behind the last managed layer are optional.
    if layers <= max(model.indices) or (not model.evictable and layers != model.layers):
        raise KVPolicyError(
            f"{what} must have a row for each of the {max(model.layers, max(model.indices) + 1)} layers of the model, "
            f"got {layers}; {_REMEDY} on this model."
        )
    for layer_idx in model.indices:
        found = len(content.heads[layer_idx])
        fits = found and found % model.heads == 0 if content.by_query else found == model.heads
        if not fits:
            raise KVPolicyError(
                f"{what} must have a number for each of {model.heads} KV heads, got {found} in layer {layer_idx}; "
                f"{_REMEDY} on this model."
            )


@functools.cache
def _embedded(name: str) -> HeadFile:
    return _from_json(embedded_file(name, "heads.json").read_text(encoding="utf-8"), name)


@functools.lru_cache(maxsize=32)
def _load(path: str, paths: tuple[str, ...], _changed: tuple[tuple[int, int], ...]) -> HeadFile:
    try:
        texts = [Path(each).read_text(encoding="utf-8") for each in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    if paths[0].endswith(".tsv"):
        return _from_table(texts[0], texts[1] if len(texts) > 1 else "{}", path)
    return _from_json(texts[0], path)


def _from_json(text: str, path: str) -> HeadFile:
    content = _parsed(text, path)
    if content and all(map(_HEADKV.fullmatch, content)):
        return HeadFile(_of_queries(content, path), by_query=True)
    what = f"The head file {path!r}"
    if "heads" not in content:
        raise KVPolicyError(f"{what} must have a table called heads, got none; {_REMEDY}.")
    check_format(content, FORMAT, what)
    kind = content.get("kind", "score")
    if kind not in ("score", "share"):
        raise KVPolicyError(f"{what} must have the kind 'score' or 'share', got {_shown(kind)}; {_REMEDY}.")
    made = content.get("made")
    return HeadFile(
        heads=_table(content["heads"], path),
        kind=kind,
        sinks=_count(content, "sink", 0, path),
        recent=_count(content, "recent", 1, path),
        model=_model(content.get("model"), path),
        made=cast("dict[str, Any]", made) if isinstance(made, dict) else None,
    )


def _from_table(text: str, config: str, path: str) -> HeadFile:
    """The files of DuoAttention's authors: a line of numbers for each layer, and options of their training."""
    options = _parsed(config, path)
    try:
        rows = [[float(number) for number in line.split()] for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise KVPolicyError(
            f"The head file {path!r} must have a line of numbers for each layer, got {_shown(str(error))}; {_REMEDY}."
        ) from error
    # What their model was deployed with, if not with the sizes that it was trained with.
    sinks, recent = (
        f"deploy_{name}" if options.get(f"deploy_{name}") is not None else name for name in ("sink_size", "recent_size")
    )
    return HeadFile(
        tuple(tuple(min(max(number, 0.0), 1.0) for number in row) for row in _table(rows, path)),
        sinks=_count(options, sinks, 0, path),
        recent=_count(options, recent, 1, path),
    )


def _of_queries(content: dict[str, Any], path: str) -> Table:
    """The file of HeadKV's authors, with scores of some samples for each `layer-head`: their means."""
    by_place: dict[tuple[int, int], float] = {}
    for name, scores in content.items():
        layer, _, head = name.partition("-")
        ((*numbers,),) = _table([scores], path)
        by_place[int(layer), int(head)] = math.fsum(numbers) / max(len(numbers), 1)
    layers = 1 + max(layer for layer, _ in by_place)
    heads = 1 + max(head for _, head in by_place)
    if len(by_place) != layers * heads:
        raise KVPolicyError(
            f"The head file {path!r} must have every head of every layer, got {len(by_place)} of {layers} layers of "
            f"{heads}; {_REMEDY}."
        )
    return tuple(tuple(by_place[layer, head] for head in range(heads)) for layer in range(layers))


def _parsed(text: str, path: str) -> dict[str, Any]:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KVPolicyError(
            f"The head file {path!r} must be JSON, got one that cannot be parsed; {_REMEDY}."
        ) from error
    if not isinstance(content, dict):
        raise KVPolicyError(f"The head file {path!r} must be a JSON object, got {_shown(content)}; {_REMEDY}.")
    return cast("dict[str, Any]", content)


def _table(rows: Any, path: str) -> Table:
    """Rows of finite numbers."""
    if not isinstance(rows, list) or not rows:
        raise KVPolicyError(f"The head file {path!r} must have a row for each layer, got {_shown(rows)}; {_REMEDY}.")
    found: list[tuple[float, ...]] = []
    for row in cast("list[Any]", rows):
        numbers = cast("list[Any]", row) if isinstance(row, list) else [row]
        wrong = [number for number in numbers if not _is_number(number)]
        if wrong or not isinstance(row, list):
            raise KVPolicyError(
                f"The head file {path!r} must have rows of finite numbers, got {_shown([*wrong, row][0])}; {_REMEDY}."
            )
        found.append(tuple(map(float, numbers)))
    return tuple(found)


def _count(content: dict[str, Any], name: str, least: int, path: str) -> int | None:
    """A number of tokens; None if there is none."""
    value = content.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise KVPolicyError(
            f"The head file {path!r} must have an integer from {least} to 2^31 - 1 as its {name}, got {_shown(value)}; "
            f"{_REMEDY}."
        )
    return value


def _model(value: Any, path: str) -> dict[str, Any] | None:
    """The description of a model; None if only its name is given."""
    if value is None or isinstance(value, str):
        return None
    model = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    sizes = [model.get(name, 1) for name in ("layers", "heads", "head_dim")]
    weights = model.get("weights")
    samples = [] if weights is None else weights
    if (
        not model
        or not all(isinstance(size, int) for size in sizes)
        or not isinstance(samples, list)
        or not all(map(_is_number, cast("list[Any]", samples)))
    ):
        raise KVPolicyError(
            f"The head file {path!r} must describe its model by sizes and samples of its weights, got {_shown(value)}; "
            f"{_REMEDY}."
        )
    return model


def _is_number(value: object) -> bool:
    # No head's number needs more than this, and an integer may be too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def _shown(value: Any) -> str:
    """A value in a message; of a nested one, which may be deep, its type."""
    return type(value).__name__ if isinstance(value, list | dict) else shorten(str(value))


def _unreadable(path: str, error: Exception) -> KVPolicyError:
    reason = error.strerror if isinstance(error, OSError) else "one that is no text in UTF-8"
    return KVPolicyError(
        f"The head file must be a readable file or {' or '.join(EMBEDDED)}, got {path!r} ({reason}); {_REMEDY}."
    )

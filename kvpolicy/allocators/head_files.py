"""Head files: one number for each KV head of a model, from a calibration or from the authors of a method.

The format is JSON:

    {"format": 1, "model": {...}, "kind": "score", "heads": [[0.9, 0.1], [0.4, 0.7]], "sink": 64, "recent": 256}

`heads` has a row for each layer of the model, which is empty for a layer that no policy manages. `kind` is `score` (how
much of the context a head needs, compared between heads) or `share` (which fraction of the tokens it should hold).
`model` describes the model as other calibrations do, or is a name or null; `sink` and `recent`, the tokens of a head
that does not need the context, are optional.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

from kvpolicy.protocols import ModelInfo
from kvpolicy.text.formats import check_format, stamp
from kvpolicy.text.model_file import CalibrationKind, parse_json
from kvpolicy.text.model_identity import check_same_model
from kvpolicy.text.tables import shorten

AUTHORS_TABLE = "full_attention_heads.tsv"
AUTHORS_CONFIG = "config.json"

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


class _Heads(CalibrationKind[HeadFile]):
    noun = "head file"
    command = "kvpolicy calibrate heads"
    asset = "heads.json"

    def parts(self, where: Any, path: str) -> Sequence[Any]:
        """A file in the format of this module, or one of HeadKV's authors; the table of DuoAttention's, and its config.

        That is a `.tsv`, or the folder that contains it, with `config.json` beside it.
        """
        where = where / AUTHORS_TABLE if where.is_dir() else where
        config = where.with_name(AUTHORS_CONFIG) if where.name.endswith(".tsv") else None
        return [where] if config is None or not config.is_file() else [where, config]

    def encode(self, content: HeadFile) -> dict[str, bytes]:
        blob = stamp(self.format) | {
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
        text = text.replace('"heads": "ROWS"', f'"heads": [\n  {rows}\n ]')
        return {"": (text + "\n").encode()}

    def parse(self, parts: Sequence[Any], path: str) -> HeadFile:
        try:
            texts = [self.read(part, path).decode("utf-8") for part in parts]
        except UnicodeDecodeError as error:
            raise self.unreadable(ValueError("one that is no text in UTF-8"), path) from error
        if parts[0].name.endswith(".tsv"):
            return self._from_table(texts[0], texts[1] if len(texts) > 1 else "{}", path)
        content = self._parsed(texts[0], path)
        if content and all(map(_HEADKV.fullmatch, content)):
            return HeadFile(self._of_queries(content, path), by_query=True)
        if "heads" not in content:
            raise self.wrong(path, "have a table called heads", "none")
        check_format(content, self.format, self.named(path))
        kind = content.get("kind", "score")
        if kind not in ("score", "share"):
            raise self.wrong(path, "have the kind 'score' or 'share'", _shown(kind))
        made = content.get("made")
        return HeadFile(
            heads=self._table(content["heads"], path),
            kind=kind,
            sinks=self._count(content, "sink", 0, path),
            recent=self._count(content, "recent", 1, path),
            model=self._model(content.get("model"), path),
            made=cast("dict[str, Any]", made) if isinstance(made, dict) else None,
        )

    def content(self, found: Table | None, model: dict[str, Any], made: dict[str, Any]) -> HeadFile:
        """The sizes of a streaming head have fields of their own."""
        told = {name: value for name, value in made.items() if name not in ("sinks", "recent")}
        return HeadFile(found or (), sinks=made["sinks"], recent=made["recent"], model=model, made=told)

    def compared(self, content: HeadFile) -> object:
        """The sizes of a streaming head too."""
        return super().compared(content), content.sinks, content.recent

    def check(self, content: HeadFile, path: str, model: ModelInfo) -> None:
        """Refuse a model that a head file is not for.

        Args:
            content: The content of the file.
            path: The file as the user wrote it.
            model: The model to check.

        Raises:
            KVPolicyError: If layers, heads or weights differ.
        """
        if content.model is not None:
            check_same_model(content.model, self.named(path), model)
        layers = len(content.heads)
        remedy = f"{self.remedy} on this model"
        # If some layers are not under the policy, rows behind the last managed layer are optional.
        if layers <= max(model.indices) or (not model.evictable and layers != model.layers):
            most = max(model.layers, max(model.indices) + 1)
            raise self.wrong(path, f"have a row for each of the {most} layers of the model", layers, remedy)
        for layer_idx in model.indices:
            found = len(content.heads[layer_idx])
            fits = found and found % model.heads == 0 if content.by_query else found == model.heads
            if not fits:
                needed = f"have a number for each of {model.heads} KV heads"
                raise self.wrong(path, needed, f"{found} in layer {layer_idx}", remedy)

    def _from_table(self, text: str, config: str, path: str) -> HeadFile:
        """The files of DuoAttention's authors: a line of numbers for each layer, and options of their training."""
        options = self._parsed(config, path)
        try:
            rows = [[float(number) for number in line.split()] for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise self.wrong(path, "have a line of numbers for each layer", _shown(str(error))) from error
        # What their model was deployed with, if not with the sizes that it was trained with.
        sinks, recent = (
            f"deploy_{name}" if options.get(f"deploy_{name}") is not None else name
            for name in ("sink_size", "recent_size")
        )
        return HeadFile(
            tuple(tuple(min(max(number, 0.0), 1.0) for number in row) for row in self._table(rows, path)),
            sinks=self._count(options, sinks, 0, path),
            recent=self._count(options, recent, 1, path),
        )

    def _of_queries(self, content: dict[str, Any], path: str) -> Table:
        """The file of HeadKV's authors, with scores of some samples for each `layer-head`: their means."""
        by_place: dict[tuple[int, int], float] = {}
        for name, scores in content.items():
            layer, _, head = name.partition("-")
            ((*numbers,),) = self._table([scores], path)
            by_place[int(layer), int(head)] = math.fsum(numbers) / max(len(numbers), 1)
        layers = 1 + max(layer for layer, _ in by_place)
        heads = 1 + max(head for _, head in by_place)
        if len(by_place) != layers * heads:
            got = f"{len(by_place)} of {layers} layers of {heads}"
            raise self.wrong(path, "have every head of every layer", got)
        return tuple(tuple(by_place[layer, head] for head in range(heads)) for layer in range(layers))

    def _parsed(self, text: str, path: str) -> dict[str, Any]:
        content = parse_json(text, self.named(path), self.remedy)
        if not isinstance(content, dict):
            raise self.wrong(path, "be a JSON object", _shown(content))
        return cast("dict[str, Any]", content)

    def _table(self, rows: Any, path: str) -> Table:
        """Rows of finite numbers."""
        if not isinstance(rows, list) or not rows:
            raise self.wrong(path, "have a row for each layer", _shown(rows))
        found: list[tuple[float, ...]] = []
        for row in cast("list[Any]", rows):
            numbers = cast("list[Any]", row) if isinstance(row, list) else [row]
            wrong = [number for number in numbers if not _is_number(number)]
            if wrong or not isinstance(row, list):
                raise self.wrong(path, "have rows of finite numbers", _shown([*wrong, row][0]))
            found.append(tuple(map(float, numbers)))
        return tuple(found)

    def _count(self, content: dict[str, Any], name: str, least: int, path: str) -> int | None:
        """A number of tokens; None if there is none."""
        value = content.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise self.wrong(path, f"have an integer from {least} to 2^31 - 1 as its {name}", _shown(value))
        return value

    def _model(self, value: Any, path: str) -> dict[str, Any] | None:
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
            raise self.wrong(path, "describe its model by sizes and samples of its weights", _shown(value))
        return model


HEAD_FILES = _Heads()


def _is_number(value: object) -> bool:
    # No head's number needs more than this, and an integer may be too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def _shown(value: Any) -> str:
    """A value in a message; of a nested one, which may be deep, its type."""
    return type(value).__name__ if isinstance(value, list | dict) else shorten(str(value))

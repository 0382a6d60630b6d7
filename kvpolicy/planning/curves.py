"""Files that a policy by layer is made from: what each candidate does to each layer, or the layers themselves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format, stamp
from kvpolicy.text.limits import MAX_SIZE
from kvpolicy.text.model_file import ModelFile, parse_json

Measure = Literal["joint", "kl", "output"]
"""The definition of a distortion; see `kvpolicy.tuning.tune`."""

MEASURES: tuple[Measure, ...] = get_args(Measure)


class Curves(NamedTuple):
    """The distortion that each candidate causes in each layer.

    Attributes:
        model: The model, as `check_same_model` compares it.
        text: The measured text: `sha256`, `windows`, and the mean number of tokens of a prompt, `prompt`, and of
            what follows it, `new`.
        measure: Definition of a distortion: `joint`, `kl` or `output`; see `kvpolicy.tuning.tune`.
        layers: Indices of the measured layers.
        depth: Number of all layers of the model.
        candidates: The policies, each with a fraction of the prompt as its budget.
        distortion: The mean of each layer and candidate over the windows, [L, C]; None where it cannot be used.
        spread: Its standard error, [L, C].
        evidence: How tuned policies did on windows that were held out, for people to read.
    """

    model: Mapping[str, Any]
    text: Mapping[str, Any]
    measure: str
    layers: tuple[int, ...]
    depth: int
    candidates: tuple[Policy, ...]
    distortion: Sequence[Sequence[float | None]]
    spread: Sequence[Sequence[float | None]]
    evidence: Mapping[str, Any] | None = None


class Layers(NamedTuple):
    """The policy of each layer, with its relative share.

    Attributes:
        policies: The policy of each layer of the model.
    """

    policies: tuple[Policy, ...]


class _TunedFiles(ModelFile[Curves | Layers]):
    noun = "file of a tuned policy"
    command = "kvpolicy tune"

    def named(self, path: str) -> str:
        return f"The file {path!r} of a tuned policy"

    def encode(self, content: Curves | Layers) -> dict[str, bytes]:
        if isinstance(content, Layers):
            told = Policy.by_layer(content.policies, budget=1.0).to_dict()
        else:
            told = {name: value for name, value in content._asdict().items() if name != "candidates"}
            told["candidates"] = [policy.to_dict() for policy in content.candidates]
        return {"": (json.dumps(stamp(self.format) | told, indent=1, allow_nan=False) + "\n").encode()}

    def parse(self, parts: Sequence[Any], path: str) -> Curves | Layers:
        content = parse_json(self.read(parts[0], path), self.named(path), self.remedy)
        content = content if isinstance(content, dict) else {}
        check_format(content, self.format, self.named(path))
        if not isinstance(content.get("layers"), list):
            raise self.wrong(path, "hold curves or layers", "neither")
        if "candidates" not in content:
            return Layers(tuple(Policy.from_dict(layer) for layer in content["layers"]))
        try:
            curves = Curves(**{name: content[name] for name in Curves._fields if name in content})
            candidates = tuple(Policy.from_dict(candidate) for candidate in content["candidates"])
            curves = curves._replace(candidates=candidates, layers=tuple(int(index) for index in curves.layers))
            _check(curves)
        except KVPolicyError:  # of a candidate
            raise
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self.wrong(path, "hold whole curves", "incomplete ones") from error
        return curves

    def unreadable(self, error: OSError | ValueError, path: str) -> KVPolicyError:
        reason = error.strerror if isinstance(error, OSError) else error
        return KVPolicyError(f"The {self.noun} must be readable, got {path!r}: {reason}; {self.remedy}.")


TUNED_FILES = _TunedFiles()


def save_curves(path: str | os.PathLike[str], curves: Curves) -> None:
    """Write curves to a JSON file that `tuned:file=FILE` reads."""
    TUNED_FILES.save(path, curves)


def save_layers(path: str | os.PathLike[str], policies: Sequence[Policy | str]) -> None:
    """Write the policy of each layer to a JSON file that `tuned:file=FILE` reads.

    Args:
        path: The file.
        policies: As for `Policy.by_layer`.

    Raises:
        KVPolicyError: If they do not fit together, or one has a part that cannot be written down.

    Examples:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = os.path.join(folder, "layers.json")
        ...     save_layers(file, ["snapkv@0.5", "h2o@0.25"])
        ...     load_tuned(file).policies[1].budget
        0.25
    """
    TUNED_FILES.save(path, Layers(Policy.by_layer(policies, budget=1.0).layers))


def load_tuned(path: str) -> Curves | Layers:
    """Read what `save_curves` or `save_layers` wrote.

    Raises:
        KVPolicyError: If the file cannot be read, is of a newer format, or is no such file.
    """
    return TUNED_FILES.load(path)


def _check(curves: Curves) -> None:
    """Raise TypeError if a table has holes."""
    shape = len(curves.layers), len(curves.candidates)
    tables = (curves.distortion, curves.spread)
    whole = all(len(table) == shape[0] for table in tables) and all(
        len(row) == shape[1] and all(value is None or math.isfinite(value) for value in row)
        for table in tables
        for row in table
    )
    shares = all(isinstance(candidate.budget, float) for candidate in curves.candidates)
    text = curves.text
    lengths = 1 <= text["prompt"] <= MAX_SIZE and 0 <= text["new"] <= MAX_SIZE and isinstance(text["windows"], int)
    told = isinstance(curves.model, dict) and curves.measure in MEASURES
    told = told and all(isinstance(found["verdict"], str) for found in (curves.evidence or {}).values())
    if not (whole and shares and lengths and told and 0 not in shape and curves.depth > max(curves.layers)):
        raise TypeError

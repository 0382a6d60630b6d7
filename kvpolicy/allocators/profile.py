"""Profiles: stored layer cosines of a model, so that prompts need not be measured before they are compressed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsFloat, cast

from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import check_format, stamp
from kvpolicy.text.model_file import ModelFile, parse_json


class Profile(NamedTuple):
    """The content of a profile.

    Attributes:
        cosine: The mean cosine of each layer.
        model: Name of the model, for information only.
    """

    cosine: tuple[float, ...]
    model: str = ""


class _Profiles(ModelFile[Profile]):
    noun = "profile"
    command = "kvpolicy.profile"

    def encode(self, content: Profile) -> dict[str, bytes]:
        facts = {"model": content.model, "layers": len(content.cosine), "cosine": content.cosine}
        return {"": (json.dumps(stamp(self.format) | facts, indent=1) + "\n").encode()}

    def parse(self, parts: Sequence[Any], path: str) -> Profile:
        raw = parse_json(self.read(parts[0], path), self.named(path), self.remedy)
        content = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        cosine = content.get("cosine")
        if not isinstance(cosine, list) or not all(map(_is_number, cast("list[Any]", cosine))):
            raise self.wrong(path, "have a list of finite numbers called cosine", type(cosine).__name__)
        check_format({"format": content.get("version"), **content}, self.format, self.named(path))
        return Profile(tuple(map(float, cast("list[float]", cosine))))

    def unreadable(self, error: OSError | ValueError, path: str) -> KVPolicyError:
        return self.wrong(path, "be a readable file", error.strerror if isinstance(error, OSError) else error)


PROFILES = _Profiles()


def save_profile(path: str | os.PathLike[str], model_name: str, cosine: Iterable[SupportsFloat]) -> None:
    """Write the mean cosines of the layers, a list or a tensor [L], to a file that `squeeze:profile=FILE` reads."""
    PROFILES.save(path, Profile(tuple(map(float, cosine)), model_name))


def load_profile(path: str | os.PathLike[str], layers: int) -> tuple[float, ...]:
    """Read the cosines that `save_profile` wrote.

    Args:
        path: The file.
        layers: The number of layers of the model.

    Raises:
        KVPolicyError: If the file cannot be read, is not a profile, or is of a model with another number of layers.
    """
    where = os.fspath(path)
    cosine = PROFILES.load(where).cosine
    if len(cosine) != layers:
        needed = f"be of a model with {layers} layers"
        raise PROFILES.wrong(where, needed, len(cosine), f"{PROFILES.remedy} on this model")
    return cosine


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

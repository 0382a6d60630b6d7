"""Names of the trained models that ship with the package, and where their files are."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal, get_args

EmbeddedName = Literal["tiny", "tiny-4k"]
EMBEDDED: tuple[EmbeddedName, ...] = get_args(EmbeddedName)

_OF_TINY = {
    "heads.json": "heads/tiny.json",
    "qfilters.safetensors": "qfilters/tiny.safetensors",
    "triattention.safetensors": "triattention/tiny.safetensors",
    "kvzap.safetensors": "kvzap/tiny.safetensors",
}
"""Files of `tiny` that lie in folders of their own."""


def embedded_file(name: str, what: str) -> Any:
    """A calibration of an embedded model, a file or folder as `importlib.resources` returns it.

    Args:
        name: Name of the model.
        what: `csr`, `kvquant`, `lowrank` or `oscar`, which are folders, `heads.json`, `qfilters.safetensors`,
            `triattention.safetensors` or `kvzap.safetensors`.

    >>> embedded_file("tiny", "csr").is_dir(), embedded_file("tiny", "heads.json").is_file()
    (True, True)
    """
    assets = files("kvpolicy") / "assets"
    if name == "tiny":
        return assets / _OF_TINY.get(what, what)
    return assets / name / what

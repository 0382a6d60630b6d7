"""Models in GGUF files, which transformers reads into full precision."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvpolicy.text.errors import KVPolicyError

_ON_HUB = re.compile(r"([^/]+/[^/]+)/([^/]+)")


class Checkpoint(NamedTuple):
    """Where transformers finds a model.

    Attributes:
        name: A folder, or a name on the Hub.
        options: Further arguments of `from_pretrained`: `gguf_file`, for a GGUF file.
    """

    name: str
    options: dict[str, str]


def checkpoint_of(name: str) -> Checkpoint:
    """Where the model of a name is: its folder and file, if it is a GGUF file.

    Args:
        name: The path of a GGUF file, or `OWNER/REPOSITORY/FILE.gguf` on the Hub; any other name stays as it is.

    Raises:
        KVPolicyError: If there is no such file.
        ModuleNotFoundError: If the package gguf is not installed.

    Examples:
        >>> checkpoint_of("Qwen/Qwen3-4B")
        Checkpoint(name='Qwen/Qwen3-4B', options={})
    """
    if not name.lower().endswith(".gguf"):
        return Checkpoint(name, {})
    path = Path(name).expanduser()
    on_hub = _ON_HUB.fullmatch(name)
    if not path.is_file() and (on_hub is None or name.startswith(("/", ".", "~"))):
        raise KVPolicyError(f"A GGUF file must exist, got {name!r}; try its path, or OWNER/REPOSITORY/FILE.gguf.")
    if find_spec("gguf") is None:
        message = "A GGUF file needs the package gguf, which is not installed; run pip install 'kvpolicy[gguf]'."
        raise ModuleNotFoundError(message, name="gguf")
    if path.is_file() or on_hub is None:
        return Checkpoint(str(path.parent), {"gguf_file": path.name})
    return Checkpoint(on_hub[1], {"gguf_file": on_hub[2]})

"""What results were made with, so that a run measures again after something has changed."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import kvpolicy
import kvpolicy_eval.families


def stamp() -> str:
    """The versions of transformers and PyTorch, and a digest of the code of kvpolicy and of this room."""
    folders = [Path(str(module.__file__)).parent for module in (kvpolicy, kvpolicy_eval.families)]
    return f"transformers {version('transformers')}, torch {version('torch')}, sources {digest(folders)}"


def digest(folders: list[Path]) -> str:
    """Eight digits that change with the Python files of some folders, and with their names."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:8]

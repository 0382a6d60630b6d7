"""Source text of Python's standard library: the training texts of the embedded model, and its held-out text.

The library differs between Python versions, so the held-out part ships as
`heldout.txt`, and training excludes the same files by name.

`python -m kvpolicy_lm_eval.data.text` rewrites the shipped file.
"""

from __future__ import annotations

import random
import re
import sysconfig
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

FOLDERS = (
    "",
    "asyncio",
    "collections",
    "concurrent/futures",
    "ctypes",
    "dbm",
    "email",
    "html",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "sqlite3",
    "unittest",
    "urllib",
    "wsgiref",
    "xml/dom",
)
"""Folders of the standard library that are read, without their subfolders; the empty name is its root."""

NOTICE = "# Excerpts of CPython's standard library, Copyright (c) Python Software Foundation, PSF License Version 2.\n"
HELD_OUT_CHARS = 190_000
_SHIPPED = "heldout.txt"


def is_held_out(name: str) -> bool:
    """Whether a library file is held out; one in twenty is, selected by a hash of its name.

    >>> is_held_out("json/decoder.py"), is_held_out("zipfile.py")
    (False, False)
    """
    return sha256(name.encode()).digest()[0] % 20 == 7


def library() -> dict[str, str]:
    """Read the library's sources as ASCII, keyed by path inside the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(str(path.relative_to(root).as_posix()) for f in FOLDERS for path in (root / f).glob("*.py"))
    texts = {name: (root / name).read_bytes().decode("ascii", errors="ignore") for name in names}
    return {name: text for name, text in texts.items() if len(text) > 500}


def training_texts() -> list[str]:
    """Sources that training may read: all files that are not held out."""
    return [text for name, text in library().items() if not is_held_out(name)]


def held_out_texts() -> list[str]:
    """Sources of the running Python's library that training never reads."""
    return [text for name, text in library().items() if is_held_out(name)]


@cache
def held_out() -> str:
    """The shipped held-out text, without the copyright notice in its first line."""
    return files("kvpolicy_lm_eval.data").joinpath(_SHIPPED).read_text(encoding="ascii").split("\n", 1)[1]


def excerpt(rng: random.Random, chars: int) -> str:
    """An excerpt of `chars` characters of the held-out text, from the start of a random line.

    Args:
        rng: Source of the random position.
        chars: Length in characters; the last line may be truncated.
    """
    text = held_out()
    if not 0 <= chars < len(text) // 2:
        raise ValueError(f"The length of an excerpt must be from 0 to {len(text) // 2 - 1} characters, got {chars}.")
    start = text.index("\n", rng.randrange(len(text) // 2)) + 1
    return text[start : start + chars]


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the prose, without code, of 40 to 200 characters."""
    parts = re.split(r"(?<=\.)\s+", prose())
    return tuple(part for part in parts if 40 <= len(part) < 200 and part.endswith(".") and "`" not in part)


def prose() -> str:
    """English prose: the paragraphs of docstrings in the held-out text of the embedded model."""
    found: list[str] = []
    for docstring in re.findall(r'"""(.*?)"""', held_out(), re.DOTALL):
        paragraphs = (" ".join(text.split()) for text in re.split(r"\n\s*\n", docstring))
        found += [text for text in paragraphs if len(text) >= 80 and text[-1] in ".:" and ">>>" not in text]
    return "\n\n".join(found)


def write_held_out(path: Path) -> int:
    """Write the shipped held-out file, an equal part of each held-out source, and return its length in characters."""
    texts = held_out_texts()
    limit = HELD_OUT_CHARS // len(texts)
    parts = [text[: text.rfind("\n", 0, limit) + 1] if len(text) > limit else text for text in texts]
    body = "\n".join(parts)
    path.write_text(NOTICE + body, encoding="ascii", newline="\n")
    return len(body)


if __name__ == "__main__":
    print(write_held_out(Path(__file__).with_name(_SHIPPED)), "characters")

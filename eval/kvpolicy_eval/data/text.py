"""Source text of Python's standard library: what the embedded model reads, and what it never read.

The library differs between Python versions, so the held-out part is shipped as
`heldout.txt` and training leaves out the same files by name.

Rewrite the shipped file with `python -m kvpolicy_eval.data.text`.
"""

from __future__ import annotations

import random
import sysconfig
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

FOLDERS = (
    "", "asyncio", "collections", "concurrent/futures", "ctypes", "dbm", "email", "html", "http", "importlib",
    "json", "logging", "multiprocessing", "sqlite3", "unittest", "urllib", "wsgiref", "xml/dom",
)  # fmt: skip
NOTICE = "# Excerpts of CPython's standard library, Copyright (c) Python Software Foundation, PSF License Version 2.\n"
HELD_OUT_CHARS = 190_000
_SHIPPED = "heldout.txt"


def is_held_out(name: str) -> bool:
    """Say whether a library file is held out; one in twenty is, by a hash of its name.

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
    """List the sources that training may read, without every held-out file."""
    return [text for name, text in library().items() if not is_held_out(name)]


def held_out_texts() -> list[str]:
    """List the sources of this Python's library that training never reads."""
    return [text for name, text in library().items() if is_held_out(name)]


@cache
def held_out() -> str:
    """Read the shipped held-out text, without its one-line notice."""
    return files("kvpolicy_eval.data").joinpath(_SHIPPED).read_text(encoding="ascii").split("\n", 1)[1]


def excerpt(rng: random.Random, chars: int) -> str:
    """Cut about `chars` characters of whole lines from the held-out text.

    Args:
        rng: Source of the place of the cut.
        chars: Length in characters; the last line may be cut short.
    """
    text = held_out()
    if not 0 <= chars < len(text) // 2:
        raise ValueError(f"An excerpt of {chars} characters was asked for; ask for 0 to {len(text) // 2 - 1}.")
    start = text.index("\n", rng.randrange(len(text) // 2)) + 1
    return text[start : start + chars]


def write_held_out(path: Path) -> int:
    """Write the shipped held-out file, an even part of each held-out source, and count its characters."""
    texts = held_out_texts()
    share = HELD_OUT_CHARS // len(texts)
    parts = [text[: text.rfind("\n", 0, share) + 1] if len(text) > share else text for text in texts]
    body = "\n".join(parts)
    path.write_text(NOTICE + body, encoding="ascii", newline="\n")
    return len(body)


if __name__ == "__main__":
    print(write_held_out(Path(__file__).with_name(_SHIPPED)), "characters")

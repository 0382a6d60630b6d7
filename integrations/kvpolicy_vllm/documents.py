"""Documents: files of saved caches that requests begin with, and the folder that has them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpolicy.hf.cache_file import read, read_tokens
from kvpolicy.hf.cache_header import read_header
from kvpolicy.hf.dense_cache import check_dense
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import expanded

SALT = b"kvpolicy".hex()
"""How the cache salts of documents begin; no other request may have such a salt."""

SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Header of the file of a saved cache.

    Attributes:
        path: The file.
        digest: Its hash, which covers the header and every tensor.
        kept: Tokens that every head of every layer holds.
        total: Tokens of the text.
        tokens: Their ids; empty if the file does not have them.
        model: The identity of the model.
        dtype: Dtype of keys and values.
        spec: The policy.
    """

    path: Path
    digest: str
    kept: int
    total: int
    tokens: tuple[int, ...]
    model: Mapping[str, Any]
    dtype: str
    spec: str

    @property
    def salt(self) -> str:
        """The cache salt of its requests: the prefix cache of vLLM shares blocks only between requests of one salt."""
        return SALT + self.digest

    @property
    def placeholders(self) -> list[int]:
        """The ids that stand for its kept tokens in a prompt."""
        return placeholders(self.tokens, self.kept)

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt is the placeholders and something behind them."""
        return len(prompt) > self.kept and [*prompt[: self.kept]] == self.placeholders


def placeholders(tokens: Iterable[int], count: int) -> list[int]:
    """Ids that stand for the kept tokens of a text in a prompt.

    They are distinct tokens of the text, as far as there is room, so that what looks for a token in the prompt, such as
    a repetition penalty, finds those of the text.

    Examples:
        >>> placeholders([5, 5, 7], 3), placeholders([5, 5, 7], 1), placeholders([], 2)
        ([5, 7, 5], [5], [0, 0])
    """
    distinct = list(dict.fromkeys(tokens)) or [0]
    return [*itertools.islice(itertools.cycle(distinct), count)]


def read_document(path: str | Path, *, verify: bool = True) -> Document:
    """Read what a file of a saved cache says.

    Args:
        path: A file that `PolicyCache.save` or `kvpolicy cache make` wrote.
        verify: Whether to read the whole file, and to check that it is as it was written.

    Raises:
        KVPolicyError: If the file cannot be read, or its cache cannot be the beginning of a request.
    """
    path = expanded(path).absolute()
    if verify:
        header, tensors = read(path, mapped=False)
        tokens = tensors.get("tokens")
    else:
        header = read_header(path)
        tokens = read_tokens(path) if header["has_tokens"] else None
    kept = check_dense(header, str(path))
    if not kept:
        raise KVPolicyError(f"The cache file {str(path)!r} must hold at least one token, got none; save it again.")
    return Document(
        path=path,
        digest=str(header.get("sha256")),
        kept=kept,
        total=header["columns"],
        tokens=() if tokens is None else tuple(tokens[0].tolist()),
        model=header["model"],
        dtype=header["dtype"],
        spec=header["spec"],
    )


class Library:
    """Documents by name, read again only when their file has changed.

    Args:
        folder: Where the files are; None to take paths instead of names.
        verify: Whether to check that files are as they were written.
        paths: Whether an absolute path into the folder is a name too.
    """

    def __init__(self, folder: str | Path | None, *, verify: bool, paths: bool = False) -> None:
        """Look into the folder."""
        self.folder = None if folder is None else expanded(folder).resolve()
        if self.folder is not None and not self.folder.is_dir():
            raise KVPolicyError(
                f"The folder of documents must exist, got {str(self.folder)!r}; try creating it, then "
                "kvpolicy cache make --out FOLDER/NAME.safetensors."
            )
        self._verify = verify
        self._paths = paths
        self._known: dict[Path, tuple[tuple[int, ...], Document]] = {}
        self._lock = threading.Lock()

    def path_of(self, name: object) -> Path:
        """The file of a document.

        Args:
            name: The name of a file in the folder, with or without `.safetensors`.

        Raises:
            KVPolicyError: If there is no such document.
        """
        if not isinstance(name, str) or not name or not name.isprintable():
            raise KVPolicyError(f"document must be the name of a document, got {_shown(name)}.")
        if self.folder is None:
            return expanded(name).absolute()
        plain = Path(name)
        if self._paths and plain.is_absolute() and plain.parent.resolve() == self.folder:
            plain = Path(plain.name)
        path = self.folder / (plain.name if plain.suffix == SUFFIX else f"{plain.name}{SUFFIX}")
        if str(plain) != plain.name or plain.name.startswith(".") or "\\" in name:
            raise KVPolicyError(f"document must be the name of a document, got {_shown(name)}; try {path.stem!r}.")
        if not self._has(path):
            known = ", ".join(self.names())[:80] or "none"
            raise KVPolicyError(f"document must be one of the folder's ({known}), got {_shown(name)}.")
        return path

    def _has(self, path: Path) -> bool:
        """Whether a path is a file of the folder; a link may point to another name in it, and to nothing else."""
        try:
            return path.is_file() and path.resolve().parent == self.folder
        except OSError:  # such as a name that is too long
            return False

    def names(self) -> list[str]:
        """The names of the documents in the folder."""
        files = [] if self.folder is None else self.folder.glob(f"[!.]*{SUFFIX}")
        return sorted(path.stem for path in files)

    def find(self, name: object) -> Document:
        """A document as its file is now.

        Raises:
            KVPolicyError: If there is no such document, or its cache cannot be the beginning of a request.
        """
        path = self.path_of(name)
        try:
            facts = path.stat()
        except OSError as error:
            raise KVPolicyError(f"document must be a file that exists, got {_shown(str(name))}.") from error
        version = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        with self._lock:
            known = self._known.get(path)
        if known is None or known[0] != version:
            known = version, read_document(path, verify=self._verify)
            with self._lock:
                self._known[path] = known
        return known[1]


def as_ids(question: object) -> list[int]:
    """The token ids of a question as a list.

    Args:
        question: A list of integers, or a tensor [N] or [1, N].

    Raises:
        KVPolicyError: If it is something else, or empty.
    """
    found: Any = question.tolist() if isinstance(question, Tensor) else question
    if isinstance(found, list | tuple) and len(found) == 1 and isinstance(found[0], list | tuple):
        found = found[0]
    if not isinstance(found, list | tuple) or not all(type(each) is int and each >= 0 for each in found):
        raise KVPolicyError(
            f"question_ids must be token ids, got {_shown(found)}; try "
            "tokenizer(text, add_special_tokens=False).input_ids."
        )
    if not found:
        raise KVPolicyError("question_ids must have at least one token, got none; try a question after the document.")
    return [*found]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text[:80]) if isinstance(value, str) else text[:80]

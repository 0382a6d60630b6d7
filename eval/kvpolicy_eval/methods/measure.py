"""Measurements of policies, each made once and kept in a file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.distortion import Pages
from kvpolicy_eval.table import Examiner

Result = dict[str, Any]
"""`tasks`: right answers by task; `share`: bytes of the full cache; of codecs `keys`, `values` and `perplexity`."""


class Bench:
    """The embedded model, its exam, and what was measured before.

    Args:
        docs: Prompts per task.
        dtype: Of the model and its cache.
        cache: A folder for results, so that a run that was stopped goes on where it stood; None keeps none.
        text: Whether to measure errors and perplexity on held-out text too.
    """

    def __init__(self, docs: int, dtype: torch.dtype, cache: Path | None, *, text: bool = False) -> None:
        """Read what the folder has; the model is loaded when it is needed."""
        self.docs, self.dtype, self.text = docs, dtype, text
        self.file = None if cache is None else cache / "methods.jsonl"
        self.known: dict[str, Result] = {}
        if self.file is not None and self.file.is_file():
            self.known = {line["key"]: line for line in _whole(self.file)}
        self._examiner: Examiner | None = None
        self._pages: Pages | None = None

    def result(self, policy: str) -> Result:
        """What was or is now measured of a policy."""
        key = f"{policy} n={self.docs} {self.dtype} text={self.text} kvpolicy={kvpolicy.__version__}"
        if key not in self.known:
            self.known[key] = {"key": key, **self._measure(policy)}
            print(json.dumps(self.known[key]), file=sys.stderr, flush=True)
            self._keep(self.known[key])
        return self.known[key]

    def _measure(self, policy: str) -> Result:
        self._examiner = self._examiner or Examiner(self.docs, 512, self.dtype)
        marks, share = self._examiner.marks(policy)
        found: Result = {"tasks": marks, "share": share}
        if self.text:
            self._pages = self._pages or Pages(self._examiner.model, self._examiner.tokenizer)
            keys, values = self._pages.errors(policy)
            lost = {"keys": keys, "values": values, "perplexity": self._pages.perplexity(policy)}
            found |= {name: None if math.isnan(number) else number for name, number in lost.items()}
        return found

    def _keep(self, result: Result) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as out:
            out.write("\n" * (out.tell() > 0) + json.dumps(result))


def mean(result: Result) -> float:
    """Right answers, mean over the tasks."""
    return sum(result["tasks"].values()) / len(result["tasks"])


def _whole(file: Path) -> Iterator[Result]:
    """The results of a file, but for a line that a stopped run left half written."""
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)

"""Measurements of policies, each of which is made once and kept in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.common.accuracy import TaskEvaluator
from kvpolicy_eval.common.heldout import HeldOutText
from kvpolicy_eval.common.results import Known, Result, keep_result, read_results


class Bench:
    """Measures policies on the embedded model, and remembers the results.

    Args:
        docs: Prompts per task.
        dtype: Of the model and its cache.
        cache: Folder for results, with which an interrupted run continues; None for no file.
        text: Whether to measure errors and perplexity on held-out text too.
        saved: Whether every compressed cache passes through a file.
    """

    def __init__(
        self, docs: int, dtype: torch.dtype, cache: Path | None, *, text: bool = False, saved: bool = False
    ) -> None:
        """Read earlier results; the model is loaded when it is needed."""
        self.docs = docs
        self.dtype = dtype
        self.text = text
        self.saved = saved
        self.file = None if cache is None else cache / "methods.jsonl"
        self.known: Known = {} if self.file is None else read_results(self.file)
        self._evaluator: TaskEvaluator | None = None
        self._held_out: HeldOutText | None = None

    def result(self, policy: str, **options: Any) -> Result:
        """The result of a policy, measured now unless it is known.

        Its `tasks` are the accuracy by task and its `share` the bytes over those of the full cache; with `text` there
        are `keys`, `values` and `perplexity` too.

        Args:
            policy: Spec of the policy.
            **options: Arguments of `TaskEvaluator.accuracy` other than their defaults.
        """
        if self.saved:
            options["saved"] = True
        key = f"{policy} n={self.docs} {self.dtype} text={self.text} kvpolicy={kvpolicy.__version__}"
        key += "".join(f" {name}={value}" for name, value in sorted(options.items()))
        if key not in self.known:
            keep_result(self.file, self.known, key, self._measure(policy, **options))
        return self.known[key]

    def _measure(self, policy: str, **options: Any) -> Result:
        if self._evaluator is None:
            self._evaluator = TaskEvaluator(self.docs, 512, self.dtype)
        accuracy, byte_share = self._evaluator.accuracy(policy, **options)
        result: Result = {"tasks": accuracy, "share": byte_share}
        if self.text:
            if self._held_out is None:
                self._held_out = HeldOutText(self._evaluator.model, self._evaluator.tokenizer)
            keys, values = self._held_out.errors(policy)
            numbers = {"keys": keys, "values": values, "perplexity": self._held_out.perplexity(policy)}
            result |= {name: None if math.isnan(number) else number for name, number in numbers.items()}
        return result

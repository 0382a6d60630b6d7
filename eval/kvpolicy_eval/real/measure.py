"""Measures policies on one model; each result is kept in a file as soon as it is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvpolicy
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.common.accuracy import answer
from kvpolicy_eval.common.heldout import HeldOutText
from kvpolicy_eval.common.results import keep_result, read_results
from kvpolicy_eval.real.prompts import TASKS, prose
from kvpolicy_lm_eval.data.modes import Placed

PLACES = ("inside", "after")
"""Places of the question."""

Result = dict[str, Any]
"""`right` and `of`, numbers of answers, and `held`, bytes over the full cache's; for prose `bits`, per byte, and the
relative errors of `keys` and `values`; or `refused`, a message."""


def load(name: str, gguf: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model and its tokenizer, from a folder, a name on the hub, or a GGUF file in a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {} if gguf is None else {"gguf_file": gguf}
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options).eval()
    return model, tokenizer


class RealModel:
    """A model, and what is known of policies on it.

    Args:
        name: What `from_pretrained` takes, and what the results are kept under.
        gguf: Name of a GGUF file in the folder `name`.
        results: File of results.
        docs: Prompts per task.
        dtype: Of the model and its cache.
    """

    def __init__(
        self, name: str, gguf: str | None, results: Path, docs: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Read earlier results; the model is loaded when it is needed."""
        self.name = name
        self.gguf = gguf
        self.title = (gguf or name).rsplit("/", 1)[-1].removesuffix(
            ".gguf"
        ) + f" in {str(dtype).removeprefix('torch.')}"
        self.results = results
        self.docs = docs
        self.dtype = dtype
        self.known = read_results(results)
        self._loaded: tuple[Any, Any] | None = None
        self._text: HeldOutText | None = None

    def answers(self, policy: str, task: str, place: str, *, measure: bool) -> Result:
        """Right answers of a task, measured now unless they are known.

        If they are neither known nor to be measured, those of fewer prompts, the most that are known; or empty.
        """
        key = f"{policy} {task} {place} n={self.docs} {self.title}"
        if key not in self.known and measure:
            keep_result(self.results, self.known, key, self._attempt(lambda: self._answers(policy, task, place)))
        smaller = (f"{policy} {task} {place} n={docs} {self.title}" for docs in range(self.docs, 0, -1))
        return next((self.known[each] for each in smaller if each in self.known), {})

    def prose(self, policy: str, *, measure: bool) -> Result:
        """Bits per byte of prose, and errors of keys and values; as `answers`."""
        key = f"{policy} prose {self.title}"
        if key not in self.known and measure:
            keep_result(self.results, self.known, key, self._attempt(lambda: self._prose(policy)))
        return self.known.get(key, {})

    @staticmethod
    def _attempt(measured: Callable[[], Result]) -> Result:
        try:
            return measured()
        except KVPolicyError as error:
            return {"refused": str(error)}

    def _answers(self, policy: str, task: str, place: str) -> Result:
        model, tokenizer = self._model()
        # Without it, the first token of an answer would come from the whole prompt, whatever the policy keeps.
        held_back = 1 if place == "inside" else int(kvpolicy.Policy.parse(policy).reads_part)
        right = held = full = 0
        with kvpolicy.attach(model, policy), torch.inference_mode():
            for number in range(self.docs):
                prompt = TASKS[task](number).placed(place)
                fed = self._fed(prompt, tokenizer)
                found = answer(model, tokenizer, [prompt], policy, fed=fed, held_back=held_back)
                right += sum(found.right)
                held += found.held
                full += found.full
        return {"right": right, "of": self.docs, "held": round(held / full, 4)}

    def _fed(self, prompt: Placed, tokenizer: Any) -> int:
        """Tokens that are fed after the document.

        Raises:
            ValueError: The tokenizer joins the document and the question.
        """
        apart, joined = (
            tokenizer(text, add_special_tokens=False).input_ids for text in (prompt.fed, prompt.compressed + prompt.fed)
        )
        if apart and joined[-len(apart) :] != apart:
            raise ValueError(f"The tokenizer of {self.title} must keep a document and a question apart.")
        return len(apart)

    def _prose(self, policy: str) -> Result:
        if self._text is None:
            self._text = HeldOutText(*self._model(), prose())
        nats = math.log(self._text.perplexity(policy))
        keys, values = self._text.errors(policy)
        found = {"bits": nats / math.log(2) * self._text.tokens_per_byte, "keys": keys, "values": values}
        return {name: None if math.isnan(number) else round(number, 5) for name, number in found.items()}

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            self._loaded = load(self.name, self.gguf, self.dtype)
        return self._loaded

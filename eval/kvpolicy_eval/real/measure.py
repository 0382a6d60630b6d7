"""Measures policies on one model; each result is kept in a file as soon as it is known."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kvpolicy
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.common.accuracy import answer
from kvpolicy_eval.common.continuation import Continuation
from kvpolicy_eval.common.heldout import HeldOutText
from kvpolicy_eval.common.results import keep_result, read_results
from kvpolicy_eval.real.chat import in_template
from kvpolicy_eval.real.generated import generate
from kvpolicy_eval.real.prompts import GENERATED, PROSE, SIZED, TASKS, TOKENS, draw, prose
from kvpolicy_eval.real.shared_prefill import SharedPrefill
from kvpolicy_lm_eval.data.modes import Placed

PLACES = ("inside", "after")
"""Places of the question."""
BLOCK = 10
"""Prompts after which results are kept, with which an interrupted command continues."""

Result = dict[str, Any]
"""`right` and `of`, numbers of answers, and `held`, bytes over the full cache's; for prose `bits`, per byte, the
relative errors of `keys` and `values`, and the `divergence` from the full cache; for generated text this alone; or
`refused`, a message."""


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
        name: What `from_pretrained` takes; results are kept under its last part.
        gguf: Name of a GGUF file in the folder `name`.
        results: File of results.
        docs: Prompts per task.
        dtype: Of the model and its cache.
        tokens: Rough length of documents, where a task has no fixed one.
    """

    def __init__(
        self,
        name: str,
        gguf: str | None,
        results: Path,
        docs: int,
        dtype: torch.dtype = torch.float32,
        tokens: int = TOKENS,
    ) -> None:
        """Read earlier results; the model is loaded when it is needed."""
        self.name = name
        self.gguf = gguf
        self.results = results
        self.docs = docs
        self.dtype = dtype
        self.tokens = tokens
        self.known = read_results(results)
        self._place = os.path.normpath(os.path.join(name, gguf or ""))
        self.title = self._title(str(dtype).removeprefix("torch."))
        self._loaded: tuple[Any, Any] | None = None
        self._text: HeldOutText | None = None
        self._written: Continuation | None = None

    def measure(self, policies: Sequence[str], tasks: Collection[str]) -> None:
        """Measure what is not known of some policies.

        Args:
            policies: Specs.
            tasks: Names of tasks, and of texts that are predicted.
        """
        for name, measured in ((PROSE, self._prose), (GENERATED, self._generated)):
            unknown = [policy for policy in policies if name in tasks and self._key(policy, name) not in self.known]
            if unknown:
                with SharedPrefill(self._model()[0]):
                    for policy in unknown:
                        self._keep(self._key(policy, name), self._attempt(partial(measured, policy)))
        for task in TASKS:
            for place in PLACES if task in tasks else ():
                self._measure_answers(policies, task, place)

    def answers(self, policy: str, task: str, place: str) -> Result:
        """What is known of a task: right answers of `docs` prompts, or of the most that are known below; or empty."""
        keys = (self._key(policy, task, place, docs) for docs in range(self.docs, 0, -1))
        return next((self.known[key] for key in keys if key in self.known), {})

    def text(self, policy: str, name: str) -> Result:
        """What is known of a text that is predicted, `prose` or `generated`; or empty."""
        return self.known.get(self._key(policy, name), {})

    def _title(self, dtype: str) -> str:
        """The last part of the model's name and its dtype; the whole name if the file has another model's results."""
        short = f"{os.path.basename(os.path.abspath(self._place)).removesuffix('.gguf')} in {dtype}"
        # Results from before models were noted have none, and are those of this model.
        others = {found.get("model", self._place) for key, found in self.known.items() if key.endswith(f" {short}")}
        return short if others <= {self._place} else f"{self._place} in {dtype}"

    def _key(self, policy: str, name: str, place: str = "", docs: int = 0) -> str:
        """What a result is kept under."""
        tokens = [f"tokens={self.tokens}"] if name in SIZED else []
        return " ".join([policy, name, *([place, *tokens, f"n={docs}"] if place else []), self.title])

    def _keep(self, key: str, result: Result) -> None:
        keep_result(self.results, self.known, key, result | {"model": self._place})

    @staticmethod
    def _attempt(measured: Callable[[], Result]) -> Result:
        try:
            return measured()
        except KVPolicyError as error:
            return {"refused": str(error)}

    def _measure_answers(self, policies: Sequence[str], task: str, place: str) -> None:
        """Answer prompt by prompt under all policies, so that they share what is computed of a prompt."""
        found = {policy: self.answers(policy, task, place) for policy in policies}
        if all("refused" in each or each.get("of") == self.docs for each in found.values()):
            return
        with SharedPrefill(self._model()[0]) as shared, torch.inference_mode():
            for number in range(self.docs):
                shared.clear()
                ends = number + 1 == self.docs or (number + 1) % BLOCK == 0
                for policy, before in found.items():
                    if "refused" in before or before.get("of", 0) != number:
                        continue
                    found[policy] = self._attempt(partial(self._one_more, policy, task, place, before))
                    if ends or "refused" in found[policy]:
                        self._keep(self._key(policy, task, place, number + 1), found[policy])

    def _one_more(self, policy: str, task: str, place: str, before: Result) -> Result:
        """The result of one more prompt."""
        model, tokenizer = self._model()
        number = before.get("of", 0)
        # Without it, the first token of an answer would come from the whole prompt, whatever the policy keeps.
        held_back = 1 if place == "inside" else int(kvpolicy.Policy.parse(policy).reads_part)
        asked = draw(task, number, self.tokens)
        prompt = (in_template(asked, tokenizer) if asked.chat else asked).placed(place)
        fed = self._fed(prompt, tokenizer)
        with kvpolicy.attach(model, policy):
            found = answer(model, tokenizer, [prompt], policy, fed=fed, held_back=held_back)
        held = before.get("held", 0) * number + found.held / found.full
        return {
            "right": before.get("right", 0) + sum(found.right),
            "of": number + 1,
            "held": round(held / (number + 1), 4),
        }

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
        nats, divergence = self._text.continuation.predicted(policy)
        keys, values = self._text.errors(policy)
        bits = nats / math.log(2) * self._text.tokens_per_byte
        found = {"bits": bits, "keys": keys, "values": values, "divergence": divergence}
        return {name: None if math.isnan(number) else round(number, 5) for name, number in found.items()}

    def _generated(self, policy: str) -> Result:
        if self._written is None:
            self._written = generate(*self._model())
        return {"divergence": round(self._written.divergence(policy), 5)}

    def _model(self) -> tuple[Any, Any]:
        if self._loaded is None:
            self._loaded = load(self.name, self.gguf, self.dtype)
        return self._loaded

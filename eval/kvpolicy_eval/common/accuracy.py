"""Accuracy of the embedded model on its tasks under a policy.

Every prompt ends with its question, is compressed to the budget, and is answered greedily. An answer is right if all of
its digits, or its label, are. Rows run in padded batches, and bytes are those of the whole batch.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.data.prompts import Prompt
from kvpolicy_eval.data.tasks import tasks

BATCH = 16
HELD_BACK = {"few_shot": 1}
"""Tokens at the end of a task's prompts that are fed after the rest has been compressed.

The first token of an answer is computed from the full prompt, so that a policy could not change an answer of a single
token.
"""


def held_back(task: str, policy: str) -> int:
    """Tokens at the end of a task's prompts that are fed after the rest.

    A reader changes steps alone, so the first token of an answer must come from one.
    """
    reads_all = isinstance(kvpolicy.Policy.parse(policy).reader, kvpolicy.ReadAll)
    return max(HELD_BACK.get(task, 0), 0 if reads_all and policy != "all" else 1)


class TaskEvaluator:
    """The embedded model, with a number of prompts of every task.

    Args:
        docs: Prompts per task.
        length: Rough prompt length in tokens, 512 or 1,024.
        dtype: Of the model, its cache and the full cache.
    """

    def __init__(self, docs: int, length: int, dtype: torch.dtype = torch.float32) -> None:
        """Load the model and draw the prompts."""
        self.model, self.tokenizer = kvpolicy.tiny(dtype)
        self.tokenizer.padding_side = "left"
        self.prompts = {
            name: [draw(Random(1_000 * length + doc)) for doc in range(docs)] for name, draw in tasks(length).items()
        }

    def accuracy(self, policy: str, byte_share: float | None = None) -> tuple[dict[str, float], float]:
        """Share of right answers of each task, and the bytes held, as a share of the full cache's.

        Args:
            policy: Spec of the policy; without a budget if `byte_share` is given.
            byte_share: Budget as a share of the full cache's bytes.
        """
        right: dict[str, float] = {}
        held_bytes = 0
        full_bytes = 0
        with kvpolicy.attach(self.model, policy), torch.inference_mode():
            for name, prompts in self.prompts.items():
                hits = 0
                for start in range(0, len(prompts), BATCH):
                    batch = prompts[start : start + BATCH]
                    batch_hits, batch_held, batch_full = self._answer(
                        batch, held_back(name, policy), policy, byte_share
                    )
                    hits += batch_hits
                    held_bytes += batch_held
                    full_bytes += batch_full
                right[name] = hits / len(prompts)
        return right, held_bytes / full_bytes

    def _answer(
        self, prompts: list[Prompt], held_back: int, policy: str, byte_share: float | None
    ) -> tuple[int, int, int]:
        """Answer one batch.

        Returns:
            Right answers, bytes held after the prompt, and bytes that the full cache holds of the same batch.
        """
        texts = [prompt for prompt, _ in prompts]
        answers = [answer for _, answer in prompts]
        batch: Any = self.tokenizer(texts, return_tensors="pt", padding=True)
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        longest = max(len(self.tokenizer(answer, add_special_tokens=False).input_ids) for answer in answers)
        first_part = ids.shape[1] - held_back
        full_bytes = kvpolicy.plan(
            self.model.config, "full", batch=len(ids), prompt=ids.shape[1] + longest - 1, dtype=self.model.dtype
        ).full_nbytes
        sized = None if byte_share is None else f"{policy}@{int(byte_share * full_bytes)}B"
        cache = kvpolicy.PolicyCache(self.model, sized, prompt=mask[:, :first_part].sum(-1), new=longest + held_back)
        if held_back:
            # `generate` below continues from this cache and feeds the tokens that were held back.
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, :first_part]
            self.model(
                ids[:, :first_part],
                attention_mask=mask[:, :first_part],
                position_ids=positions,
                past_key_values=cache,
            )
        out = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, past_key_values=cache
        )
        completions = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        hits = sum(text.strip().startswith(answer) for text, answer in zip(completions, answers, strict=True))
        return hits, cache.nbytes, full_bytes


def mean(accuracy: dict[str, float]) -> float:
    """Mean over the tasks."""
    return sum(accuracy.values()) / len(accuracy)

"""Accuracy of the embedded model on its tasks under a policy.

A prompt is compressed to the budget, and is answered greedily. Its question is part of it, or is fed to the compressed
cache afterwards (`kvpolicy_eval.data.modes`). An answer is right if all of its digits, or its label, are. Rows run in
padded batches, and bytes are those of the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import kvpolicy
from kvpolicy.hf.attachment import Hold
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.text.embedded_names import EmbeddedName
from kvpolicy_eval.data.tasks import draw_prompts
from kvpolicy_lm_eval.data.modes import BEYOND, Placed, place, second_question

BATCH = 16
HELD_BACK = {"few_shot": 1}
"""Tokens at the end of a task's prompts that are fed after the rest has been compressed, with the question inside.

The first token of an answer is computed from the full prompt, so that a policy could not change an answer of a single
token.
"""


def held_back(task: str, by_step: bool, mode: str = "inside") -> int:
    """Tokens at the end of what is asked that are fed after the rest.

    Args:
        task: Name of the task.
        by_step: Whether the first token of an answer must come from a step: a reader changes steps alone.
        mode: The place of the question.
    """
    return max(HELD_BACK.get(task, 0) if mode == "inside" else 0, int(by_step))


class TaskEvaluator:
    """The embedded model, with a number of prompts of every task.

    Args:
        docs: Prompts per task.
        length: Rough prompt length in tokens, see `kvpolicy_eval.data.tasks`.
        dtype: Of the model, its cache and the full cache.
        model: The embedded model, `tiny` or `tiny-4k`.
    """

    def __init__(
        self, docs: int, length: int, dtype: torch.dtype = torch.float32, model: EmbeddedName = "tiny"
    ) -> None:
        """Load the model and draw the prompts."""
        self.model, self.tokenizer = kvpolicy.tiny(dtype, name=model)
        self.tokenizer.padding_side = "left"
        self.prompts = draw_prompts(docs, length)

    def accuracy(
        self,
        policy: str,
        byte_share: float | None = None,
        mode: str = "inside",
        only: Collection[str] = (),
        saved: bool = False,
        hold: Hold = "plain",
    ) -> tuple[dict[str, float], float]:
        """Share of right answers of each task, and the bytes held, as a share of the full cache's.

        Args:
            policy: Spec of the policy; without a budget if `byte_share` is given.
            byte_share: Budget as a share of the full cache's bytes.
            mode: The place of the question. Tasks without a second question are left out of `second`.
            only: Names of tasks; all by default.
            saved: Whether the compressed cache is saved to a file, and the rest is fed to what is loaded.
            hold: How a prompt is held that waits, as `hold` of `kvpolicy.attach`.
        """
        right: dict[str, float] = {}
        held_bytes = 0
        full_bytes = 0
        with kvpolicy.attach(self.model, policy, hold=hold) as handle, torch.inference_mode():
            by_step = handle.policy.reads_part or policy == "all"
            for name, prompts in self.prompts.items():
                if (only and name not in only) or (mode == "second" and second_question(prompts[0]) is None):
                    continue
                hits = 0
                for batch, fed in self._batches([place(prompt, mode) for prompt in prompts]):
                    back = held_back(name, by_step, mode)
                    found = answer(
                        self.model,
                        self.tokenizer,
                        batch,
                        policy,
                        fed=fed,
                        held_back=back,
                        byte_share=byte_share,
                        saved=saved,
                        beyond=mode == BEYOND,
                    )
                    hits += sum(found.right)
                    held_bytes += found.held
                    full_bytes += found.full
                right[name] = hits / len(prompts)
        return right, held_bytes / full_bytes

    def _batches(self, prompts: list[Placed]) -> Iterator[tuple[list[Placed], int]]:
        """Batches in which equally many tokens are fed after the compression, and how many these are."""
        by_fed: defaultdict[int, list[Placed]] = defaultdict(list)
        for prompt in prompts:
            by_fed[len(self.tokenizer(prompt.fed, add_special_tokens=False).input_ids)].append(prompt)
        for fed, rows in by_fed.items():
            for start in range(0, len(rows), BATCH):
                yield rows[start : start + BATCH], fed


class Answered(NamedTuple):
    """Answers of a batch.

    Attributes:
        right: Whether each row is right.
        held: Bytes held at the end.
        full: Bytes that the full cache holds of the same batch.
    """

    right: list[bool]
    held: int
    full: int


def answer(
    model: Any,
    tokenizer: Any,
    prompts: list[Placed],
    policy: str,
    *,
    fed: int,
    held_back: int = 0,
    byte_share: float | None = None,
    saved: bool = False,
    beyond: bool = False,
) -> Answered:
    """Answer one batch greedily, under a policy that is attached.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer, which pads on the left.
        prompts: Rows of the batch.
        policy: Spec of the policy; without a budget if `byte_share` is given.
        fed: Tokens at the ends of the rows that are fed to the compressed cache.
        held_back: Tokens at their ends that are fed after all others.
        byte_share: Budget as a share of the full cache's bytes.
        saved: Whether the cache passes through a file once it is compressed.
        beyond: Whether what is fed to the compressed cache is added whole, beyond the budget.
    """
    texts = [prompt.compressed + prompt.fed for prompt in prompts]
    answers = [prompt.answer for prompt in prompts]
    batch: Any = tokenizer(texts, return_tensors="pt", padding=True)
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    columns = ids.shape[1]
    longest = max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in answers)
    full_bytes = kvpolicy.plan(
        model.config, "full", batch=len(ids), prompt=columns + longest - 1, dtype=model.dtype
    ).full_nbytes
    sized = None if byte_share is None else f"{policy}@{int(byte_share * full_bytes)}B"
    # Where forward passes end: after what is compressed, and before what is held back. `generate` feeds the rest.
    ends = sorted({columns - tokens for tokens in (fed, held_back) if tokens})
    if saved and not ends:  # the first token of the answer comes before the file
        ends = [columns]
    first_part = ends[0] if ends else columns
    new = longest + columns - first_part
    cache = kvpolicy.PolicyCache(model, sized, prompt=mask[:, :first_part].sum(-1), new=new)
    for start, end in zip([0, *ends], ends, strict=False):
        logits = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            **cache_argument(model, cache),
            logits_to_keep=1,
        ).logits
        if end == columns:
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        if saved and not start:
            cache = _through_a_file(model, cache)
        if beyond:
            cache.hold_next()
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=columns + longest - ids.shape[1],
        do_sample=False,
        **cache_argument(model, cache),
    )
    completions = tokenizer.batch_decode(out[:, columns:], skip_special_tokens=True)
    right = [text.strip().startswith(wanted) for text, wanted in zip(completions, answers, strict=True)]
    return Answered(right, cache.nbytes, full_bytes)


def _through_a_file(model: Any, cache: kvpolicy.PolicyCache) -> kvpolicy.PolicyCache:
    """A cache as it is loaded from its file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path, compress="zlib")
        return kvpolicy.PolicyCache.load(model, path)


def mean(accuracy: dict[str, float]) -> float:
    """Mean over the tasks."""
    return sum(accuracy.values()) / len(accuracy)

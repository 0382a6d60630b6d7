"""`python -m kvpolicy_eval.table`: what the embedded model still answers under each policy.

Every prompt ends with its question, is compressed to the budget, and is answered greedily; an answer counts when all
of its digits (or its label) are right. Rows run in padded batches, and bytes are those of the whole batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch

import kvpolicy
from kvpolicy_eval.data.prompts import Prompt
from kvpolicy_eval.markdown import fill, table
from kvpolicy_eval.train.ablate import tasks

SELECTORS = ["window", "streaming", "h2o", "snapkv:kernel=7", "tova", "kvcrush/snapkv:kernel=7"]
ALLOCATORS = ["", "squeeze+"]
BUDGETS = [0.3, 0.2, 0.1]
BATCH = 16
HELD_BACK = {"few_shot": 1}
"""Tokens at the end of a prompt that wait until the rest is compressed: the first token of an answer comes from the
full prompt, so an answer of one token would show no effect at all."""


class Examiner:
    """The embedded model and its exam: some prompts of every task.

    Args:
        docs: Prompts per task.
        length: About how many tokens a prompt has, 512 or 1,024.
        dtype: Of the model and its stock cache.
    """

    def __init__(self, docs: int, length: int, dtype: torch.dtype = torch.float32) -> None:
        """Load the model and write the exam."""
        self.model, self.tokenizer = kvpolicy.tiny(dtype)
        self.tokenizer.padding_side = "left"
        self.exam = {
            name: [draw(Random(1_000 * length + doc)) for doc in range(docs)] for name, draw in tasks(length).items()
        }

    def marks(self, policy: str, share: float | None = None) -> tuple[dict[str, float], float]:
        """Share of right answers per task, and bytes held over the full cache's.

        Args:
            policy: The policy, without a budget where `share` is given.
            share: Of the full cache's bytes, in place of a budget.
        """
        right: dict[str, float] = {}
        held = full = 0
        with kvpolicy.attach(self.model, policy), torch.inference_mode():
            for name, prompts in self.exam.items():
                hits = 0
                for start in range(0, len(prompts), BATCH):
                    some, back = prompts[start : start + BATCH], HELD_BACK.get(name, 0)
                    counts = self._answer(some, back, None if share is None else (policy, share))
                    hits, held, full = hits + counts[0], held + counts[1], full + counts[2]
                right[name] = hits / len(prompts)
        return right, held / full

    def _answer(
        self, prompts: list[Prompt], held_back: int, sized: tuple[str, float] | None = None
    ) -> tuple[int, int, int]:
        """Right answers, bytes held after the prompt, and bytes that the stock cache would hold of the same batch."""
        texts, answers = [prompt for prompt, _ in prompts], [answer for _, answer in prompts]
        batch: Any = self.tokenizer(texts, return_tensors="pt", padding=True)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        longest = max(len(self.tokenizer(answer, add_special_tokens=False).input_ids) for answer in answers)
        read = ids.shape[1] - held_back
        columns = ids.shape[1] + longest - 1
        stock = kvpolicy.plan(
            self.model.config, "full", batch=len(ids), prompt=columns, dtype=self.model.dtype
        ).full_nbytes
        policy = None if sized is None else f"{sized[0]}@{int(sized[1] * stock)}B"
        cache = kvpolicy.PolicyCache(self.model, policy, prompt=mask[:, :read].sum(-1), new=longest + held_back)
        if held_back:
            places = (mask.cumsum(-1) - 1).clamp_min(0)[:, :read]
            self.model(ids[:, :read], attention_mask=mask[:, :read], position_ids=places, past_key_values=cache)
        how: dict[str, Any] = {"max_new_tokens": longest, "do_sample": False, "past_key_values": cache}
        out = self.model.generate(input_ids=ids, attention_mask=mask, **how)
        said = self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        hits = sum(text.strip().startswith(answer) for text, answer in zip(said, answers, strict=True))
        return hits, cache.nbytes, stock


def policies() -> Iterable[tuple[str, list[str]]]:
    """Allocator and selector, and the policy at each budget."""
    for selector in SELECTORS:
        for allocator in ALLOCATORS:
            yield f"{allocator}{selector}", [f"{allocator}{selector}@{budget}" for budget in BUDGETS]


def examine(examiner: Examiner) -> tuple[str, str]:
    """The table of means over tasks and budgets, and the table of every task."""
    marks, share = examiner.marks("full")
    means = [["`full`", *[_mean(marks)] * len(BUDGETS), f"{share:.2f}"]]
    every = [_line("full", marks)]
    for name, at in policies():
        line: list[str] = []
        for policy in at:
            marks, share = examiner.marks(policy)
            line.append(_mean(marks))
            every.append(_line(policy, marks))
            print(f"{policy}: {line[-1]}, {share:.2f} of the bytes", file=sys.stderr, flush=True)
        means.append([f"`{name}`", *line, f"{share:.2f}"])
    budgets = [f"budget {budget:.0%}" for budget in BUDGETS]
    head = ["policy", *budgets, f"bytes held at {BUDGETS[-1]:.0%}, of the full cache"]
    return table(head, means), table(["policy", *examiner.exam], every)


def main() -> None:
    """Print both tables, and fill pages with them where asked."""
    parser = argparse.ArgumentParser(prog="python -m kvpolicy_eval.table", description=__doc__)
    parser.add_argument("--n", type=int, default=32, help="prompts per task")
    parser.add_argument("--length", type=int, default=512, choices=[512, 1024], help="tokens of a prompt, about")
    parser.add_argument("--fill", type=Path, nargs="+", default=[], help="pages with a place for the table 'embedded'")
    parser.add_argument("--fill-tasks", type=Path, help="a page with a place for the table 'tasks'")
    args = parser.parse_args()
    examiner = Examiner(args.n, args.length)
    means, every = examine(examiner)
    means += f"\n\nMean exact match over {', '.join(examiner.exam)}; {args.n} prompts of about {args.length} tokens."
    print(f"{means}\n\n{every}")
    for page in args.fill:
        fill(page, "embedded", means)
    if args.fill_tasks:
        fill(args.fill_tasks, "tasks", every)


def _mean(marks: dict[str, float]) -> str:
    return f"{sum(marks.values()) / len(marks):.2f}"


def _line(policy: str, marks: dict[str, float]) -> list[str]:
    return [f"`{policy}`", *(f"{mark:.2f}" for mark in marks.values())]


if __name__ == "__main__":
    main()

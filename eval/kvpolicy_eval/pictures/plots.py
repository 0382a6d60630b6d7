"""Pictures by `kvpolicy.plots`, from runs of the embedded model."""

from __future__ import annotations

import functools
import math
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure

import kvpolicy
from kvpolicy.hf.embedded import config_of
from kvpolicy.reporting import plots
from kvpolicy.reporting.token_spans import pieces
from kvpolicy_eval.common.accuracy import TaskEvaluator
from kvpolicy_eval.common.conversation import run
from kvpolicy_eval.pictures.scene import BUDGET, SEED, cache_under, embedded
from kvpolicy_eval.pictures.style import Draw
from kvpolicy_lm_eval.data.prompts import recall

POLICY = f"squeeze+snapkv@{BUDGET}"
KIVI = "kivi:bits=4:group_size=16:residual_length=8"
EVALUATED = (
    "full",
    KIVI,
    *(f"{method}@{budget}" for method in ("streaming", "snapkv", "squeeze+snapkv") for budget in (0.4, 0.2, 0.1)),
    *(f"squeeze+snapkv+{KIVI}@{budget}" for budget in (0.4, 0.2)),
)
"""Policies whose accuracy is drawn."""
DOCS = 16
"""Prompts per task."""


def similarity() -> Figure:
    """Cosines of the layers on the first prompt of each task."""
    evaluator = task_evaluator()
    rows: list[Any] = []
    for prompts in evaluator.prompts.values():
        ids = evaluator.tokenizer(prompts[0][0], return_tensors="pt").input_ids
        rows += run(evaluator.model, "squeeze+window@1.0", [ids]).cache.cosines().tolist()
    return plots.layer_similarity(rows, names=list(evaluator.prompts))


def budgets() -> Figure:
    """Budgets of three allocators."""
    return plots.budgets({name: cache_under(f"{name}+snapkv@{BUDGET}") for name in ("uniform", "pyramid", "squeeze")})


def kept() -> Figure:
    """Kept positions of each layer."""
    return plots.kept(cache_under(POLICY))


@torch.inference_mode()
def text() -> Figure:
    """Kept tokens of a short text."""
    model, tokenizer = embedded()
    ids = tokenizer(recall(Random(SEED), 10)[0], return_tensors="pt").input_ids
    with kvpolicy.attach(model, POLICY) as handle:
        model(ids)
    return plots.token_text(handle, pieces(tokenizer, ids[0].tolist()))


def sizes() -> Figure:
    """Bytes of a large model's cache by kind."""
    config = config_of("llama-3-70b")
    policies = ["h2o@0.2", "kivi:bits=4", "h2o+kivi:bits=4@0.2"]
    return plots.bytes_by_kind({policy: kvpolicy.plan(config, policy, prompt=4096, new=512) for policy in policies})


def accuracy() -> Figure:
    """Accuracy and bytes of each policy."""
    return plots.accuracy_against_bytes([row for policy in EVALUATED for row in accuracy_rows(policy)])


@functools.cache
def task_evaluator() -> TaskEvaluator:
    """The model with prompts of every task."""
    return TaskEvaluator(DOCS, 512)


def accuracy_rows(policy: str) -> list[dict[str, Any]]:
    """One row per task, in the format of `accuracy_against_bytes`."""
    by_task, byte_share = task_evaluator().accuracy(policy)
    rows: list[dict[str, Any]] = []
    for task, right in by_task.items():
        low, high = wilson(right, DOCS)
        rows.append({"policy": policy, "task": task, "accuracy": right, "low": low, "high": high, "share": byte_share})
    return rows


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of right answers, 95 % by default.

    Args:
        share: Share of right answers.
        count: Number of answers.
        z: Quantile of the normal distribution.

    Examples:
        >>> [round(end, 2) for end in wilson(0.5, 16)]
        [0.28, 0.72]
    """
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half_width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return center - half_width, center + half_width


PICTURES: dict[str, Draw] = {
    "plot-similarity": similarity,
    "plot-budgets": budgets,
    "plot-kept": kept,
    "plot-text": text,
    "plot-bytes": sizes,
    "plot-accuracy": accuracy,
}
"""Pictures by name."""

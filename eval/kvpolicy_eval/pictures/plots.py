"""What `kvpolicy.plots` draws, of runs of the embedded model."""

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
from kvpolicy_eval.data.prompts import recall
from kvpolicy_eval.pictures.common import Draw
from kvpolicy_eval.pictures.scene import BUDGET, SEED, embedded, scene
from kvpolicy_eval.table import Examiner

POLICY = f"squeeze+snapkv@{BUDGET}"
KIVI = "kivi:bits=4:group_size=16:residual_length=8"
EXAMINED = (
    "full", KIVI,
    *(f"{method}@{share}" for method in ("streaming", "snapkv", "squeeze+snapkv") for share in (0.4, 0.2, 0.1)),
    *(f"squeeze+snapkv+{KIVI}@{share}" for share in (0.4, 0.2)),
)  # fmt: skip
DOCS = 16
"""Prompts of each task."""


@functools.cache
@torch.inference_mode()
def cache_under(policy: str) -> Any:
    """The cache after the scene's prompt."""
    model, _ = embedded()
    with kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=len(scene().answer))
        model(scene().ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def similarity() -> Figure:
    """Cosines on the first prompt of each task."""
    examiner, rows = exam(), list[Any]()
    with kvpolicy.attach(examiner.model, "squeeze+window@1.0"):
        for texts in examiner.exam.values():
            cache = kvpolicy.PolicyCache(examiner.model)
            examiner.model(examiner.tokenizer(texts[0][0], return_tensors="pt").input_ids, past_key_values=cache)
            rows += cache.cosines().tolist()
    return plots.layer_similarity(rows, names=list(examiner.exam))


def budgets() -> Figure:
    """Three allocators' budgets."""
    return plots.budgets({name: cache_under(f"{name}+snapkv@{BUDGET}") for name in ("uniform", "pyramid", "squeeze")})


def kept() -> Figure:
    """Where tokens are kept."""
    return plots.kept(cache_under(POLICY))


@torch.inference_mode()
def text() -> Figure:
    """Which tokens of a short text are kept."""
    model, tokenizer = embedded()
    ids = tokenizer(recall(Random(SEED), 10)[0], return_tensors="pt").input_ids
    with kvpolicy.attach(model, POLICY) as handle:
        model(ids)
    return plots.token_text(handle, pieces(tokenizer, ids[0].tolist()))


def sizes() -> Figure:
    """Bytes of a large model's cache."""
    config, policies = config_of("llama-3-70b"), ["h2o@0.2", "kivi:bits=4", "h2o+kivi:bits=4@0.2"]
    return plots.bytes_by_kind({words: kvpolicy.plan(config, words, prompt=4096, new=512) for words in policies})


def accuracy() -> Figure:
    """What each policy still answers, and the bytes that it holds."""
    return plots.accuracy_against_bytes([row for policy in EXAMINED for row in marked(policy)])


@functools.cache
def exam() -> Examiner:
    """The model and prompts of every task."""
    return Examiner(DOCS, 512)


def marked(policy: str) -> list[dict[str, Any]]:
    """A row for each task."""
    marks, share = exam().marks(policy)
    rows: list[dict[str, Any]] = []
    for task, right in marks.items():
        low, high = wilson(right, DOCS)
        rows.append({"policy": policy, "task": task, "accuracy": right, "low": low, "high": high, "share": share})
    return rows


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` answers.

    Examples:
        >>> [round(end, 2) for end in wilson(0.5, 16)]
        [0.28, 0.72]
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return middle - reach, middle + reach


PICTURES: dict[str, Draw] = {
    "plot-similarity": similarity,
    "plot-budgets": budgets,
    "plot-kept": kept,
    "plot-text": text,
    "plot-bytes": sizes,
    "plot-accuracy": accuracy,
}

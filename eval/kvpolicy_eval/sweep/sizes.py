"""Sizes of tasks and configs of models, as far as they are known without a download."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvpolicy_eval.sweep.modes import split_task

TOKENS_PER_WORD = 1.4
"""Tokens of a word of English text: an assumption, since tokenizers differ."""
TOKENS_PER_WORD_OF_CODE = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSize:
    """The size of a task.

    Attributes:
        examples: How many it has.
        tokens: Mean length of a prompt, in tokens.
        new: The most tokens that an answer may have.
    """

    examples: int
    tokens: int
    new: int


def task_size(name: str, metadata: Mapping[str, Any]) -> TaskSize | None:
    """The size of a task; None if it is not known.

    Args:
        name: lm-eval's name of the task.
        metadata: Of the sweep; RULER's tasks take their length from it.

    Examples:
        >>> task_size("longbench_samsum", {})
        TaskSize(examples=200, tokens=8761, new=128)
        >>> task_size("niah_single_1", {"max_seq_lengths": [4096]})
        TaskSize(examples=500, tokens=3968, new=128)
    """
    known = _sizes()["tasks"]
    found = known.get(name) or known.get(split_task(name)[0])  # variants have the size of their task
    if found is None:
        return None
    if "tokens" in found:
        return TaskSize(examples=found["examples"], tokens=found["tokens"], new=found["new"])
    if "words" in found:
        each = TOKENS_PER_WORD_OF_CODE if found.get("code") else TOKENS_PER_WORD
        return TaskSize(examples=found["examples"], tokens=round(found["words"] * each), new=found["new"])
    lengths = metadata.get("max_seq_lengths")
    if not isinstance(lengths, list) or not all(isinstance(length, int) for length in lengths) or not lengths:
        return None
    # The answer is a part of RULER's length, and each length has as many examples.
    mean = round(sum(lengths) / len(lengths)) - found["new"]
    return TaskSize(examples=found["examples"] * len(lengths), tokens=mean, new=found["new"])


def model_config(pretrained: str | None) -> Any | None:
    """The config of a model: known, in a folder, or in the Hub's cache on this machine; None if it is none of these.

    Args:
        pretrained: A name on the Hub or a folder; None for the embedded model.

    Examples:
        >>> model_config("EleutherAI/gpt-neox-20b").num_hidden_layers, model_config("nobody/nothing")
        (44, None)
    """
    from transformers import AutoConfig

    from kvpolicy.hf.embedded import config_of

    if pretrained is None:
        return config_of("tiny")
    if pretrained in _sizes()["models"]:
        return AutoConfig.for_model(**_sizes()["models"][pretrained])
    if Path(pretrained).exists():
        return config_of(pretrained)
    try:
        return AutoConfig.from_pretrained(pretrained, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


@functools.cache
def _sizes() -> dict[str, Any]:
    return yaml.safe_load((files("kvpolicy_eval.sweep") / "sizes.yaml").read_text(encoding="utf-8"))

"""Documents and scores of the tasks `kvpolicy_ruler_4096`, kvpress' leaderboard: RULER, with the question fed later.

The documents are those of the leaderboard's dataset where the Hub can be reached, and prompts of
`kvpolicy_lm_eval.data.ruler` elsewhere. Each says which, by its key `source`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_lm_eval.data import ruler
from kvpolicy_lm_eval.task_tokenizer import tokenizer_of

log = logging.getLogger("lm_eval.kvpolicy")

DATASET = "simonjegou/ruler"
"""The dataset of the leaderboard, made with the tokenizer of Llama-3.1-8B."""
COLUMNS = ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens")
"""Its columns that are read."""
HUB_LENGTHS = (4096, 8192, 16384)
"""Its prompt lengths."""

Source = Literal["auto", "hub", "own"]
Document = dict[str, Any]

_OWN = 'try source=own in --metadata, as in \'{"source": "own"}\'.'
_CONTROL = re.compile(r"[\x00-\x1f]")


def documents(
    name: str,
    length: int,
    docs: int,
    seed: int,
    source: Source = "auto",
    **model: Any,
) -> list[Document]:
    """The documents of a task.

    Args:
        name: Task of RULER.
        length: Tokens of a prompt and its answer.
        docs: Number of our own documents; the dataset has 500.
        seed: Source of randomness of our own documents.
        source: `hub` for the dataset, `own` for our own documents, `auto` for the first of them that there is.
        **model: Arguments of the model, whose tokenizer sizes our own documents; an embedded one by default.

    Raises:
        KVPolicyError: If `source` is unknown, `length` too small, or the dataset has other columns or cannot be read.
    """
    if source not in get_args(Source):
        raise KVPolicyError(f"source must be auto, hub or own, got {source!r}; try auto.")
    if source == "hub" or (source == "auto" and length in HUB_LENGTHS and _reaches_hub(length)):
        return [document for row in _dataset(length) if row["task"] == name for document in [_from_hub(row)]]
    own = tokenizer_of(model)
    try:
        found = ruler.prompts(name, length, docs, seed, lambda text: len(own(text, verbose=False).input_ids))
    except ValueError as error:
        raise KVPolicyError(str(error)) from error
    return [_document(each, "own") for each in found]


def score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The fraction of the strings that the answer contains."""
    found = _found(document, results[0])
    return {"string_match": sum(found) / len(found)}


def score_any(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer contains one of the strings."""
    return {"string_match": float(any(_found(document, results[0])))}


def _found(document: Mapping[str, Any], answer: str) -> list[bool]:
    """Whether an answer contains each of the strings, as kvpress compares them."""
    said = _CONTROL.sub("", answer.strip()).strip().lower()
    return [text.lower() in said for text in document["answers"]]


def _document(prompt: ruler.Divided, source: Source) -> Document:
    return {
        "prompt": prompt.context + prompt.question,
        "held_back": prompt.question,
        "beyond": True,
        "prefix": prompt.prefix,
        "answers": prompt.answers,
        "source": source,
    }


def _from_hub(row: Mapping[str, Any]) -> Document:
    answers = [str(answer) for answer in row["answer"]]
    return _document(ruler.Divided(row["context"], row["question"], row["answer_prefix"], answers), "hub")


def _reaches_hub(length: int) -> bool:
    found = _try_dataset(length)
    if isinstance(found, ConnectionError):
        log.warning("RULER: own documents, since the dataset %s cannot be reached: %s", DATASET, found)
    return not isinstance(found, ConnectionError)


def _dataset(length: int) -> Sequence[Mapping[str, Any]]:
    """The dataset; the tasks of a group ask for it one after the other."""
    found = _try_dataset(length)
    if isinstance(found, Exception):
        reason = str(found).partition("\n")[0]
        raise KVPolicyError(f"The dataset {DATASET} must be readable, got {reason!r}; {_OWN}") from found
    return found


@functools.cache
def _try_dataset(length: int) -> Sequence[Mapping[str, Any]] | Exception:
    """The dataset, or the error of the attempt to load it."""
    import datasets

    try:
        found: Any = datasets.load_dataset(DATASET, data_dir=str(length), split="test")
    except (OSError, ValueError) as error:  # not reached, not there, or no such split
        return error
    lacking = [column for column in COLUMNS if column not in found.column_names]
    if lacking:
        raise KVPolicyError(
            f"The dataset {DATASET} must have the columns {', '.join(COLUMNS)}, got none named {lacking[0]}; {_OWN}"
        )
    return found

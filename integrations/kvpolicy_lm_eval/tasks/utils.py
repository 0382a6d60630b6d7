"""Documents of kvpolicy's tasks. They need no network access, and are the same on every machine.

lm-eval calls each function with the metadata of the task, merged with the arguments of the model, which `**_` ignores.
`mode` is the place of the question, see `kvpolicy_lm_eval.data.modes`: the model `kvpolicy` feeds the text `held_back`
of a document after it has compressed what precedes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from random import Random
from typing import Any

from datasets import Dataset

from kvpolicy.text.errors import KVPolicyError
from kvpolicy_lm_eval import ruler as leaderboard
from kvpolicy_lm_eval import scbench as shared_contexts
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.data import steps as derivations
from kvpolicy_lm_eval.data.modes import place
from kvpolicy_lm_eval.data.text import held_out
from kvpolicy_lm_eval.task_tokenizer import OF_TOKENIZER

Splits = dict[str, Dataset]

_OWN_DOCUMENTS = 5_000
"""Added to the seeds of documents whose question is not inside.

Equal prompts would have equal keys in lm-eval's request cache, which would answer them alike in every mode.
"""

_SHOT = re.compile(r"[a-z]+\W+([A-Z])\W*")
"""An example of the few-shot task: a word and its label."""


def recall(
    docs: int, seed: int, records: int, digits: int = 4, chars: int = 0, mode: str = "inside", **_: Any
) -> Splits:
    """Prompts that ask for one of many records."""
    return _splits(_rows(docs, seed, lambda rng: prompts.recall(rng, records, digits, chars), mode))


def multi_query(
    docs: int,
    seed: int,
    records: int,
    queries: int,
    digits: int = 4,
    chars: int = 0,
    mode: str = "inside",
    **_: Any,
) -> Splits:
    """Prompts with several questions about many records; the last one is to be answered."""
    return _splits(_rows(docs, seed, lambda rng: prompts.multi_query(rng, records, queries, digits, chars), mode))


def passkey(docs: int, seed: int, chars: int, digits: int = 5, mode: str = "inside", **_: Any) -> Splits:
    """Prompts that ask for a key hidden in source code."""
    return _splits(_rows(docs, seed, lambda rng: prompts.passkey(rng, chars, digits), mode))


def hot_keys(
    docs: int,
    seed: int,
    records: int,
    hot: int,
    asks: int,
    fresh: int,
    digits: int = 4,
    chars: int = 0,
    mode: str = "inside",
    **_: Any,
) -> Splits:
    """Prompts that ask for a record that was asked for often, followed by many new records."""
    return _splits(_rows(docs, seed, lambda rng: prompts.hot_keys(rng, records, hot, asks, fresh, digits, chars), mode))


def few_shot(docs: int, seed: int, classes: int, shots: int, chars: int, mode: str = "inside", **_: Any) -> Splits:
    """Prompts that ask for the label of a word, after examples at the start."""
    rows = _rows(docs, seed, lambda rng: prompts.few_shot(rng, classes, shots, chars), mode)
    return _splits([row | _choices(row) for row in rows])


def held_out_text(docs: int, chars: int, **_: Any) -> Splits:
    """Equidistant excerpts of text that the embedded model was not trained on; each begins with a whole line."""
    text = held_out()
    step = (len(text) - chars) // docs
    if step < chars:
        raise KVPolicyError(f"The texts must not overlap, got {docs} of {chars} characters; try fewer or shorter ones.")
    starts = [text.index("\n", i * step) + 1 for i in range(docs)]
    return _splits([{"text": text[start : start + chars]} for start in starts])


def steps(docs: int, seed: int, steps: int, shots: int, **_: Any) -> Splits:
    """Prompts whose answers are many lines, each of which takes the one before."""
    drawn = [derivations.sums(Random(seed * 10_000 + doc), steps, shots) for doc in range(docs)]
    return _splits(
        [{"prompt": one.text, "lines": one.lines, "answer": "\n".join(one.lines).removeprefix("0 +")} for one in drawn]
    )


def right_steps(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The fraction of the lines that an answer has before its first mistake."""
    return {"right_steps": derivations.right_steps(document["lines"], results[0])}


_OF_RULER = ("source", *OF_TOKENIZER)
"""Arguments of the model that the size of a prompt depends on, and where the documents come from."""


def ruler(name: str, length: int, docs: int, seed: int, **options: Any) -> Splits:
    """Prompts of a task of RULER."""
    known = {option: options[option] for option in _OF_RULER if option in options}
    return _splits(leaderboard.documents(name, length, docs, seed, **known))


def string_match(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The fraction of the right strings that an answer contains."""
    return leaderboard.score(document, results)


def string_match_any(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether an answer contains one of the right strings."""
    return leaderboard.score_any(document, results)


_OF_SCBENCH = ("dataset", "chat", "max_length", "enable_thinking", "chat_template_args", *OF_TOKENIZER)
"""Arguments of the model that a prompt depends on, and which dataset it comes from."""


def scbench(subset: str, mode: Any, length: int, **options: Any) -> Splits:
    """The turns of a subset of SCBench."""
    known = {option: options[option] for option in _OF_SCBENCH if option in options}
    return _splits(shared_contexts.documents(subset, mode, length, **known))


def scbench_score(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float | None]:
    """The score of an answer to a turn of SCBench, also under the number of the turn."""
    return shared_contexts.score(document, results)


def mean_of_turn(values: Sequence[float | None]) -> float:
    """The mean over the documents of a turn."""
    return shared_contexts.mean_of_turn(values)


def _rows(docs: int, seed: int, draw: Callable[[Random], prompts.Prompt], mode: str) -> list[dict[str, Any]]:
    start = seed * 10_000 + (0 if mode == "inside" else _OWN_DOCUMENTS)
    pairs = [draw(Random(start + doc)) for doc in range(docs)]  # the first documents do not depend on `docs`
    if mode == "inside":
        return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]
    placed = [place(pair, mode) for pair in pairs]
    return [{"prompt": one.compressed + one.fed, "answer": one.answer, "held_back": one.fed} for one in placed]


def _splits(rows: list[dict[str, Any]]) -> Splits:
    return {"test": Dataset.from_list(rows)}


def _choices(row: dict[str, str]) -> dict[str, Any]:
    shots = takewhile(bool, map(_SHOT.fullmatch, row["prompt"].splitlines()))
    choices = sorted({shot[1] for shot in shots if shot})
    return {"choices": choices, "label": choices.index(row["answer"])}

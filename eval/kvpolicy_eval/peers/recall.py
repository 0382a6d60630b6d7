"""Accuracy of the embedded model at equal bytes, which are counted after the answer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from kvpolicy_eval.peers.pair import Line, Options, Pair, Question, attention_for, embedded_model, questions
from kvpolicy_eval.peers.process import Failed, Process

OURS = [
    "full",
    "kivi:bits=4",
    "snapkv:kernel=5",
    "snapkv",
    "tova",
    "streaming",
    "knorm",
    "h2o",
    "squeeze+snapkv",
    "squeeze+kvcrush/snapkv",
    "squeeze+kvcrush/snapkv+kivi:bits=4",
    "tokenwise:bits=4",
    "snapkv+tokenwise:bits=4",
    "squeeze+kvcrush/snapkv+tokenwise:bits=4",
    "snapkv+tokenwise:bits=4:residual_length=0:block_size=4",
    "squeeze+snapkv+tokenwise:bits=4:residual_length=0:block_size=4",
]
"""Specs of our policies."""
THEIRS = [
    "",
    "quanto-4",
    "hqq-4",
    "snapkv:window_size=32",
    "snapkv:window_size=32:kernel_size=7",
    "tova",
    "streaming",
    "knorm",
    "observed",
    "expected",
    "keydiff",
    "pyramid:window_size=32:kernel_size=7",
    "ada/snapkv:window_size=32:kernel_size=7",
    "snapkv:window_size=32:kernel_size=7+quanto-4",
]
"""Methods of the other side, see `kvpolicy_eval.peers.theirs.Theirs`."""
WITHOUT_BUDGET = ("", "full", "quanto-4", "hqq-4", "kivi:bits=4", "tokenwise:bits=4")
"""Methods of either side that keep every token."""
BYTE_SHARES = (0.3, 0.2, 0.1)
TASKS = ("recall", "multi_query", "passkey", "needles", "hot_keys")
TOKEN_BYTES = 2 * 8 * 4 * 32 * 2
"""Bytes of a token in the full cache of the embedded model: keys and values, layers, KV heads, head dim, bf16."""


def recall(pair: Pair, options: Options) -> Iterator[Line]:
    """Accuracy of all methods of both sides."""
    exam = questions(options.n, TASKS)
    sides = [("ours", pair.ours, OURS), ("theirs", pair.theirs, THEIRS)]
    with embedded_model() as path:
        for side, process, methods in sides:
            for method in methods:
                attention = attention_for(method)
                process.ask("load", path=str(path), dtype="bfloat16", attention=attention, threads=options.threads)
                for share in (None,) if method in WITHOUT_BUDGET else BYTE_SHARES:
                    result = _accuracy(process, exam, method, share)
                    yield {"side": side, "method": method or "full", "share": share} | result


def _accuracy(process: Process, exam: list[Question], method: str, share: float | None) -> Line:
    """Accuracy of one method.

    Args:
        process: Of one side.
        exam: The prompts.
        method: The method.
        share: Limit of the cache, as a share of the full cache's bytes; None for a method without a budget.
    """
    held_bytes = 0
    full_bytes = 0
    right: dict[str, list[bool]] = {}
    for task, ids, answer in exam:
        size = (len(ids) + len(answer) - 1) * TOKEN_BYTES
        limit = None if share is None else int(share * size)
        try:
            result = process.ask("answer", ids=[ids], method=method, limit=limit, new=len(answer))
        except Failed as error:
            return {"error": str(error)}
        right.setdefault(task, []).append(result["ids"] == answer)
        held_bytes += result["held"]
        full_bytes += size
    tasks = {task: sum(hits) / len(hits) for task, hits in right.items()}
    return {"right": statistics.mean(tasks.values()), "tasks": tasks, "held": held_bytes / full_bytes, "n": len(exam)}

"""What both sides are asked."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvpolicy_eval.peers.process import Failed, Process

Line = dict[str, Any]


class Pair(NamedTuple):
    """Both sides."""

    ours: Process
    theirs: Process

    def load(self, path: str | Path, **how: Any) -> None:
        """Let both load the same weights."""
        for side in self:
            side.ask("load", path=str(path), **how)


class Options(NamedTuple):
    """How much is measured.

    Attributes:
        n: Prompts per task.
        lengths: Of the prompts that are timed.
        rounds: Times that each is timed.
        threads: Of torch, in each process.
        layers: Of the random Llama that is timed.
        hidden: Its hidden size, of heads of 64 and a quarter as many KV heads.
        steps: Tokens decoded for a time.
    """

    n: int = 16
    lengths: tuple[int, ...] = (2048, 8192, 16384)
    rounds: int = 3
    threads: int = 1
    layers: int = 4
    hidden: int = 512
    steps: int = 16


KEPT = [
    ("SnapKV", "snapkv:window=64:decode=grow", "snapkv"),
    ("SnapKV, window 16", "snapkv:window=16:decode=grow", "snapkv:window_size=16"),
    ("TOVA", "tova", "tova"),
    ("StreamingLLM", "streaming:sinks=4", "streaming"),
    ("Knorm", "knorm", "knorm"),
    ("H2O and ObservedAttention", "h2o", "observed"),
    ("H2O without its window", "h2o:recent=0", "observed"),
    ("ObservedAttention through our adapter", "averaged", "observed"),
]
"""Method, our words, their press."""
SHARES = (0.5, 0.2, 0.1)


def kept(pair: Pair, options: Options) -> Iterator[Line]:
    """How far kept positions agree, on prompts of the embedded model."""
    prompts = [ids for _, ids, _ in _exam(max(options.n // 4, 2), ("recall", "passkey"))]
    with _tiny() as path:
        for name, ours, theirs in KEPT:
            pair.load(path, attention="eager" if theirs == "observed" else "sdpa", threads=options.threads)
            for share in SHARES:
                each = [_overlap(pair, ids, ours, theirs, int(len(ids) * share)) for ids in prompts]
                mean = {key: sum(one[key] for one in each) / len(each) for key in each[0]}
                yield {"method": name, "ours": ours, "theirs": theirs, "share": share, "prompts": len(prompts)} | mean


def _overlap(pair: Pair, ids: list[int], ours: str, theirs: str, keep: int) -> dict[str, float]:
    """How far the positions of a prompt agree, and where they do not.

    Returns:
        The mean `overlap` of a head's positions, the share of heads that are the `same` to the last, and of the
        positions that only we keep, the share that is of a token equal to one that only they keep (`ties`), and the
        share within two of the last 16 (`edge`).
    """
    found = [
        side.ask("kept", ids=[ids], method=method, keep=keep)["kept"]
        for side, method in zip(pair, (ours, theirs), strict=True)
    ]
    heads = [(set(x), set(y)) for p, q in zip(*found, strict=True) for x, y in zip(p, q, strict=True)]
    only = [(x - y, {ids[place] for place in y - x}) for x, y in heads]
    ours_only = [(place, ids[place] in tokens) for places, tokens in only for place in places]
    count, edge = max(len(ours_only), 1), range(len(ids) - 18, len(ids) - 16)
    return {
        "overlap": sum(len(x & y) / len(y) for x, y in heads) / len(heads),
        "same": sum(x == y for x, y in heads) / len(heads),
        "ties": sum(tie for _, tie in ours_only) / count,
        "edge": sum(place in edge for place, _ in ours_only) / count,
    }


RECALL_OURS = [
    "full", "kivi:bits=4", "snapkv", "snapkv:kernel=7", "tova", "streaming", "knorm", "h2o",
    "squeeze+snapkv:kernel=7", "squeeze+kvcrush/snapkv:kernel=7", "squeeze+kvcrush/snapkv:kernel=7+kivi:bits=4",
    "tokenwise:bits=4", "snapkv:kernel=7+tokenwise:bits=4", "squeeze+kvcrush/snapkv:kernel=7+tokenwise:bits=4",
    "snapkv:kernel=7+tokenwise:bits=4:residual_length=0:block_size=4",
    "squeeze+snapkv:kernel=7+tokenwise:bits=4:residual_length=0:block_size=4",
]  # fmt: skip
RECALL_THEIRS = [
    "", "quanto-4", "hqq-4", "snapkv:window_size=32", "snapkv:window_size=32:kernel_size=7", "tova", "streaming",
    "knorm", "observed", "expected", "keydiff", "pyramid:window_size=32:kernel_size=7",
    "ada/snapkv:window_size=32:kernel_size=7", "snapkv:window_size=32:kernel_size=7+quanto-4",
]  # fmt: skip
AS_IT_IS = ("", "full", "quanto-4", "hqq-4", "kivi:bits=4", "tokenwise:bits=4")
TASKS = ("recall", "multi_query", "passkey", "needles", "hot_keys")


def recall(pair: Pair, options: Options) -> Iterator[Line]:
    """Right answers of the embedded model at equal bytes, held once the answer is out."""
    exam = _exam(options.n, TASKS)
    sides = [("ours", pair.ours, RECALL_OURS), ("theirs", pair.theirs, RECALL_THEIRS)]
    with _tiny() as path:
        for side, process, methods in sides:
            for method in methods:
                attention = "eager" if method == "observed" else "sdpa"
                process.ask("load", path=str(path), dtype="bfloat16", attention=attention, threads=options.threads)
                for share in (None,) if method in AS_IT_IS else (0.3, 0.2, 0.1):
                    yield {"side": side, "method": method or "full", "share": share} | _marks(
                        process, exam, method, share
                    )


def _marks(process: Process, exam: list[tuple[str, list[int], list[int]]], method: str, share: float | None) -> Line:
    token = 2 * 8 * 4 * 32 * 2  # bytes of a token of the embedded model in bf16
    held = full = 0
    right: dict[str, list[bool]] = {}
    for task, ids, answer in exam:
        size = (len(ids) + len(answer) - 1) * token
        limit = None if share is None else int(share * size)
        try:
            got = process.ask("answer", ids=[ids], method=method, limit=limit, new=len(answer))
        except Failed as error:
            return {"error": str(error)}
        right.setdefault(task, []).append(got["ids"] == answer)
        held, full = held + got["held"], full + size
    tasks = {task: sum(marks) / len(marks) for task, marks in right.items()}
    return {"right": statistics.mean(tasks.values()), "tasks": tasks, "held": held / full, "n": len(exam)}


SPEED = [
    ("full cache", "full", "full"),
    ("SnapKV", "snapkv:window=64:decode=grow", "snapkv"),
    ("StreamingLLM", "streaming:decode=grow", "streaming"),
    ("Knorm", "knorm", "knorm"),
    ("H2O and ObservedAttention", "h2o:decode=grow", "observed"),
    ("SnapKV by heads (AdaKV)", "", "ada/snapkv"),
    ("SnapKV and 4 bits", "snapkv:window=64+kivi:bits=4", "snapkv+quanto-4"),
]
LARGEST = {"observed": 4096}
"""Longest prompt that a method is timed at: an attention matrix of 16k tokens is 8 GiB a layer."""


def speed(pair: Pair, options: Options) -> Iterator[Line]:
    """Prefill and decode times and peak memory of a random Llama, both sides in turn."""
    import tempfile

    with tempfile.TemporaryDirectory() as path:
        _random_llama(path, options)
        for name, ours, theirs in SPEED:
            attention = "eager" if theirs == "observed" else "sdpa"
            pair.ours.ask("load", path=path, threads=options.threads)
            pair.theirs.ask("load", path=path, threads=options.threads, attention=attention)
            for length in options.lengths:
                yield {"method": name, "length": length, "share": 0.2, "threads": options.threads} | _in_turn(
                    pair, ours, theirs, length, options
                )


def _in_turn(pair: Pair, ours: str, theirs: str, length: int, options: Options) -> Line:
    times: dict[str, list[Line]] = {"ours": [], "theirs": []}
    errors: Line = {}
    for number in range(options.rounds + 1):  # the first warms up
        sides = [("ours", pair.ours, ours), ("theirs", pair.theirs, theirs)]
        for side, process, method in sides if number % 2 else sides[::-1]:
            if not method or side in errors or length > LARGEST.get(method, length):
                continue
            try:
                got = process.ask("time", method=method, length=length, share=0.2, steps=options.steps)
            except Failed as error:
                errors[side] = {"error": str(error)}
                continue
            times[side] += [got] if number else []
    return {side: _median(each) for side, each in times.items() if each} | errors


def _median(each: list[Line]) -> Line:
    return {key: None if each[0][key] is None else statistics.median(one[key] for one in each) for key in each[0]}


_SNAP = ("snapkv:window=8:decode=grow", "snapkv:window_size=8")
_HEADS = ("", "ada/snapkv:window_size=8")
TRAPS: list[tuple[str, str, tuple[str, str], dict[str, Any]]] = [
    (
        "padded row answers as alone, SnapKV: tokens", "padding",
        ("snapkv:window=16:decode=grow", "snapkv:window_size=16"), {"pad": 192, "new": 16},
    ),
    ("the same, StreamingLLM", "padding", ("streaming:decode=grow", "streaming"), {"pad": 192, "new": 16}),
    ("the same, Knorm", "padding", ("knorm", "knorm"), {"pad": 192, "new": 16}),
    ("sinks alive after 200 steps, StreamingLLM", "sinks", ("", ""), {"steps": 200, "keep": 64}),
    ("tokens held after 4 chunks of 32, SnapKV at 50%", "chunks", _SNAP, {"chunk": 32}),
    ("two conversations in turn, SnapKV: largest change of a logit", "two", _SNAP, {}),
    ("the same, budgets by head (AdaKV)", "two", _HEADS, {}),
    ("model compiled before: tokens held, SnapKV at 50%", "compiled", _SNAP, {}),
    ("bytes held, of the full cache, SnapKV at 50%", "bytes", _SNAP, {}),
    ("the same, budgets by head (AdaKV)", "bytes", _HEADS, {}),
]  # fmt: skip
"""Question, its name, our words and their press (no words: a side has no such method), and more."""


def traps(pair: Pair, options: Options) -> Iterator[Line]:
    """Questions that a comparison of scores does not ask, on the embedded model."""
    with _tiny() as path:
        pair.load(path, threads=options.threads)
        ids = _exam(1, ("recall",))[0][1]
        given = {"padding": ids[:64], "sinks": ids[:96], "chunks": ids[:128], "compiled": ids[:256], "bytes": ids[:512]}
        for name, trap, (ours, theirs), how in TRAPS:
            line: Line = {"trap": name}
            more = {"first": ids[:200], "second": ids[100:300]} if trap == "two" else {"ids": given[trap]}
            for side, process, method in (("ours", pair.ours, ours), ("theirs", pair.theirs, theirs)):
                if method or trap == "sinks":
                    word = {"method": method} if method else {}
                    try:
                        line[side] = process.ask("trap", name=trap, **more, **how, **word)
                    except Failed as error:
                        line[side] = {"error": str(error)}
            yield line


RUNS: dict[str, Callable[[Pair, Options], Iterator[Line]]] = {
    "kept": kept, "recall": recall, "traps": traps, "speed": speed,
}  # fmt: skip


def run(which: list[str], pair: Pair, options: Options) -> Line:
    """Run some of them, and say with what."""
    results: Line = {"versions": {"ours": pair.ours.ask("versions"), "theirs": pair.theirs.ask("versions")}}
    for name in which:
        results[name] = []
        for line in RUNS[name](pair, options):
            print(f"{name}: {line}", file=sys.stderr, flush=True)
            results[name].append(line)
    return results


def _tiny() -> Any:
    return as_file(files("kvpolicy") / "assets" / "tiny")


def _exam(n: int, names: tuple[str, ...]) -> list[tuple[str, list[int], list[int]]]:
    """Task, tokens of the prompt and of its answer."""
    import kvpolicy
    from kvpolicy_eval.train.ablate import tasks

    _, tokenizer = kvpolicy.tiny()
    exam: list[tuple[str, list[int], list[int]]] = []
    for name in names:
        for number in range(n):
            prompt, answer = tasks(512)[name](Random(512_000 + number))
            exam.append((name, tokenizer(prompt).input_ids, tokenizer(answer, add_special_tokens=False).input_ids))
    return exam


def _random_llama(path: str | Path, options: Options) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = options.hidden // 64
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4, num_hidden_layers=options.layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), vocab_size=1024, head_dim=64,
        max_position_embeddings=32768,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)

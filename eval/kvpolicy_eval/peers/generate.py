"""`generate` on the same prompts with all caches: stock, quantized, pruned by a press, and ours."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvpolicy_eval.peers import env
from kvpolicy_eval.peers.pair import Line, Options, Pair, Question, embedded_model, questions
from kvpolicy_eval.peers.process import Failed
from kvpolicy_eval.peers.random_llama import save_random_llama
from kvpolicy_eval.peers.recall import TASKS
from kvpolicy_eval.peers.side import NOT_INSTALLED
from kvpolicy_eval.peers.stock import QUANTIZERS, is_quantized

NEW = 129
"""Generated tokens: the prompt's, and 128 steps, after which a QuantizedCache encodes all tokens once more."""
WARM_UP = 8
"""Generated tokens of a call that warms up: codes compile what reads them in the first step."""
LENGTH = 4096
"""Length of the random prompts, and rough length of the tasks' prompts."""
RANDOM_PROMPTS = 3
SHARE = 0.2
_PRESS = "snapkv:window_size=32:kernel_size=7"
_PRESS_CODE = "SnapKVPress(0.8, window_size=32, kernel_size=7)"


class Method(NamedTuple):
    """A cache that is compared.

    Attributes:
        side: The process that has it, `ours` or `theirs`.
        code: How a user writes it.
        name: Its name in that process; empty for the stock cache.
        share: Budget, as a share of the prompt; None if every token is kept.
    """

    side: str
    code: str
    name: str = ""
    share: float | None = None

    @property
    def library(self) -> str:
        """The library that the cache or its method is from."""
        if not self.name or is_quantized(self.name):
            return "transformers"
        return "kvpolicy" if self.side == "ours" else "kvpress"


def _quantized(backend: str, bits: int) -> Method:
    return Method("ours", f"QuantizedCache('{backend}', nbits={bits})", f"{backend}-{bits}")


def _policy(spec: str) -> Method:
    name, at, _ = spec.partition("@")
    return Method("ours", spec, name, SHARE if at else None)


STOCK = "DynamicCache()"
METHODS = [
    Method("ours", STOCK),
    _quantized("quanto", 4),
    _quantized("quanto", 2),
    _quantized("hqq", 4),
    _quantized("hqq", 2),
    _policy("full+kivi:bits=4"),
    _policy("full+kivi:bits=2"),
    _policy("full+tokenwise:bits=4"),
    _policy(f"window@{SHARE}"),
    _policy(f"snapkv@{SHARE}"),
    _policy(f"snapkv+kivi:bits=4@{SHARE}"),
    _policy(f"snapkv+tokenwise:bits=4@{SHARE}"),
    Method("theirs", STOCK),
    Method("theirs", _PRESS_CODE, _PRESS, SHARE),
    Method("theirs", f"{_PRESS_CODE}, QuantizedCache('quanto', nbits=4)", f"{_PRESS}+quanto-4", SHARE),
    Method("theirs", f"{_PRESS_CODE}, QuantizedCache('hqq', nbits=4)", f"{_PRESS}+hqq-4", SHARE),
]
"""The stock cache of each process is the first of its methods, and their base."""


def generate(pair: Pair, options: Options) -> Iterator[Line]:
    """Times, bytes and texts of all methods, with two models."""
    skipped = _missing(pair)
    for sentence in dict.fromkeys(skipped.values()):
        print(f"generate: {sentence}", file=sys.stderr, flush=True)
    methods = [method for method in METHODS if method not in skipped]
    with embedded_model("tiny-4k") as path:
        pair.load(path, threads=options.threads)
        measured = measure(pair, methods, questions(1, TASKS, LENGTH), options.rounds)
    yield from _lines("tiny-4k", skipped, measured)
    with tempfile.TemporaryDirectory() as path:
        save_random_llama(path, options, queries_per_head=1)
        pair.load(path, threads=options.threads)
        measured = measure(pair, methods, _random_prompts(), options.rounds)
    yield from _lines("random", skipped, measured)


def _missing(pair: Pair) -> dict[Method, str]:
    """Methods whose package our process lacks, and why they are left out."""
    versions = pair.ours.ask("versions")
    return {
        method: f"{package} is not installed; try `pip install {' '.join(env.QUANTIZERS)}`"
        for backend, package in QUANTIZERS.items()
        if versions.get(package, NOT_INSTALLED) == NOT_INSTALLED
        for method in METHODS
        if method.side == "ours" and method.name.startswith(f"{backend}-")
    }


def _random_prompts() -> list[Question]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 1024, (RANDOM_PROMPTS, LENGTH), generator=generator)
    return [Question("random", ids, []) for ids in rows.tolist()]


class Calls:
    """Calls of `generate`, each by the process of its method.

    Args:
        pair: The processes.

    Attributes:
        errors: Methods that failed, and are not called again.
    """

    def __init__(self, pair: Pair) -> None:
        """Begin without an error."""
        self._pair = pair
        self.errors: dict[Method, Line] = {}

    def ask(self, method: Method, question: Question, new: int = NEW) -> Line | None:
        """One call, or None if the method failed.

        Raises:
            Failed: If a stock cache fails, since nothing can be compared without it.
        """
        if method in self.errors:
            return None
        asked = {"method": method.name, "share": method.share, "new": new}
        try:
            result = getattr(self._pair, method.side).ask("generate", ids=question.ids, **asked)
        except Failed as error:
            if not method.name:
                raise
            self.errors[method] = {"error": str(error)}
            return None
        return result | {"answer": result["ids"][: len(question.answer)]}


def measure(pair: Pair, methods: Sequence[Method], prompts: Sequence[Question], rounds: int) -> dict[Method, Line]:
    """Run all methods in turn on each prompt, two of them around a call with the stock cache of their process.

    The speed of a machine drifts, so that only neighboring calls can be compared.

    Args:
        pair: The processes.
        methods: The methods, with the stock cache of each side.
        prompts: The prompts.
        rounds: Calls of each method on each prompt, after a short one that warms up.

    Returns:
        The results of each method, or its error.
    """
    calls = Calls(pair)
    for method in methods:
        calls.ask(method, prompts[0], WARM_UP)
    runs: dict[Method, list[tuple[Line, Line]]] = {method: [] for method in methods}
    for number, question in enumerate(question for question in prompts for _ in range(rounds)):
        for stock, *others in _groups(methods):
            order = [*others[:1], stock, *others[1:]]
            results = {method: calls.ask(method, question) for method in (order if number % 2 else order[::-1])}
            base = results[stock]
            for method, result in results.items():
                if result is not None and base is not None:
                    runs[method].append((result, base))
    return {method: calls.errors.get(method) or summary(runs[method]) for method in methods}


def _groups(methods: Sequence[Method]) -> Iterator[list[Method]]:
    """The stock cache of each side with two other methods of it at a time."""
    for side in ("ours", "theirs"):
        stock = next(method for method in methods if method.side == side and not method.name)
        others = [method for method in methods if method.side == side and method.name]
        for start in range(0, max(len(others), 1), 2):  # one without other methods is still measured
            yield [stock, *others[start : start + 2]]


def summary(runs: Sequence[tuple[Line, Line]]) -> Line:
    """Medians of the times, mean of the bytes, and what the texts have in common with those of the stock cache.

    Args:
        runs: Each call, and the call with the stock cache that it is compared with.
    """
    result: Line = {}
    for key in ("prefill", "step"):
        result[key] = statistics.median(run[key] for run, _ in runs)
        result[f"{key}_ratio"] = statistics.median(run[key] / base[key] for run, base in runs)
    held = statistics.mean(run["held"] for run, _ in runs)
    with_answer = [(run["answer"], base["answer"]) for run, base in runs if base["answer"]]
    return result | {
        "held": held,
        "held_ratio": held / statistics.mean(base["held"] for _, base in runs),
        "same_answers": statistics.mean(answer == base for answer, base in with_answer) if with_answer else None,
        "same_tokens": statistics.mean(common_prefix(run["ids"], base["ids"]) for run, base in runs),
        "tokens": NEW,
    }


def describe(options: Options) -> str:
    """How the table was measured."""
    clock = "CPU time" if options.threads == 1 else "wall time"
    return (
        f"Eager `generate` of {NEW} tokens, fp32, CPU, {options.threads} thread(s), {clock}, medians of "
        f"{options.rounds} round(s), relative to a neighboring call with the stock cache. tiny-4k: "
        f"{len(TASKS)} prompts of about {LENGTH:,} tokens. random: a random Llama of {options.layers} layers, hidden "
        f"size {options.hidden}, heads of 64 and as many KV heads, {RANDOM_PROMPTS} prompts of {LENGTH:,} tokens. "
        "Prefill: until the first token. Held: the maximum. Same answers, same tokens: equal to those of the stock "
        "cache; tokens until the first difference. "
    )


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens before the first difference.

    >>> common_prefix([5, 6, 7], [5, 6, 8]), common_prefix([5], [5])
    (2, 1)
    """
    pairs = zip(first, second, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(first))


def _lines(model: str, skipped: dict[Method, str], measured: dict[Method, Line]) -> Iterator[Line]:
    for method in METHODS:
        result = {"skipped": skipped[method]} if method in skipped else measured[method]
        yield {"model": model, "side": method.side, "library": method.library, "method": method.code} | result

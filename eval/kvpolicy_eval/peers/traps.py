"""Behavior that a comparison of scores does not show: padding, chunks, two conversations, compiled models, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvpolicy_eval.peers.pair import Line, Options, Pair, embedded_model, questions
from kvpolicy_eval.peers.process import Failed


class Trap(NamedTuple):
    """One question about behavior.

    Attributes:
        question: Text of the question.
        name: Name of its method, see `kvpolicy_eval.peers.side.Side.trap`.
        ours: Our spec; empty if there is no such method, or the question names none.
        theirs: Their press, likewise.
        options: Further arguments.
    """

    question: str
    name: str
    ours: str
    theirs: str
    options: dict[str, Any]


_SNAPKV = ("snapkv:window=8:kernel=5:decode=grow", "snapkv:window_size=8")
_ADAKV = ("uniform/adakv+snapkv:window=8:kernel=5:decode=grow", "ada/snapkv:window_size=8")
_PADDING = {"pad": 192, "new": 16}
TRAPS = [
    Trap(
        "padded row answers as alone, SnapKV: tokens",
        "padding",
        "snapkv:window=16:kernel=5:decode=grow",
        "snapkv:window_size=16",
        _PADDING,
    ),
    Trap("the same, StreamingLLM", "padding", "streaming:decode=grow", "streaming", _PADDING),
    Trap("the same, Knorm", "padding", "knorm", "knorm", _PADDING),
    Trap("sinks alive after 200 steps, StreamingLLM", "sinks", "", "", {"steps": 200, "keep": 64}),
    Trap("tokens held after 4 chunks of 32, SnapKV at 50%", "chunks", *_SNAPKV, {"chunk": 32}),
    Trap("two conversations in turn, SnapKV: largest change of a logit", "two", *_SNAPKV, {}),
    Trap("the same, budgets by head (AdaKV)", "two", *_ADAKV, {}),
    Trap("model compiled before: tokens held, SnapKV at 50%", "compiled", *_SNAPKV, {}),
    Trap("bytes held, of the full cache, SnapKV at 50%", "bytes", *_SNAPKV, {}),
    Trap("the same, budgets by head (AdaKV)", "bytes", *_ADAKV, {}),
]
LENGTHS = {"padding": 64, "sinks": 96, "chunks": 128, "compiled": 256, "bytes": 512}
"""Tokens of each question's prompt."""


def traps(pair: Pair, options: Options) -> Iterator[Line]:
    """Answers of both sides, with the embedded model."""
    with embedded_model() as path:
        pair.load(path, threads=options.threads)
        ids = questions(1, ("recall",))[0].ids
        for trap in TRAPS:
            line: Line = {"trap": trap.question}
            if trap.name == "two":
                prompts = {"first": ids[:200], "second": ids[100:300]}
            else:
                prompts = {"ids": ids[: LENGTHS[trap.name]]}
            for side, process, method in (("ours", pair.ours, trap.ours), ("theirs", pair.theirs, trap.theirs)):
                if method or trap.name == "sinks":  # the question about sinks has a fixed method
                    named = {"method": method} if method else {}
                    try:
                        line[side] = process.ask("trap", name=trap.name, **prompts, **trap.options, **named)
                    except Failed as error:
                        line[side] = {"error": str(error)}
            yield line

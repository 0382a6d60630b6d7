"""Common ground of the comparison: both processes, the options, and the prompts of the embedded model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

from kvpolicy.text.embedded_names import EmbeddedName
from kvpolicy_eval.data.tasks import draw_prompts
from kvpolicy_eval.peers.process import Process

Line = dict[str, Any]
"""One result, as it is written to the file."""


class Pair(NamedTuple):
    """The processes of both sides."""

    ours: Process
    theirs: Process

    def load(self, path: str | Path, **options: Any) -> None:
        """Load the same weights in both processes.

        Args:
            path: Folder of the model.
            **options: See `kvpolicy_eval.peers.side.Side.load`.
        """
        for side in self:
            side.ask("load", path=str(path), **options)


class Options(NamedTuple):
    """Extent of the measurements.

    Attributes:
        n: Prompts per task.
        lengths: Lengths of the prompts whose speed is measured.
        rounds: Repetitions of each speed measurement.
        threads: Threads of torch, in each process.
        layers: Layers of the random Llama whose speed is measured.
        hidden: Its hidden size; heads have 64 channels, and there is one KV head for four query heads.
        steps: Decode steps of a speed measurement.
    """

    n: int = 16
    lengths: tuple[int, ...] = (2048, 8192, 16384)
    rounds: int = 3
    threads: int = 1
    layers: int = 4
    hidden: int = 512
    steps: int = 16


class Question(NamedTuple):
    """A prompt of the embedded model.

    Attributes:
        task: Name of the task.
        ids: Token ids of the prompt.
        answer: Token ids of the answer.
    """

    task: str
    ids: list[int]
    answer: list[int]


def questions(n: int, names: tuple[str, ...], length: int = 512) -> list[Question]:
    """The first `n` prompts of each task.

    Args:
        n: Prompts per task.
        names: Names of tasks.
        length: Rough length of the prompts, in tokens.
    """
    import kvpolicy

    _, tokenizer = kvpolicy.tiny()
    result: list[Question] = []
    drawn = draw_prompts(n, length)
    for name in names:
        for prompt, answer in drawn[name]:
            answer_ids = tokenizer(answer, add_special_tokens=False).input_ids
            result.append(Question(name, tokenizer(prompt).input_ids, answer_ids))
    return result


def embedded_model(name: EmbeddedName = "tiny") -> AbstractContextManager[Path]:
    """Folder of an embedded model."""
    return as_file(files("kvpolicy") / "assets" / name)


def attention_for(method: str) -> str:
    """Attention implementation of transformers that a press needs: `observed` reads the attention weights."""
    return "eager" if method == "observed" else "sdpa"

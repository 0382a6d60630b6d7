"""Requests as lm-eval makes them, and its tasks without its own ones."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvpolicy_lm_eval import startup

simple_evaluate: Any = evaluator.simple_evaluate  # its type is lost in its decorator


def instances(
    kind: Any, arguments: Sequence[tuple[Any, ...]], task: str = "task", doc: dict[str, Any] | None = None
) -> list[Instance]:
    """Requests of one type, all of one document."""
    return [
        Instance(request_type=kind, doc=doc or {}, arguments=some, idx=number, metadata=(task, number, 1))
        for number, some in enumerate(arguments)
    ]


@contextmanager
def forwards(model: Any) -> Generator[list[tuple[int, int]]]:
    """Rows and columns of each forward meanwhile."""
    seen: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))

    hook = model.model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


def manager(**metadata: Any) -> TaskManager:
    """Our tasks alone: lm-eval's index of its own takes seconds."""
    return TaskManager(include_path=startup.tasks_path(), include_defaults=False, metadata=metadata)


def load(source: Any, *names: str) -> dict[str, Any]:
    """The tasks of some names, or of groups, without their groups."""
    if hasattr(source, "load"):
        return source.load([*names])["tasks"]

    def flat(found: dict[Any, Any]) -> dict[str, Any]:  # lm-eval before 0.4.12 nests them
        parts = ({name: task} if not isinstance(task, dict) else flat(task) for name, task in found.items())
        return {name: task for part in parts for name, task in part.items()}

    return flat(source.load_task_or_group([*names]))

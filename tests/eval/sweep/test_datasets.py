"""The datasets of shipped sweeps: lm-eval's tasks read what is recorded of them, and no other name or column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers")
pytest.importorskip("jinja2")
pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict
from jinja2 import Environment, meta

from kvpolicy_eval.sweep import config
from kvpolicy_lm_eval import ruler, scbench
from kvpolicy_lm_eval.data.scbench import SUBSETS

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("datasets.json").read_text(encoding="utf-8"))
SWEEPS = sorted(
    path.name.removesuffix(".yaml")
    for path in (files("kvpolicy_eval") / "configs").iterdir()
    if path.name.startswith("papers-")
)
MADE = ("niah_", "ruler_")
"""Beginnings of tasks of lm-eval that make their documents, of essays and questions from other places."""
ADDED = {"few_shot"}
"""Names in templates that a task itself adds to the examples in a prompt."""
PROGRAM = {"xsum"}
"""Tasks whose documents a program of unitxt loads."""

spec = find_spec("lm_eval")
if spec is None or spec.origin is None:
    pytest.skip("lm_eval is not installed", allow_module_level=True)
TASKS = Path(spec.origin).parent / "tasks"


class Loader(yaml.SafeLoader):
    """Reads a task without the functions that it names, which may need packages that are not installed."""


def function(loader: yaml.SafeLoader, node: Any) -> str:
    return f"!function {loader.construct_scalar(node)}"


Loader.add_constructor("!function", function)


def read(path: Path) -> dict[str, Any]:
    """The content of a task, with that of the file that it includes."""
    content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    included = content.pop("include", None)
    return (read(path.parent / included) if included else {}) | content


@cache
def folder(name: str) -> list[dict[str, Any]]:
    """The tasks of a folder, and its groups."""
    return [read(path) for path in sorted((TASKS / name).glob("*.yaml"))]


FOLDERS = ("longbench", "longbench2", "gsm8k", "minerva_math", "aime", "cnn_dailymail")


def named(task: str) -> list[dict[str, Any]]:
    """The task of a name, or all tasks of a group."""
    for name in FOLDERS:
        contents = folder(name)
        if any(content.get("group") == task for content in contents):
            return [content for content in contents if isinstance(content.get("task"), str)]
        if found := [content for content in contents if content.get("task") == task]:
            return found
    raise AssertionError(f"lm-eval has no task {task} in {', '.join(FOLDERS)}")


def tasks_of(sweep: str) -> list[dict[str, Any]]:
    """The tasks of a sweep that read a dataset of the Hub."""
    names = [
        name for name in config.load(sweep).tasks if not name.startswith((*MADE, "kvpolicy_")) and name not in PROGRAM
    ]
    return [content for name in names for content in named(name)]


def columns(content: dict[str, Any]) -> Iterator[str]:
    """The columns that the templates of a task read."""
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        value = content.get(key)
        if isinstance(value, str) and not value.startswith("!function"):
            found = meta.find_undeclared_variables(Environment().parse(value))
            yield from (found or ({value} if value.isidentifier() else set())) - ADDED


def splits(content: dict[str, Any]) -> dict[str, Any]:
    """The recorded splits of the dataset of a task."""
    path = content["dataset_path"]
    name = content.get("dataset_name") or ""
    assert path in RECORDED, f"{content['task']} reads {path}, which is not recorded: has it moved?"
    assert name in RECORDED[path], f"{content['task']} reads the config {name!r} of {path}, which is not recorded"
    return RECORDED[path][name]


@pytest.mark.parametrize("sweep", SWEEPS)
def test_tasks_read_the_recorded_columns(sweep: str) -> None:
    contents = tasks_of(sweep)
    assert contents or all(name.startswith((*MADE, "kvpolicy_")) for name in config.load(sweep).tasks)
    for content in contents:
        recorded = splits(content)
        for key in ("test_split", "fewshot_split", "training_split"):
            assert content.get(key) in (None, *recorded), f"{content['task']} reads the split {content[key]}"
        read = set(columns(content))
        assert read, content["task"]
        known = set(recorded[content["test_split"]])
        assert read <= known, f"{content['task']} reads {sorted(read - known)}, which {content['dataset_path']} lacks"


def value(kind: Any, number: int) -> Any:
    if isinstance(kind, list):
        return ["one", "two", "three", "four"]
    return number if kind == "int64" else f"\\boxed{{{number}}} #### {number}"


def stub(path: str, name: str | None = None, **_: Any) -> DatasetDict:
    """A dataset of the Hub: rows of each recorded split, enough for the examples in a prompt."""
    return DatasetDict(
        {
            split: Dataset.from_list(
                [{column: value(kind, row) for column, kind in recorded.items()} for row in range(8)]
            )
            for split, recorded in RECORDED[path][name or ""].items()
        }
    )


@pytest.mark.filterwarnings("ignore:.*invalid escape sequence:DeprecationWarning")  # in a file of lm-eval
@pytest.mark.parametrize("task", ["gsm8k", "aime25", "longbench2_detective"])
def test_requests_are_made_of_what_is_recorded(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks whose functions need no other packages, loaded by lm-eval itself."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.load_dataset", stub)
    place = "longbench2" if task.startswith("longbench2") else task.removesuffix("25")
    manager: Any = TaskManager(include_path=str(TASKS / place), include_defaults=False)
    loaded = manager.load([task])["tasks"] if hasattr(manager, "load") else manager.load_task_or_group([task])
    found = loaded[task]
    found.build_all_requests(limit=1)
    assert found.instances and "#### 0" in found.instances[0].args[0]
    assert found.doc_to_target(found.instances[0].doc) not in (None, "")


def test_the_leaderboards_dataset_has_the_columns_that_are_read() -> None:
    assert set(RECORDED[ruler.DATASET]["4096"]["test"]) == set(ruler.COLUMNS)


@pytest.mark.parametrize("subset", SUBSETS)
def test_scbench_has_the_columns_that_are_read(subset: str) -> None:
    recorded = RECORDED[scbench.DATASET][f"scbench_{subset}"]["test"]
    assert set(SUBSETS[subset].columns) <= set(recorded)
    assert set(SUBSETS[subset].turn) <= set(recorded["multi_turns"][0])


def keys(columns: Mapping[str, Any]) -> set[str]:
    """The names of columns, as recorded or as the features of a dataset, and of the parts of their values."""
    found = set(columns)
    for name, kind in columns.items():
        inside = kind[0] if isinstance(kind, list) else getattr(kind, "feature", None)
        found |= {f"{name}.{part}" for part in inside} if isinstance(inside, dict) else set()
    return found


def test_answers_have_the_length_of_lm_evals_tasks() -> None:
    sizes = yaml.safe_load((files("kvpolicy_eval.sweep") / "sizes.yaml").read_text(encoding="utf-8"))
    compared = 0
    for name, size in sizes["tasks"].items():
        group, _, rest = name.partition("_")
        if group in ("longbench", "ruler", "niah"):
            place = TASKS / {"niah": "ruler"}.get(group, group) / f"{name if group == 'niah' else rest}.yaml"
            assert read(place)["generation_kwargs"]["max_gen_toks"] == size["new"], name
            compared += 1
    assert compared == 29


@pytest.mark.network
@pytest.mark.parametrize("path", [path for path in RECORDED if path != "_about"])
def test_the_hub_has_what_is_recorded(path: str) -> None:
    from datasets import load_dataset_builder

    for name, recorded in RECORDED[path].items():
        info: Any = load_dataset_builder(path, name or None).info
        for columns_of_split in recorded.values():
            assert keys(columns_of_split) <= keys(info.features), (path, name)
        assert set(recorded) <= set(info.splits), (path, name)

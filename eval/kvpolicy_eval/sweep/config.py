"""What a sweep's YAML file says, read and checked before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvpolicy import Policy
from kvpolicy.spec.budget import check_budget, format_budget, parse_budget
from kvpolicy_eval.sweep.cells import Cell

_KEYS = {
    "models", "policies", "budgets", "tasks", "limit", "batch_size", "seed", "num_fewshot", "output", "metadata",
    "include_path", "samples", "probes", "about",
}  # fmt: skip
_MODEL_KEYS = {
    "name", "pretrained", "dtype", "device", "max_length", "tokenizer", "add_bos_token", "trust_remote_code",
    "revision", "peft", "softmax_dtype", "parallelize", "tp", "backend", "holdback", "rolling_chunk",
}  # fmt: skip
EMBEDDED = "embedded"
"""Name of the model that ships with the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A sweep.

    Attributes:
        name: Of the file, without its ending.
        models: Name of each model, and what the model `kvpolicy` of lm-eval is told about it.
        policies: Words of policies. One that says its budget, or keeps every token, runs once.
        budgets: For the other policies: shares, numbers of tokens, or bytes such as `8MiB`.
        tasks: Names of lm-eval's tasks.
        limit: The most examples of each task.
        batch_size: Rows of a batch; bytes are compared best at 1.
        seed: Of everything random.
        num_fewshot: Examples in a prompt; the tasks' own number by default.
        output: Folder of the results; `results/NAME` by default.
        metadata: What tasks are told, such as RULER's lengths.
        include_path: Folder of tasks of one's own.
        samples: Whether to write prompts and answers beside each cell's results.
        probes: Prompts of a task on which each layer's budget and kept positions are looked at.
        about: A sentence for the report.
    """

    name: str
    models: dict[str, dict[str, Any]]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    tasks: tuple[str, ...]
    limit: int | None = None
    batch_size: int | str = 1
    seed: int = 1234
    num_fewshot: int | None = None
    output: str = ""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    include_path: str | None = None
    samples: bool = True
    probes: int = 2
    about: str = ""

    def cells(self) -> list[Cell]:
        """Every cell once, model by model, so that each is loaded once.

        Examples:
            >>> config = read({"policies": ["full", "h2o"], "budgets": [0.1, 64], "tasks": ["kvpolicy_hot"]}, "x")
            >>> [cell.policy for cell in config.cells()]
            ['full', 'h2o@0.1', 'h2o@64']
        """
        cells = (
            Cell(model=model, task=task, method=method, budget=budget)
            for model in self.models
            for task in self.tasks
            for method, budget in self._policies()
        )
        return list(dict.fromkeys(cells))

    def settings(self) -> dict[str, Any]:
        """What two runs must share for their cells to stand in one table."""
        names = ("limit", "batch_size", "seed", "num_fewshot", "metadata", "include_path")
        return {name: getattr(self, name) for name in names} | {"models": self.models}

    def _policies(self) -> Iterable[tuple[str, str]]:
        for words in self.policies:
            method, at, budget = words.partition("@")
            if at:
                yield method, _budget(budget)
            elif _runs_once(words):
                yield words, ""
            else:
                yield from ((words, budget) for budget in self.budgets)


def load(name: str) -> Config:
    """Read a file, or a shipped config by its bare name.

    Args:
        name: A path, or such as `figures`.

    Raises:
        ValueError: Where there is none, or it is not a sweep.
    """
    path = Path(name)
    shipped = files("kvpolicy_eval") / "configs"
    if not path.is_file():
        names = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
        if name.removesuffix(".yaml") not in names:
            raise ValueError(f"There is no config {name}: give a YAML file, or one of {', '.join(names)}.")
        text = (shipped / f"{name.removesuffix('.yaml')}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not text in UTF-8: save it as that.") from error
    try:
        return read(yaml.safe_load(text), path.name.removesuffix(".yaml").removesuffix(".yml"))
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}.") from error


def read(content: Any, name: str) -> Config:
    """Check what a file says.

    Args:
        content: Of the YAML file.
        name: Of the sweep.

    Raises:
        ValueError: Where a key is unknown, missing or of the wrong type, or a policy's words are none.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} is no sweep: give keys such as policies, budgets and tasks.")
    _known(content, _KEYS, name)
    lists = {key: _list(content, key, name) for key in ("policies", "budgets", "tasks")}
    policies = tuple(str(words) for words in lists["policies"])
    if not policies or not lists["tasks"]:
        raise ValueError(f"{name} has no {'tasks' if policies else 'policies'}: give a list with at least one.")
    budgets = tuple(_budget(budget) for budget in lists["budgets"])
    for words in policies:
        if not _runs_once(words) and "@" not in words and not budgets:
            raise ValueError(f"{name} has no budgets for {words}: give a list, or a budget as in {words}@0.2.")
    words = {key: _words(content, key) for key in ("output", "include_path", "about") if content.get(key) is not None}
    return Config(
        name=name, models=_models(content, name), policies=policies, budgets=budgets,
        tasks=tuple(str(task) for task in lists["tasks"]), batch_size=_batch(content.get("batch_size", 1)),
        limit=_whole(content, "limit", 1), num_fewshot=_whole(content, "num_fewshot", 0),
        seed=_whole(content, "seed", 0, 1234) or 0, probes=_whole(content, "probes", 0, 2) or 0,
        metadata=_metadata(content), samples=_yes(content, "samples"), **words,
    )  # fmt: skip


def _models(content: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = {}
    for entry in _list(content, "models", name) or [EMBEDDED]:
        said = dict(entry) if isinstance(entry, Mapping) else {"pretrained": entry}
        _known(said, _MODEL_KEYS, f"A model of {name}")
        if said.get("pretrained") in (None, EMBEDDED):
            said = {key: value for key, value in said.items() if key != "pretrained"}
        label = str(said.pop("name", None) or _last(str(said.get("pretrained", EMBEDDED))))
        if not label:
            raise ValueError(
                f"A model of {name} is {said['pretrained']!r}, which gives no name: write a name beside it."
            )
        _storable(said, f"The model {label}")
        if label in models:
            raise ValueError(f"{name} has two models called {label}: give each a name of its own.")
        models[label] = said
    return models


def _last(path: str) -> str:
    """The last name of a path or of a hub's name, also of `.` and `..`."""
    return os.path.basename(os.path.abspath(path)) if path else ""


def _metadata(content: Mapping[str, Any]) -> dict[str, Any]:
    value = content.get("metadata") or {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"metadata is {value!r}: give keys with their values, such as {{max_seq_lengths: [4096]}}.")
    _storable(value, "metadata")
    return dict(value)


def _storable(value: Mapping[str, Any], owner: str) -> None:
    """Refuse what the sweep's own file cannot hold."""
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{owner} has a date or another value that JSON cannot hold: put it in quotes.") from error


def _words(content: Mapping[str, Any], key: str) -> str:
    value = content[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}: give text, in quotes where YAML takes it for something else.")
    return value


def _yes(content: Mapping[str, Any], key: str) -> bool:
    value = content.get(key, True)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}: give true or false.")
    return value


def _known(content: Mapping[str, Any], keys: set[str], owner: str) -> None:
    strange = sorted(str(key) for key in content if key not in keys)
    if strange:
        raise ValueError(f"{owner} has the unknown key {strange[0]}: the keys are {', '.join(sorted(keys))}.")


def _list(content: Mapping[str, Any], key: str, name: str) -> list[Any]:
    value = content.get(key)
    value = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, (list, bool)) or item is None for item in value):
        raise ValueError(f"{key} of {name} is {content[key]!r}: give a plain list.")
    return value


def _whole(content: Mapping[str, Any], key: str, least: int, default: int | None = None) -> int | None:
    value = content.get(key, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{key} is {value!r}: give a whole number of at least {least}.")
    return value


def _batch(value: Any) -> int | str:
    if isinstance(value, bool) or not (str(value).startswith("auto") or (isinstance(value, int) and value > 0)):
        raise ValueError(f"batch_size is {value!r}: give a whole number of at least 1, or auto.")
    return value


def _budget(value: Any) -> str:
    return format_budget(check_budget(parse_budget(value) if isinstance(value, str) else value))


def _runs_once(words: str) -> bool:
    """Whether a policy keeps the whole, so that no budget goes with it; refuses words that are no policy."""
    method = words.partition("@")[0]
    budget = Policy.parse(method).budget
    return isinstance(budget, float) and budget == 1.0

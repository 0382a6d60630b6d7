"""The YAML file of a sweep, read and validated before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kvpolicy import Policy
from kvpolicy.text.budget import check_budget, format_budget, parse_budget
from kvpolicy_eval.sweep.cells import Cell
from kvpolicy_eval.sweep.modes import INSIDE, MODES, split_task, variant

_KEYS = {
    "about",
    "apply_chat_template",
    "batch_size",
    "budgets",
    "gen_kwargs",
    "include_path",
    "limit",
    "metadata",
    "models",
    "modes",
    "num_fewshot",
    "output",
    "policies",
    "probes",
    "samples",
    "seed",
    "tasks",
}
MODEL_KEYS = {
    "add_bos_token",
    "backend",
    "compile",
    "device",
    "dtype",
    "enable_thinking",
    "gguf_file",
    "group_by_prefix",
    "hold",
    "holdback",
    "max_length",
    "name",
    "parallelize",
    "peft",
    "pretrained",
    "revision",
    "rolling_chunk",
    "softmax_dtype",
    "think_end_token",
    "tile",
    "tokenizer",
    "tp",
    "trust_remote_code",
}
EMBEDDED = "embedded"
"""Name of the model that ships with the package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A sweep.

    Attributes:
        name: Name of the file, without its suffix.
        models: Arguments of lm-eval's model `kvpolicy`, by the name of each model.
        policies: Specs of policies. One with a budget, or one that keeps every token, runs once.
        budgets: Budgets of the other policies: shares, numbers of tokens, or bytes such as `8MiB`.
        tasks: Names of lm-eval's tasks, one for each place of the question that was asked for.
        limit: Maximum number of examples per task.
        batch_size: Rows of a batch; sizes in bytes are best compared at 1.
        seed: Seed of all randomness.
        num_fewshot: Examples in a prompt; the default is the task's.
        output: Folder of the results; `results/NAME` by default.
        metadata: Metadata for tasks, such as RULER's lengths.
        include_path: Folder with further tasks.
        samples: Whether to write prompts and answers together with the results of a cell.
        probes: Prompts of a task on which budgets and kept positions of the layers are recorded.
        apply_chat_template: Whether a prompt is a message of a chat.
        gen_kwargs: Arguments of generation, such as `max_gen_toks`, instead of those of a task.
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
    apply_chat_template: bool = False
    gen_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    about: str = ""

    def cells(self) -> list[Cell]:
        """All cells without duplicates, ordered by model, so that each model is loaded once.

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

    def only(self, models: Iterable[str] = (), policies: Iterable[str] = (), tasks: Iterable[str] = ()) -> Config:
        """The same sweep with some of its models, policies and tasks, in its own order.

        Args:
            models: Names of models; all by default.
            policies: Policies, at all of their budgets (`h2o`) or at one (`h2o@0.2`); all by default.
            tasks: Names of tasks; all by default.

        Raises:
            ValueError: If it has none of such a name.

        Examples:
            >>> config = read({"policies": ["full", "h2o"], "budgets": [0.1, 64], "tasks": ["kvpolicy_hot"]}, "x")
            >>> [cell.policy for cell in config.only(policies=["h2o@64"]).cells()]
            ['h2o@64']
        """
        chosen = set(_among("--models", models, self.models))
        cells = [(method, f"{method}@{budget}" if budget else method) for method, budget in self._policies()]
        known = dict.fromkeys(name for cell in cells for name in cell)
        named = set(_among("--policies", policies, known))
        return replace(
            self,
            models={name: found for name, found in self.models.items() if name in chosen},
            policies=tuple(dict.fromkeys(spec for method, spec in cells if named & {method, spec})),
            tasks=tuple(_among("--tasks", tasks, self.tasks)),
        )

    def settings(self) -> dict[str, Any]:
        """Settings that two runs must share for their cells to be comparable."""
        names = ("limit", "batch_size", "seed", "num_fewshot", "metadata", "include_path")
        names += ("apply_chat_template", "gen_kwargs")
        return {name: getattr(self, name) for name in names} | {"models": self.models}

    def _policies(self) -> Iterable[tuple[str, str]]:
        """Method and budget of each policy."""
        for spec in self.policies:
            method, at, budget = spec.partition("@")
            if at:
                yield method, _budget(budget)
            elif _keeps_everything(spec):
                yield spec, ""
            else:
                yield from ((spec, budget) for budget in self.budgets)


def _among(option: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Those of the known names that are asked for, in their own order; all if none is.

    Raises:
        ValueError: If a name is unknown.
    """
    every = list(known)
    asked = set(names)
    if unknown := sorted(asked.difference(every)):
        raise ValueError(f"{option} must be among {', '.join(every)}, got {unknown[0]!r}.")
    return [name for name in every if not asked or name in asked]


def load(name: str) -> Config:
    """Read a file, or a shipped config by its name.

    Args:
        name: A path, or a name such as `figures`.

    Raises:
        ValueError: If the file does not exist or is not a valid config.
    """
    path = Path(name)
    shipped = files("kvpolicy_eval") / "configs"
    if not path.is_file():
        names = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
        if name.removesuffix(".yaml") not in names:
            raise ValueError(f"There is no config {name}; give a YAML file, or one of {', '.join(names)}.")
        text = (shipped / f"{name.removesuffix('.yaml')}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} must be text in UTF-8.") from error
    try:
        return read(yaml.safe_load(text), path.name.removesuffix(".yaml").removesuffix(".yml"))
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from error


def read(content: Any, name: str) -> Config:
    """Validate the content of a file.

    Args:
        content: Content of the YAML file.
        name: Name of the sweep.

    Raises:
        ValueError: If a key is unknown, missing or of the wrong type, or a policy's spec is invalid.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} must have keys such as policies, budgets and tasks.")
    _check_keys(content, _KEYS, name)
    policies = tuple(str(spec) for spec in _list(content, "policies", name))
    budgets = tuple(_budget(budget) for budget in _list(content, "budgets", name))
    tasks = _tasks(content, name)
    for key, values in (("policies", policies), ("tasks", tasks)):
        if not values:
            raise ValueError(f"{name} has no {key}; give a list with at least one.")
    for spec in policies:
        if not _keeps_everything(spec) and "@" not in spec and not budgets:
            raise ValueError(f"{name} has no budgets for {spec}; give a list, or a budget as in {spec}@0.2.")
    texts = {key: _text(content, key) for key in ("output", "include_path", "about") if content.get(key) is not None}
    return Config(
        name=name,
        models=_models(content, name),
        policies=policies,
        budgets=budgets,
        tasks=tasks,
        batch_size=_batch_size(content.get("batch_size")),
        limit=_integer(content, "limit", 1),
        num_fewshot=_integer(content, "num_fewshot", 0),
        seed=_integer(content, "seed", 0, 1234) or 0,
        probes=_integer(content, "probes", 0, 2) or 0,
        metadata=_mapping(content, "metadata", "{max_seq_lengths: [4096]}"),
        gen_kwargs=_mapping(content, "gen_kwargs", "{max_gen_toks: 4096}"),
        samples=_boolean(content, "samples", default=True),
        apply_chat_template=_boolean(content, "apply_chat_template", default=False),
        **texts,
    )


def _tasks(content: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Names of the tasks; with `modes`, of the variant of each task for each place of the question."""
    tasks = [str(task) for task in _list(content, "tasks", name)]
    modes = [str(mode) for mode in _list(content, "modes", name)]
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"modes must be among {', '.join(MODES)}, got {mode!r}.")
    for task in tasks if modes else ():
        base, mode = split_task(task)
        if mode != INSIDE:
            raise ValueError(f"With modes, tasks must be named without their mode, got {task}; try {base}.")
    return tuple(dict.fromkeys(variant(task, mode) for task in tasks for mode in modes or [INSIDE]))


def _models(content: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = {}
    for entry in _list(content, "models", name) or [EMBEDDED]:
        arguments = dict(entry) if isinstance(entry, Mapping) else {"pretrained": entry}
        _check_keys(arguments, MODEL_KEYS, f"A model of {name}")
        if arguments.get("pretrained") in (None, EMBEDDED):
            arguments = {key: value for key, value in arguments.items() if key != "pretrained"}
        label = str(arguments.pop("name", None) or _last_part(str(arguments.get("pretrained", EMBEDDED))))
        if not label:
            raise ValueError(
                f"A model of {name} is {arguments['pretrained']!r}, from which no name can be derived; add a name."
            )
        _check_serializable(arguments, f"The model {label}")
        if label in models:
            raise ValueError(f"{name} has two models with the name {label}; names must be unique.")
        models[label] = arguments
    return models


def _last_part(path: str) -> str:
    """Last part of a path or of a name on the Hub, also of `.` and `..`."""
    return os.path.basename(os.path.abspath(path)) if path else ""


def _mapping(content: Mapping[str, Any], key: str, example: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} must be keys with values, such as {example}, got {value!r}.")
    _check_serializable(value, key)
    return dict(value)


def _check_serializable(value: Mapping[str, Any], owner: str) -> None:
    """Refuse values that the sweep's JSON file cannot hold."""
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{owner} has a date or another value that JSON cannot hold; put it in quotes.") from error


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, got {value!r}; put it in quotes if YAML reads it as another type.")
    return value


def _boolean(content: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = content.get(key)
    value = default if value is None else value  # a key without a value is as none
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}.")
    return value


def _check_keys(content: Mapping[str, Any], keys: set[str], owner: str) -> None:
    unknown = sorted(str(key) for key in content if key not in keys)
    if unknown:
        raise ValueError(f"{owner} has the unknown key {unknown[0]}; the keys are {', '.join(sorted(keys))}.")


def _list(content: Mapping[str, Any], key: str, name: str) -> list[Any]:
    """The value of a key as a list; a single value becomes a list with one item."""
    value = content.get(key)
    if value is None:
        return []
    items: list[Any] = value if isinstance(value, list) else [value]
    if any(isinstance(item, (list, bool)) or item is None for item in items):
        raise ValueError(f"{key} of {name} must be a flat list, got {value!r}.")
    return items


def _integer(content: Mapping[str, Any], key: str, least: int, default: int | None = None) -> int | None:
    value = content.get(key)
    value = default if value is None else value
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{key} must be an integer of at least {least}, got {value!r}.")
    return value


def _batch_size(value: Any) -> int | str:
    value = 1 if value is None else value
    if isinstance(value, bool) or not (str(value).startswith("auto") or (isinstance(value, int) and value > 0)):
        raise ValueError(f"batch_size must be an integer of at least 1, or auto, got {value!r}.")
    return value


def _budget(value: Any) -> str:
    return format_budget(check_budget(parse_budget(value) if isinstance(value, str) else value))


def _keeps_everything(spec: str) -> bool:
    """Whether a policy keeps all tokens without a budget, so that it runs once.

    Raises:
        ValueError: If the spec is invalid.
    """
    method = spec.partition("@")[0]
    budget = Policy.parse(method).budget
    return isinstance(budget, float) and budget == 1.0

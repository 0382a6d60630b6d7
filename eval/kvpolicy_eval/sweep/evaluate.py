"""One cell through lm-eval's Python API: its results file, samples, scores of each example, and what was probed."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, sanitize_list

import kvpolicy
from kvpolicy import Policy
from kvpolicy.spec.formats import stamp
from kvpolicy_eval.sweep import probe
from kvpolicy_eval.sweep.cells import FORMAT, Cell, SharedError, told
from kvpolicy_eval.sweep.config import Config
from kvpolicy_lm_eval import startup
from kvpolicy_lm_eval.model import KVPolicyLM
from kvpolicy_lm_eval.stats import Stats

EMBEDDED_PATH = Path(kvpolicy.__file__).parent / "assets" / "tiny"
simple_evaluate: Any = evaluator.simple_evaluate  # type checkers cannot see through its decorator


class Found(NamedTuple):
    """What one cell gave.

    Attributes:
        results: lm-eval's results, and ours under `kvpolicy_sweep`.
        samples: JSON lines of each task.
    """

    results: dict[str, Any]
    samples: dict[str, str]


class Switching(KVPolicyLM):
    """lm-eval's model `kvpolicy`, loaded once for many policies.

    Where processes divide a cell's examples and one of them fails, it goes on with empty answers, since the others wait
    for it; `agree` then tells all of them.
    """

    failure: tuple[str, str] | None = None

    def switch(self, policy: Policy) -> None:
        """Go on under another policy, with counts from zero.

        Raises:
            ValueError: Where the policy does not fit the model.
        """
        kvpolicy.attach(self.model, policy).detach()
        self.policy, self.stats, self._auto_batch, self.failure = policy, Stats(), None, None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def agree(self) -> None:
        """Raise in every process what any of them met.

        Raises:
            SharedError: Where one of them failed.
        """
        if self.world_size > 1:
            failures: list[tuple[str, str] | None] = [None] * self.world_size
            torch.distributed.all_gather_object(failures, self.failure)
            for failure in failures:
                if failure is not None:
                    raise SharedError(*failure)

    def _by_task(self, kind: str, answer: Callable[..., list[Any]], requests: list[Any], quiet: bool) -> list[Any]:
        try:
            return super()._by_task(kind, answer, requests, quiet)
        except Exception as error:
            if self.world_size == 1:
                raise
            self.failure = told(error)
            empty = {"loglikelihood": (0.0, False), "loglikelihood_rolling": 0.0}
            return [empty.get(kind, "")] * len(requests)


class Evaluator:
    """Evaluates cells; keeps the last model, and knows the tasks.

    Args:
        config: Of the sweep.
    """

    def __init__(self, config: Config) -> None:
        """Find the tasks: in our folder alone where that has them all, since lm-eval's index takes long."""
        self.config = config
        self._name, self._lm, self._cosines = "", None, dict[str, Any]()
        self._broken: dict[str, Exception] = {}
        self._managers: dict[str, TaskManager] = {}
        unknown = sorted(set(config.tasks) - set(self.tasks(next(iter(config.models))).all_tasks))
        if unknown:
            raise ValueError(f"lm-eval knows no task {unknown[0]}: see lm_eval --tasks list, or give include_path.")

    def tasks(self, name: str) -> TaskManager:
        """The tasks as a model of this name gets them: some, such as RULER's, make their texts with its tokenizer."""
        if name not in self._managers:
            config = self.config
            where: dict[str, Any] = {"metadata": _told(config.metadata, config.models[name])}
            own: Any = [startup.tasks_path(), *([config.include_path] if config.include_path else [])]
            manager = TaskManager(include_path=own, include_defaults=False, **where)
            if not set(config.tasks) <= set(manager.all_tasks):
                manager = TaskManager(include_path=own, **where)
            self._managers[name] = manager
        return self._managers[name]

    def model(self, name: str) -> Switching:
        """The model of a name, loaded where it is not the last one."""
        if name in self._broken:  # a hub that does not answer is not asked again for every cell
            raise self._broken[name]
        if self._lm is None or self._name != name:
            self._lm, self._cosines = None, {}  # the last one goes before the next one comes
            try:
                self._lm = Switching(batch_size=self.config.batch_size, **self.config.models[name])
            except Exception as error:
                self._broken[name] = error
                raise
            self._name = name
        return self._lm

    def prepare(self, cell: Cell) -> Switching:
        """Load the cell's model and put it under the cell's policy: what fails here fails on every process alike.

        Raises:
            ValueError: Where the policy is none, or does not fit.
        """
        policy = Policy.parse(cell.policy)
        lm = self.model(cell.model)
        lm.switch(policy)
        return lm

    def run(self, cell: Cell) -> Found | None:
        """Evaluate a prepared cell; None on a process that is not the one to write."""
        config, lm, start = self.config, self.model(cell.model), time.perf_counter()
        seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        results = simple_evaluate(
            model=lm, tasks=[cell.task], task_manager=self.tasks(cell.model), num_fewshot=config.num_fewshot,
            limit=config.limit, batch_size=config.batch_size, bootstrap_iters=0, log_samples=True,
            **dict.fromkeys(seeds, config.seed),
        )  # fmt: skip
        lm.agree()
        seconds = time.perf_counter() - start
        probed = self._probe(lm, cell, None if results is None else results["samples"])
        if results is None:
            return None
        samples = results.pop("samples")
        _leave_out_unasked(results["results"])
        words = config.models[cell.model] | {"policy": cell.policy}
        results["config"] |= {
            "model": "kvpolicy",
            "model_args": ",".join(f"{key}={value}" for key, value in words.items()),
        }
        own = {"cell": asdict(cell), "seconds": round(seconds, 3), "peak_bytes": _peak(), "scores": _scores(samples)}
        results["kvpolicy_sweep"] = stamp(FORMAT) | own | {"probe": probed, "versions": versions()}
        plain = json.loads(json.dumps(results, default=handle_non_serializable))
        return Found(plain, _lines(samples) if config.samples else {})

    def _probe(self, lm: Switching, cell: Cell, samples: dict[str, Any] | None) -> dict[str, Any]:
        """Look at layers on the task's first prompts; every rank of a divided model takes part."""
        if not self.config.probes or (samples is None and lm.sharding.tp == 1):
            return {}
        held = [probe.prompts(samples, self.config.probes) if samples else []]
        if lm.sharding.tp > 1:
            torch.distributed.broadcast_object_list(held, src=0)
        rows = probe.tokens(lm, held[0])
        if cell.task not in self._cosines:
            self._cosines[cell.task] = probe.cosines(lm, rows)
        return probe.layers(lm, rows) | {"cosine": self._cosines[cell.task]}


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in ("kvpolicy", "torch", "transformers", "lm_eval", "deepspeed", "datasets"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["kvpolicy"] = kvpolicy.__version__
    cuda = torch.cuda.is_available()
    found["device"] = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    return found | {"processes": os.environ.get("WORLD_SIZE", "1")}


def _told(metadata: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What tasks are told: the config's metadata, and the model's tokenizer where that names none."""
    names = ("tokenizer", "pretrained")
    if any(name in metadata for name in names):
        return dict(metadata)
    own = {name: model[name] for name in names if name in model}
    return {"pretrained": str(EMBEDDED_PATH), **own, **metadata}


def _leave_out_unasked(results: Mapping[str, dict[str, Any]]) -> None:
    """Drop RULER's lengths that no example has, which it gives as -1: that is no score."""
    for scores in results.values():
        for name in [name for name, value in scores.items() if name.partition(",")[0].isdecimal() and value == -1]:
            del scores[name]


def _scores(samples: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Of each task and metric the examples' values, in the order of the examples."""
    scores: dict[str, dict[str, list[Any]]] = {}
    for task, rows in samples.items():
        of_task = scores.setdefault(task, {})
        for row in sorted(rows, key=lambda row: row["doc_id"]):
            for metric in row.get("metrics", ()):
                of_task.setdefault(f"{metric},{row.get('filter', 'none')}", []).append(row[metric])
    return scores


def _lines(samples: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Samples as lm-eval writes them."""
    return {task: "".join(map(_line, rows)) for task, rows in samples.items()}


def _line(row: dict[str, Any]) -> str:
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(parts)} for i, parts in enumerate(row["arguments"])
    }
    said = {name: sanitize_list(row[name]) for name in ("resps", "filtered_resps")}
    row = row | said | {"arguments": arguments, "target": str(row["target"])}
    return json.dumps(row, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _peak() -> int | None:
    """The accelerator's most memory in this cell, where there is one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None

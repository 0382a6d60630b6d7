"""Evaluation of one cell through lm-eval's Python API: results, samples, scores of each example, and probes."""

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
from kvpolicy.text.formats import stamp
from kvpolicy_eval.sweep import probe
from kvpolicy_eval.sweep.cells import FORMAT, Cell
from kvpolicy_eval.sweep.config import Config
from kvpolicy_eval.sweep.errors import SharedError, describe
from kvpolicy_eval.sweep.modes import INSIDE, split_task
from kvpolicy_eval.sweep.output import quiet_git
from kvpolicy_lm_eval import ranks, startup
from kvpolicy_lm_eval.model import KVPolicyLM
from kvpolicy_lm_eval.stats import Stats

EMBEDDED_PATH = Path(kvpolicy.__file__).parent / "assets" / "tiny"
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
simple_evaluate: Any = evaluator.simple_evaluate  # type checkers cannot resolve its decorator


class Evaluation(NamedTuple):
    """Result of one cell.

    Attributes:
        results: lm-eval's results, with ours under `kvpolicy_sweep`.
        samples: JSON lines of each task.
    """

    results: dict[str, Any]
    samples: dict[str, str]


class SweepLM(KVPolicyLM):
    """lm-eval's model `kvpolicy`, loaded once for many policies.

    If processes share a cell's examples and one of them fails, that process continues with empty answers, because the
    others wait for it in collective operations; `raise_shared_errors` then raises the error in all of them.
    """

    failure: tuple[str, str] | None = None

    def switch(self, policy: Policy) -> None:
        """Change the policy and reset all counters.

        Raises:
            ValueError: If the policy does not fit the model.
        """
        kvpolicy.attach(self.model, policy).detach()
        self.policy = policy
        self.stats = Stats()
        self._auto_batch = None
        self.failure = None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def raise_shared_errors(self) -> None:
        """Raise the first error of any process in all processes.

        Raises:
            SharedError: If a process failed.
        """
        if self.world_size > 1:
            raise_shared(self.failure)

    def _by_task(self, kind: str, answer: Callable[..., list[Any]], requests: list[Any], quiet: bool) -> list[Any]:
        try:
            return super()._by_task(kind, answer, requests, quiet)
        except Exception as error:
            if self.world_size == 1:
                raise
            self.failure = describe(error)
            empty = {"loglikelihood": (0.0, False), "loglikelihood_rolling": 0.0}
            return [empty.get(kind, "")] * len(requests)


def raise_shared(failure: tuple[str, str] | None) -> None:
    """Raise the first failure of any process in all processes.

    Args:
        failure: That of this process, see `describe`; None if there is none.

    Raises:
        SharedError: If a process failed.
    """
    for each in ranks.all_gather(failure):
        if each is not None:
            raise SharedError(*each)


class Evaluator:
    """Evaluates cells; keeps the model that was loaded last.

    Args:
        config: Of the sweep.
    """

    def __init__(self, config: Config) -> None:
        """Find the tasks.

        Raises:
            ValueError: If lm-eval does not know one of them.
        """
        self.config = config
        self._name = ""
        self._lm: SweepLM | None = None
        self._cosines: dict[str, Any] = {}
        self._load_errors: dict[str, Exception] = {}
        self._managers: dict[str, TaskManager] = {}
        unknown = sorted(set(config.tasks) - set(self.tasks(next(iter(config.models))).all_tasks))
        if unknown:
            base, mode = split_task(unknown[0])
            hint = "" if mode == INSIDE else f"; {base} may have no variant for the mode {mode}, so list tasks singly"
            raise ValueError(f"lm-eval has no task {unknown[0]}; see lm_eval --tasks list, or give include_path{hint}.")

    def tasks(self, name: str) -> TaskManager:
        """The tasks for the model of a name: some, such as RULER's, make their prompts with its tokenizer.

        lm-eval's index takes long, so it is only built if our folder lacks one of the tasks.
        """
        if name not in self._managers:
            config = self.config
            metadata = _task_metadata(config.metadata, config.models[name])
            folders: Any = [startup.tasks_path(), *([config.include_path] if config.include_path else [])]
            manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
            if not set(config.tasks) <= set(manager.all_tasks):
                manager = TaskManager(include_path=folders, metadata=metadata)
            self._managers[name] = manager
        return self._managers[name]

    def model(self, name: str) -> SweepLM:
        """The model of a name, loaded unless it is the last one."""
        if name in self._load_errors:  # for example, an unreachable hub is not tried again for every cell
            raise self._load_errors[name]
        if self._lm is None or self._name != name:
            self._lm = None  # frees the last model before the next one is loaded
            self._cosines = {}
            try:
                self._lm = SweepLM(batch_size=self.config.batch_size, **self.config.models[name])
            except Exception as error:
                self._load_errors[name] = error
                raise
            self._name = name
        return self._lm

    def prepare(self, cell: Cell) -> SweepLM:
        """Load the cell's model and switch to its policy.

        Processes that share a cell fail together: the others would wait for one that failed alone.

        Raises:
            ValueError: If the policy is invalid, or does not fit the model.
            SharedError: If another process failed.
        """
        try:
            policy = Policy.parse(cell.policy)
            lm = self.model(cell.model)
            lm.switch(policy)
        except Exception as error:
            if _is_shared():
                raise_shared(describe(error))
            raise
        if _is_shared():
            raise_shared(None)
        return lm

    def run(self, cell: Cell) -> Evaluation | None:
        """Evaluate a prepared cell.

        Returns:
            The results; None on processes other than the first one.
        """
        config = self.config
        lm = self.model(cell.model)
        start = time.perf_counter()
        quiet_git(evaluator)
        results = simple_evaluate(
            model=lm,
            tasks=[cell.task],
            task_manager=self.tasks(cell.model),
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            batch_size=config.batch_size,
            apply_chat_template=config.apply_chat_template,
            gen_kwargs=dict(config.gen_kwargs) or None,
            bootstrap_iters=0,
            log_samples=True,
            **dict.fromkeys(SEEDS, config.seed),
        )
        lm.raise_shared_errors()
        seconds = time.perf_counter() - start
        probes = self._probe(lm, cell, None if results is None else results["samples"])
        if results is None:
            return None
        samples = results.pop("samples")
        _drop_unmeasured_lengths(results["results"])
        arguments = config.models[cell.model] | {"policy": cell.policy}
        results["config"] |= {
            "model": "kvpolicy",
            "model_args": ",".join(f"{key}={value}" for key, value in arguments.items()),
        }
        results["kvpolicy_sweep"] = stamp(FORMAT) | {
            "cell": asdict(cell),
            "seconds": round(seconds, 3),
            "peak_bytes": _peak_bytes(),
            "scores": _scores(samples),
            "probe": probes,
            "versions": versions(),
        }
        plain = json.loads(json.dumps(results, default=handle_non_serializable))
        return Evaluation(plain, _sample_lines(samples) if config.samples else {})

    def _probe(self, lm: SweepLM, cell: Cell, samples: dict[str, Any] | None) -> dict[str, Any]:
        """Probe the layers on the task's first prompts.

        Only the first process has the samples. If the model is sharded, it broadcasts the prompts, because every rank
        takes part in the forward pass.
        """
        if not self.config.probes or (samples is None and lm.sharding.tp == 1):
            return {}
        shared = [probe.prompts(samples, self.config.probes) if samples else []]
        if lm.sharding.tp > 1:
            torch.distributed.broadcast_object_list(shared, src=0)
        rows = probe.tokens(lm, shared[0])
        if cell.task not in self._cosines:
            self._cosines[cell.task] = probe.cosines(lm, rows)
        return probe.layers(lm, rows) | {"cosine": self._cosines[cell.task]}


def _is_shared() -> bool:
    """Whether several processes share each cell: the first model that they load connects them."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def versions() -> dict[str, str]:
    """Versions of the software, and the hardware."""
    result = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in ("kvpolicy", "torch", "transformers", "lm_eval", "deepspeed", "datasets"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    result["kvpolicy"] = kvpolicy.__version__
    cuda = torch.cuda.is_available()
    result["device"] = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    return result | {"processes": os.environ.get("WORLD_SIZE", "1")}


def _task_metadata(metadata: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata for tasks: the config's, and the model's arguments, as under `lm_eval`.

    The tokenizer is the model's unless the config names one.
    """
    names = ("tokenizer", "pretrained")
    if any(name in metadata for name in names):
        return {name: value for name, value in model.items() if name not in names} | dict(metadata)
    return {"pretrained": str(EMBEDDED_PATH), **model, **metadata}


def _drop_unmeasured_lengths(results: Mapping[str, dict[str, Any]]) -> None:
    """Remove RULER's scores of lengths without examples, which it reports as -1."""
    for scores in results.values():
        for name in [name for name, value in scores.items() if name.partition(",")[0].isdecimal() and value == -1]:
            del scores[name]


def _scores(samples: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Values of the examples by task and metric, in the order of the examples."""
    scores: dict[str, dict[str, list[Any]]] = {}
    for task, rows in samples.items():
        of_task = scores.setdefault(task, {})
        for row in sorted(rows, key=lambda row: row["doc_id"]):
            for metric in row.get("metrics", ()):
                of_task.setdefault(f"{metric},{row.get('filter', 'none')}", []).append(row[metric])
    return scores


def _sample_lines(samples: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Samples in the format of lm-eval's files."""
    return {task: "".join(map(_sample_line, rows)) for task, rows in samples.items()}


def _sample_line(row: dict[str, Any]) -> str:
    arguments = {
        f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(parts)} for i, parts in enumerate(row["arguments"])
    }
    responses = {name: sanitize_list(row[name]) for name in ("resps", "filtered_resps")}
    row = row | responses | {"arguments": arguments, "target": str(row["target"])}
    return json.dumps(row, default=handle_non_serializable, ensure_ascii=False) + "\n"


def _peak_bytes() -> int | None:
    """Peak memory of the GPU in this cell, if there is a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None

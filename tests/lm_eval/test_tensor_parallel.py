"""One model on two ranks: the commands of the docs give the results of one process, and fail as one job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_lm_eval import startup
from tests.lm_eval.helpers import manager, simple_evaluate
from tests.parallel.launchers import LIMIT, words
from tests.sampling import product

POLICY = "squeeze+kvcrush@0.5"
TASKS = ["kvpolicy_fewshot", "kvpolicy_hot", "kvpolicy_text"]
SIZES: dict[str, Any] = {"chars": 300, "asks": 6, "fresh": 6, "shots": 4}
Samples = dict[tuple[str, int], Any]


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a module or script on two ranks, after the start-up file."""
    (tmp_path / "sitecustomize.py").write_text("from kvpolicy_lm_eval import startup; startup.install()")
    lost = ("WORLD_SIZE", "RANK", "LOCAL_RANK", startup.OFF)
    environment = {name: value for name, value in os.environ.items() if name not in lost}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "OMP_NUM_THREADS": "1"}

    def run(launcher: str, *command: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *words(launcher), *command]
        return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=LIMIT)

    return run


@pytest.fixture(scope="module")
def alone(make) -> tuple[Samples, dict[str, Any]]:
    """The samples and the report of one process."""
    lm = make(POLICY, batch_size=2)
    found = simple_evaluate(model=lm, tasks=TASKS, task_manager=manager(**SIZES), limit=2, bootstrap_iters=0)
    return {(name, one["doc_id"]): one for name, some in found["samples"].items() for one in some}, found


def command(folder: Path, arguments: str, *more: str) -> list[str]:
    """The arguments of lm-eval."""
    words = f"--model kvpolicy --model_args policy={POLICY},{arguments} --tasks {','.join(TASKS)} --limit 2"
    files = ["--metadata", json.dumps(SIZES), "--output_path", str(folder)]
    return [*words.split(), "--batch_size", "2", "--log_samples", *files, *more]


def samples(folder: Path) -> Samples:
    found: Samples = {}
    for file in folder.rglob("samples_*.jsonl"):
        for line in file.read_text().splitlines():
            one = json.loads(line)
            found[file.name.split("_2")[0].removeprefix("samples_"), one["doc_id"]] = one
    return found


def same(ours: Any, theirs: Any) -> bool:
    """Whether answers are equal: texts exactly, log-likelihoods (which JSON stores as text) up to 1e-4."""
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(same(*pair) for pair in zip(ours, theirs, strict=True))
    try:
        return abs(float(ours) - float(theirs)) < 1e-4
    except ValueError:
        return str(ours) == str(theirs)


def check_against(alone: tuple[Samples, dict[str, Any]], folder: Path, backend: str) -> None:
    expected, whole = alone
    found = samples(folder)
    assert found.keys() == expected.keys()
    for key, one in found.items():
        assert same(one["filtered_resps"], expected[key]["filtered_resps"]), key
        assert one["prompt_hash"] == expected[key]["prompt_hash"]
    (file,) = folder.rglob("results_*.json")  # one process writes
    results = json.loads(file.read_text())
    for task in TASKS:
        for name, value in whole["results"][task].items():
            if isinstance(value, float):
                assert results["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
    info = results["config"]["kvpolicy"]
    base = whole["config"]["kvpolicy"]
    assert (info["tp"], info["backend"], base["tp"], base["backend"]) == (2, backend, 1, None)
    assert "each of 2 ranks" in info["bytes_are"]
    for kind, cost in info["tasks"].items():
        other = base["tasks"][kind]
        assert cost["requests"] == other["requests"]
        assert 2 * cost["full_kv_bytes"] == pytest.approx(other["full_kv_bytes"], rel=1e-3)
        assert 2 * cost["kv_bytes"] == pytest.approx(other["kv_bytes"], rel=0.02)  # positions are on every rank


@product("launcher,backend", ["torchrun", "deepspeed"], ["deepspeed", "hf"], sample=[])
def test_commands_of_the_docs(launch, alone, tmp_path: Path, launcher: str, backend: str):
    """On every commit, the test below starts ranks once, and evaluates in them."""
    module = ["--module", "lm_eval"] if launcher == "deepspeed" else ["-m", "lm_eval"]
    done = launch(launcher, *module, *command(tmp_path / "out", f"tp=2,backend={backend}"))
    assert done.returncode == 0, done.stderr[-4000:]
    check_against(alone, tmp_path / "out", backend)


def script(folder: Path, body: str) -> str:
    """Write a script with a model on two ranks, `lm`, a function that runs one request, `ask()`, and the `rank`."""
    path = folder / "ranks.py"
    head = """
        import os, sys
        import lm_eval._cli  # as the command line does
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.instance import Instance
        from lm_eval.tasks.manager import TaskIndex
        from pathlib import Path
        from kvpolicy_lm_eval.model import KVPolicyLM

        rank = int(os.environ["RANK"])
        build, others = TaskIndex.build, Path(lm_eval.tasks.__file__).parent
        # Without lm-eval's own tasks: each rank would read thousands of files, for seconds.
        TaskIndex.build = staticmethod(lambda paths: build([path for path in paths if path != others]))
        if sys.argv[1:]:
            cli_evaluate()
        lm = KVPolicyLM(policy="snapkv@0.5", tp=2, backend="hf", max_length=256)

        def ask(prompt="tiger=12 lion=7 tiger=", **options):
            request = Instance("generate_until", {}, (prompt, {"until": ["never"], "max_gen_toks": 8, **options}), 0)
            return lm.generate_until([request])
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return str(path)


SEEDED = """
    import random, torch
    import torch.distributed as dist
    from kvpolicy_lm_eval import ranks

    def seeded(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        return KVPolicyLM(policy="snapkv@0.5", tp=2, backend="hf", max_length=256)

    lm = seeded(rank)  # as `--seed None` leaves it
    found = [None, None]
    dist.all_gather_object(found, (ask(do_sample=True, temperature=3.0), random.random()))
    assert found[0] == found[1], found
    refused = False
    try:
        ask(f"rank {rank}")
    except RuntimeError as error:
        os.write(2, f"{error} {'-' if rank else '+'}\\n".encode())  # one write, or lines of the ranks could mix
        refused = True
"""
FAILING = """
    def fail(*_args, **_kwargs):
        raise MemoryError("the second rank has no room")
    dist.barrier()  # both ranks have said what they refuse
    if rank == 1:
        lm.model.lm_head.register_forward_pre_hook(fail)
    ask()
    print("answered")
"""
REFUSED = "All ranks must have the same generate_until requests, got different ones"


def test_two_ranks(launch, alone, tmp_path: Path):
    """One start of ranks, which takes long, answers several questions.

    lm-eval finds what one process finds, with a request cache, which each rank has its own copy of. All ranks sample
    with the seed of the first one; a request that differs or fails ends every rank, and there is no deadlock.
    """
    from sqlitedict import SqliteDict

    words = command(tmp_path / "out", "tp=2", "--use_cache", str(tmp_path / "answers"))
    done = launch("torchrun", script(tmp_path, SEEDED + FAILING), *words)
    output = done.stdout + done.stderr
    check_against(alone, tmp_path / "out", "deepspeed")
    assert output.count("|kvpolicy_hot") == 1  # one table is printed
    assert output.count("Running loglikelihood requests\n") == 1  # one logs, and one has progress bars
    for bar in ("Tokenizing inputs", "Scoring under squeeze+kvcrush@0.5"):
        assert output.count(f"{bar}:   0%|") == 1  # each is opened once; its end may be drawn twice
    first, second = (dict(SqliteDict(str(tmp_path / f"answers_rank{rank}.db"))) for rank in (0, 1))
    assert len(first) > 4 and first.keys() == second.keys()

    assert done.returncode != 0 and "answered" not in done.stdout
    assert all(re.search(f"{REFUSED}.*{re.escape(mark)}$", done.stderr, re.MULTILINE) for mark in "+-"), done.stderr
    assert "MemoryError: the second rank has no room" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("end", ["if refused: sys.exit(7)", "raise MemoryError('no room')"])
def test_the_exit_of_a_rank_ends_the_job(launch, tmp_path: Path, end: str):
    done = launch("torchrun", script(tmp_path, SEEDED + f"    {end}\n"))
    assert done.returncode != 0 and REFUSED in done.stderr
    assert ("exitcode  : 7" if "exit" in end else "MemoryError: no room") in done.stderr

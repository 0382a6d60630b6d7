"""The sweep: what it writes, what it resumes, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.tasks import TaskManager

    from kvpolicy_eval.sweep import evaluate

import kvpolicy
from kvpolicy_eval import cli
from kvpolicy_eval.sweep import config, run
from kvpolicy_eval.sweep.cells import Cell, Store, load_json, write
from tests.eval.sweep import conftest
from tests.eval.sweep.conftest import quietly, sweep

pytestmark = pytest.mark.usefixtures("quiet")

ROOT = Path(__file__).parents[3]
SMALL = {"policies": ["full", "snapkv"], "budgets": [0.2], "tasks": ["kvpolicy_fewshot"], "limit": 2, "probes": 1}
REFUSED = "window+lowrank:rank=99@0.2"
"""A policy that does not fit the model, which is known when it is attached."""


def file(folder: Path, **changes: Any) -> Path:
    return conftest.file(folder, **SMALL | changes)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of two policies, and one cell that fails."""
    folder = tmp_path_factory.mktemp("sweep")
    out = folder / "out"
    with quietly():
        code = sweep(file(folder, policies=["full", "snapkv", REFUSED]), out)
    assert code == 1, "a cell failed"
    return out


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_a_cell_has_lm_evals_format(swept: Path) -> None:
    place = swept / "cells" / "embedded" / "kvpolicy_fewshot" / "snapkv@0.2"
    results = load_json(place / "results.json")
    assert set(results) >= {"results", "configs", "versions", "n-shot", "config", "kvpolicy_sweep"}
    assert 0 <= results["results"]["kvpolicy_fewshot"]["acc,none"] <= 1
    assert results["config"]["model"] == "kvpolicy"
    assert results["config"]["model_args"] == "policy=snapkv@0.2"
    lines = (place / "samples_kvpolicy_fewshot.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["doc_id"] for line in lines] == [0, 1]
    assert json.loads(lines[0])["arguments"]["gen_args_0"]["arg_0"]
    probe = results["kvpolicy_sweep"]["probe"]
    assert len(probe["budget"]) == len(probe["kept"]) == len(probe["cosine"]) == 8
    assert 15 < sum(map(sum, probe["kept"])) / (8 * len(probe["kept"][0])) < 25, "a budget of 20 %"
    assert results["kvpolicy_sweep"]["versions"]["torch"]


def test_the_table_has_costs_intervals_and_errors(swept: Path) -> None:
    rows = {row["method"] + row["budget"]: row for row in read_table(swept / "table.csv")}
    assert set(rows) == {"full", "snapkv0.2", "window+lowrank:rank=990.2"}
    assert rows["full"]["kv_share"] == "1.0" and 0.15 < float(rows["snapkv0.2"]["kv_share"]) < 0.25
    assert float(rows["full"]["low"]) <= float(rows["full"]["value"]) <= float(rows["full"]["high"])
    failed = rows["window+lowrank:rank=990.2"]
    assert failed["status"] == "failed" and failed["error"].startswith("KVPolicyError: ") and not failed["value"]
    lines = (swept / "table.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["method"] for line in lines] == [row["method"] for row in rows.values()]


def test_what_is_done_is_not_run_again_and_what_failed_when_asked(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run, "run_here", lambda _config, cells, _folder: asked.extend(map(str, cells)) or 0)
    place = file(tmp_path, policies=["full", "snapkv", REFUSED])
    assert sweep(place, swept) == 1 and not asked
    sweep(place, swept, "--retry")
    assert len(asked) == 1 and "lowrank" in asked[0]


def test_other_settings_need_another_folder(swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(file(tmp_path, limit=3), swept) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds results with limit 2, but the config has 3; give another --out" in error


class Killed(BaseException):
    """Nothing catches it, as nothing runs in a process that is killed."""


def test_a_killed_sweep_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while a second cell is evaluated, and before its results are written: a draft of them is no result."""
    place = file(tmp_path, policies=["full", "window", "streaming"], limit=1, probes=0)
    cells = config.load(str(place)).cells()
    store = Store(tmp_path / "out")
    finish = Store.finish

    def kill(self: Store, cell: Cell, *results: Any) -> None:
        if cell != cells[0]:
            raise Killed
        finish(self, cell, *results)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Store, "finish", kill)
        sweep(place, tmp_path / "out")
    assert [store.state(cell) for cell in cells] == ["done", "missing", "missing"]
    first = tmp_path / "out" / cells[0].folder / "results.json"
    written = first.stat().st_mtime_ns
    capsys.readouterr()
    assert sweep(place, tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "2 to run" in said and "[2/2]" in said and " left" in said
    assert all(store.state(cell) == "done" for cell in cells)
    assert first.stat().st_mtime_ns == written, "the finished cell was left alone"


@pytest.mark.slow
def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    found: list[Any] = []
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "eval", "integrations"))
    for jobs in ("1", "2"):
        words = ["sweep", str(file(tmp_path, probes=0)), "--out", str(tmp_path / jobs), "--jobs", jobs]
        line = [sys.executable, "-m", "kvpolicy_eval.cli", *words]
        subprocess.run(line, env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=300, capture_output=True)
        rows = read_table(tmp_path / jobs / "table.csv")
        found.append([(row["method"], row["value"], row["kv_bytes"]) for row in rows])
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.slow
def test_processes_that_divide_examples_find_what_one_finds(tmp_path: Path) -> None:
    """And a cell that fails in one of them fails in all, and the next one runs."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "eval", "integrations"))
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}  # as accelerate launch says it
    place = file(tmp_path, policies=["full", REFUSED, "window"], probes=0, limit=3)
    found: list[Any] = []
    for processes in ("1", "2"):
        words = ["-m", "kvpolicy_eval.cli", "sweep", str(place), "--out", str(tmp_path / processes)]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
        line = [sys.executable, *(launcher if processes == "2" else []), *words]
        ran = subprocess.run(line, env=environment, timeout=300, capture_output=True, text=True, check=False)
        assert "[3/3]" in ran.stderr, ran.stderr
        rows = read_table(tmp_path / processes / "table.csv")
        found.append([(row["method"], row["value"], row["error"][:30]) for row in rows])
    assert found[0] == found[1] and found[0][2][2].startswith("KVPolicyError: LowRank.rank")


def test_a_draft_is_no_result(tmp_path: Path) -> None:
    cell = Cell(model="m", task="t", method="h2o", budget="0.2")
    store = Store(tmp_path)
    write(tmp_path / cell.folder / ".results.json.1", "{")
    assert store.state(cell) == "missing"
    store.fail(cell, ValueError("too small"), 1.0)
    assert store.state(cell) == "failed"
    record = dict.fromkeys(("cell", "scores", "seconds", "peak_bytes", "probe", "versions"))
    store.finish(cell, {"kvpolicy_sweep": record}, {"t": "{}\n"})
    assert store.state(cell) == "done" and not (tmp_path / cell.folder / "error.json").exists()


def test_what_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_cells_have_folders_of_their_own() -> None:
    methods = ["kvcrush/h2o", "kvcrush:h2o", "csr:nnz=4", "csr:nnz=8", "window" * 40, "window" * 41, "../x"]
    folders = {Cell(model="m", task="t", method=method).folder for method in methods}
    assert len(folders) == len(methods)
    assert all(len(folder.parts) == 4 and ".." not in folder.parts for folder in folders)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polices": ["h2o"]}, "small has the unknown key polices; the keys are about, "),
        ({"models": [{"pretrained": "x", "dtyp": "float16"}]}, "A model of small has the unknown key dtyp"),
        ({"models": ["a/x", "b/x"]}, "two models with the name x"),
        ({"policies": []}, "small has no policies"),
        ({"tasks": None}, "small has no tasks"),
        ({"budgets": []}, "small has no budgets for snapkv"),
        ({"policies": ["h20"]}, "did you mean 'h2o'?"),
        ({"budgets": [1.5]}, "got the fraction 1.5"),
        ({"limit": 0}, "limit must be an integer of at least 1, got 0"),
        ({"batch_size": "many"}, "batch_size must be an integer of at least 1, or auto, got 'many'"),
        ({"tasks": ["no_such_task"]}, "lm-eval has no task no_such_task"),
        ({"modes": ["before"]}, "modes must be among inside, after, second, got 'before'"),
        ({"tasks": ["kvpolicy_hot_after"], "modes": ["second"]}, "got kvpolicy_hot_after; try kvpolicy_hot."),
        ({"tasks": ["kvpolicy_passkey"], "modes": ["second"]}, "kvpolicy_passkey may have no variant"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    # lm-eval's index of 14,000 files takes ten seconds
    def without_defaults(include_defaults: bool = False, **arguments: Any) -> TaskManager:
        return TaskManager(include_defaults=False, **arguments)

    monkeypatch.setattr(evaluate, "TaskManager", without_defaults)
    assert sweep(file(tmp_path, **changes), tmp_path / "out") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("kvpolicy-eval: ") and message in line


def test_no_config_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "nothing"]) == 2
    assert "There is no config nothing; give a YAML file, or one of csr, figures, kvcrush" in capsys.readouterr().err


def test_a_policy_with_its_own_budget_runs_once() -> None:
    content = {"policies": ["full", "h2o", "snapkv@0.50", "kivi:bits=4", "h2o"], "budgets": [0.1, 64, "8MiB"]}
    cells = config.read(content | {"tasks": ["a", "b"]}, "x").cells()
    for task in "ab":
        found = [cell.policy for cell in cells if cell.task == task]
        assert found == ["full", "h2o@0.1", "h2o@64", "h2o@8MiB", "snapkv@0.5", "kivi:bits=4"]


def test_every_task_has_every_place_of_the_question() -> None:
    content = {"policies": ["full"], "tasks": ["kvpolicy_hot", "kvpolicy_fewshot"]}
    assert config.read(content, "x").tasks == config.read(content | {"modes": "inside"}, "x").tasks
    assert config.read(content | {"modes": ["inside", "after", "second"]}, "x").tasks == (
        *("kvpolicy_hot", "kvpolicy_hot_after", "kvpolicy_hot_second"),
        *("kvpolicy_fewshot", "kvpolicy_fewshot_after", "kvpolicy_fewshot_second"),
    )
    single = config.read(content | {"tasks": ["kvpolicy_hot_after", "kvpolicy_passkey"]}, "x")
    assert single.tasks == ("kvpolicy_hot_after", "kvpolicy_passkey"), "variants may be listed as tasks"


def test_modes_are_a_column_and_a_part_of_the_report(tmp_path: Path) -> None:
    place = file(tmp_path, tasks=["kvpolicy_recall_512"], modes=["inside", "after"], policies=["full", "snapkv"])
    assert sweep(place, tmp_path / "out") == 0
    rows = {(row["method"], row["mode"]): row for row in read_table(tmp_path / "out" / "table.csv")}
    assert set(rows) == {(method, mode) for method in ("full", "snapkv") for mode in ("inside", "after")}
    assert rows["full", "after"]["task"] == "kvpolicy_recall_512_after" and rows["full", "after"]["value"] == "1.0"
    assert rows["snapkv", "inside"]["value"] == "1.0" > rows["snapkv", "after"]["value"], "it has not seen the question"
    assert cli.main(["report", str(tmp_path / "out"), "--no-page", "--markdown", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| policy | inside | after |" in text and "| `snapkv@0.2` | 1.00 [1.00, 1.00] | 0.00 [0.00, 0.00] |" in text
    found = load_json(next((tmp_path / "out").glob("cells/*/kvpolicy_recall_512_after/snapkv@0.2/results.json")))
    samples = next((tmp_path / "out").glob("cells/*/kvpolicy_recall_512_after/snapkv@0.2/samples*")).read_text()
    first = json.loads(samples.splitlines()[0])
    _, tokenizer = kvpolicy.tiny()
    compressed = first["arguments"]["gen_args_0"]["arg_0"].removesuffix(first["doc"]["held_back"])
    assert found["kvpolicy_sweep"]["probe"]["prompt"] == len(tokenizer(compressed).input_ids), "without the question"


def test_time_left_is_that_of_like_cells() -> None:
    slow, fast = (Cell(model="m", task=task, method="h2o", budget="0.1") for task in ("slow", "fast"))
    others = [Cell(model="m", task=cell.task, method="tova", budget="0.1") for cell in (slow, fast)]
    progress = run.Progress([slow, fast, *others], 2, show=False)
    progress.note(run.Outcome(slow, 100.0, ""))
    assert progress.left() == 150.0, "as the only one known"
    progress.note(run.Outcome(fast, 10.0, ""))
    assert progress.left() == 55.0


def test_a_key_without_a_value_is_as_none() -> None:
    empty = dict.fromkeys(["seed", "probes", "batch_size", "limit", "samples", "apply_chat_template", "gen_kwargs"])
    content = {"policies": ["full"], "tasks": ["kvpolicy_passkey"]}
    assert config.read(content | empty, "a") == config.read(content, "a")
    assert config.read(content | {"seed": 0}, "a").seed == 0

"""What a sweep passes to its tasks and records in its folder, and its intervals, against a slow reference."""

from __future__ import annotations

import subprocess
import warnings
import zlib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpolicy_eval.sweep import bootstrap, config, output
from kvpolicy_eval.sweep.cells import Cell, Store
from kvpolicy_eval.sweep.errors import SharedError
from kvpolicy_eval.sweep.settings import check_settings, write_settings
from kvpolicy_lm_eval.arguments import named_arguments
from tests.eval.sweep.conftest import SMALL, file, sweep

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval import evaluator
    from lm_eval.loggers import utils

    from kvpolicy_eval.sweep import evaluate
    from kvpolicy_lm_eval.model import KVPolicyLM


pytestmark = pytest.mark.usefixtures("quiet")

MADE = """
import datasets
from transformers import AutoTokenizer


def made(max_seq_lengths=(4096,), pretrained=None, tokenizer=None, **_):
    name = tokenizer or pretrained
    assert name, "No tokenizer or pretrained provided."
    words = AutoTokenizer.from_pretrained(name)("a b c").input_ids
    rows = [{"text": "a b c " * len(words), "length": length} for length in max_seq_lengths]
    return {"test": datasets.Dataset.from_list(rows)}


def score(doc, results):
    return {"4096": -1.0} | {str(doc["length"]): 0.5}


def mean(values):
    found = [value for value in values if value != -1]
    return sum(found) / len(found) if found else -1
"""
"""Tasks that make their texts with the model's tokenizer, and score by length, as RULER's do."""


def done(folder: Path, of: config.Config) -> Path:
    """Mark the first cell as finished; the file of its results."""
    cell = of.cells()[0]
    store = Store(folder)
    record = {"cell": asdict(cell), "scores": {}, "seconds": 1.0, "peak_bytes": None, "probe": {}, "versions": {}}
    store.finish(cell, {"results": {}, "config": {"kvpolicy": {"tasks": {}}}, "kvpolicy_sweep": record}, {})
    return folder / cell.folder / "results.json"


def made(folder: Path) -> Path:
    """A folder with such a task."""
    (folder / "made.py").write_text(MADE, encoding="utf-8")
    metrics = "".join(
        f'  - {{metric: "{length}", aggregation: !function made.mean, higher_is_better: true}}\n'
        for length in (4096, 128)
    )
    (folder / "made.yaml").write_text(
        "task: made\ncustom_dataset: !function made.made\ntest_split: test\noutput_type: generate_until\n"
        'doc_to_text: "{{text}}"\ndoc_to_target: "x"\nprocess_results: !function made.score\n'
        "generation_kwargs: {max_gen_toks: 2, until: []}\nmetric_list:\n" + metrics,
        encoding="utf-8",
    )
    return folder


def test_a_task_that_needs_a_tokenizer_gets_the_models(tmp_path: Path) -> None:
    """And a length that was not asked for has no score."""
    folder = made(tmp_path)
    place = file(tmp_path, tasks=["made"], include_path=str(folder), metadata={"max_seq_lengths": [128]})
    assert sweep(place, tmp_path / "out") == 0
    lines = (tmp_path / "out" / "table.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[3:8] for line in lines[1:]] == [["made", "inside", "128", "none", "0.5"]]


LONGEST = {"max_length": 4096, "enable_thinking": False}
"""What the longest prompts of SCBench and templates of chats depend on."""


@pytest.mark.parametrize(
    ("model", "metadata", "expected"),
    [
        ({}, {}, {"pretrained": "x/a"}),
        ({"tokenizer": "x/t"}, {}, {"pretrained": "x/a", "tokenizer": "x/t"}),
        ({}, {"tokenizer": "x/t"}, {"tokenizer": "x/t"}),
        (LONGEST, {}, LONGEST | {"pretrained": "x/a"}),
        (LONGEST, {"max_length": 64}, LONGEST | {"pretrained": "x/a", "max_length": 64}),
    ],
)
def test_tasks_get_the_tokenizer_of_a_model_and_what_else_prompts_depend_on(
    model: dict[str, Any], metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    """As under `lm_eval`."""
    content = {
        "models": [{"name": "a", "pretrained": "x/a"} | model, "x/b"],
        "policies": ["full"],
        "metadata": metadata,
    }
    ours = evaluate.Evaluator(config.read(content | {"tasks": ["kvpolicy_hot"]}, "x"))
    assert ours.tasks("a").metadata == expected


@pytest.mark.parametrize("name", ["papers-ruler", "papers-ruler-16k"])
def test_ruler_is_limited_within_one_length(name: str) -> None:
    """Its lengths follow each other, so that a limit would leave out all but the first."""
    (length,) = config.load(name).metadata["max_seq_lengths"]
    assert f"{length // 1024}k tokens" in config.load(name).about


def test_generation_and_seed_are_those_of_the_sweep(tmp_path: Path) -> None:
    place = file(tmp_path, tasks=["kvpolicy_recall_512"], gen_kwargs={"max_gen_toks": 2})
    assert sweep(place, tmp_path / "out", "--seed", "7") == 0
    (results,) = Store(tmp_path / "out").read("results.json")
    assert results["config"]["random_seed"] == results["config"]["torch_seed"] == 7
    assert results["config"]["kvpolicy"]["tasks"]["kvpolicy_recall_512/generate_until"]["new_tokens"] == 2
    assert sweep(place, tmp_path / "out", "--seed", "8") == 2, "other results need a folder of their own"
    assert sweep(place, tmp_path / "other", "--seed", "-1") == 2


def test_a_prompt_is_a_message_of_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model has no template, which lm-eval says."""
    assert config.read(SMALL | {"apply_chat_template": True}, "x").apply_chat_template
    assert not config.read(SMALL, "x").apply_chat_template
    place = file(tmp_path, apply_chat_template=True)
    assert sweep(place, tmp_path / "out") == 1
    assert "chat_template is not set" in capsys.readouterr().err


def test_settings_bind_when_something_was_measured(tmp_path: Path) -> None:
    """And not before, as after a misspelled name of a task."""
    write_settings(tmp_path, config.read(SMALL | {"limit": 2}, "x"))
    before = config.read(SMALL | {"limit": 1, "include_path": "one"}, "x")
    check_settings(tmp_path, before)
    write_settings(tmp_path, before)
    done(tmp_path, before)
    check_settings(tmp_path, before)
    for key, was, given in (("limit", "1", 2), ("include_path", '"one"', "two")):
        other = config.read(SMALL | {"limit": 1, "include_path": "one", key: given}, "x")
        with pytest.raises(ValueError, match=f"holds results with {key} {was}, but the config has"):
            check_settings(tmp_path, other)


FOREIGN = ["{}", "[]", "null", "7", '{"results": {}}', '{"kvpolicy_sweep": []}', '{"kvpolicy_sweep": {}}', "{", "\xe9"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_cell_with_a_file_that_no_sweep_wrote_is_not_done(text: str, tmp_path: Path) -> None:
    of = config.read(SMALL, "x")
    place = done(tmp_path, of)
    store = Store(tmp_path)
    assert store.state(of.cells()[0]) == "done" and store.holds_results()
    for name in ("results.json", "error.json"):
        place.with_name(name).write_bytes(text.encode("latin-1"))
    assert store.state(of.cells()[0]) == "missing" and not store.holds_results()
    for name in ("results.json", "error.json"):
        with pytest.raises(ValueError, match=rf"{name} must be a file of a sweep; delete it"):
            list(store.read(name))


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{"])
def test_notes_that_no_sweep_wrote_are_refused_in_a_sentence(text: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    done(out, config.read(SMALL, "x"))
    (out / "sweep.json").write_text(text, encoding="utf-8")
    assert sweep(file(tmp_path), out) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message == (
        f"kvpolicy-eval: {out}/sweep.json must be a file of a sweep; delete it and rerun the sweep, or give another "
        "folder."
    )


def test_a_model_takes_the_arguments_of_kvpolicy() -> None:
    columns = {"policy", "budget"}  # a cell's, not a model's
    assert set(named_arguments(KVPolicyLM.__init__)) - columns <= config.MODEL_KEYS


@pytest.mark.parametrize("pretrained", [".", "sub/..", "./"])
def test_a_model_in_this_folder_has_the_folders_name(pretrained: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert config.read(SMALL | {"models": [pretrained]}, "x").models == {"mine": {"pretrained": pretrained}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("about: 5", "about must be text, got 5"),
        ("about: 2026-10-01", "about must be text, got datetime.date(2026, 10, 1); put it in quotes"),
        ("output: [a]", "output must be text, got ['a']"),
        ("include_path: 7", "include_path must be text, got 7"),
        ("metadata: abc", "metadata must be keys with values, such as {max_seq_lengths: [4096]}, got 'abc'"),
        ("gen_kwargs: 7", "gen_kwargs must be keys with values, such as {max_gen_toks: 4096}, got 7"),
        ("apply_chat_template: 1", "apply_chat_template must be true or false, got 1."),
        ("metadata: [1]", "metadata must be keys with values, such as {max_seq_lengths: [4096]}, got [1]"),
        ("metadata: {1: a}", "metadata must be keys with values, such as {max_seq_lengths: [4096]}, got {1: 'a'}"),
        ("metadata: {since: 2026-10-01}", "metadata has a date or another value that JSON cannot hold"),
        ("models: [{name: a, revision: 2026-10-01}]", "The model a has a date or another value"),
        ("models: [/]", "A model of small is '/', from which no name can be derived"),
        ("models: ['']", "A model of small is '', from which no name can be derived"),
        ("samples: 'no'", "samples must be true or false, got 'no'"),
        ("about: na\xefve", "small.yaml must be text in UTF-8"),
    ],
)
def test_values_of_another_type_are_refused(line: str, message: str, tmp_path: Path, capsys: Any) -> None:
    place = file(tmp_path)
    place.write_bytes(place.read_bytes() + line.encode("latin-1") + b"\n")
    assert sweep(place, tmp_path / "out", "--plan") == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("kvpolicy-eval: ") and message in error


def test_a_process_that_cannot_prepare_a_cell_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which this one is the first."""
    ours = evaluate.Evaluator(config.read({"policies": ["full"], "tasks": ["kvpolicy_passkey"]}, "x"))
    monkeypatch.setattr(ours, "model", lambda name: SimpleNamespace(switch=lambda policy: None))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    other: list[tuple[str, str] | None] = [None]

    def gather(failures: list[Any], own: Any) -> None:
        failures[:] = [own, *other]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    ours.prepare(Cell(model="m", task="t", method="full"))
    with pytest.raises(SharedError, match="must have a registered name"):
        ours.prepare(Cell(model="m", task="t", method="nothing"))
    other[0] = ("OSError", "no weights")
    with pytest.raises(SharedError, match="no weights"):
        ours.prepare(Cell(model="m", task="t", method="full"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "get_git_commit_hash", evaluator.get_git_commit_hash)
    output._commit.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_git_says_nothing_outside_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    # A sweep that ran in this process before has made it quiet.
    monkeypatch.setattr(evaluator, "get_git_commit_hash", utils.get_git_commit_hash)
    output._commit.cache_clear()
    evaluator.get_git_commit_hash()
    assert "not a git repository" in capfd.readouterr().err, "lm-eval is quiet by itself: remove quiet_git"
    output.quiet_git(evaluator)
    assert evaluator.get_git_commit_hash() is None
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("fresh")
def test_the_commit_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="abc123\n")

    monkeypatch.setattr(subprocess, "run", run)
    output.quiet_git(evaluator)
    assert [evaluator.get_git_commit_hash() for _ in range(3)] == ["abc123"] * 3
    assert calls == [["git", "describe", "--always"]]
    output._commit.cache_clear()


@pytest.mark.parametrize("statistic", bootstrap.STATISTICS)
def test_bootstrap_against_a_slow_one(statistic: str) -> None:
    """Example by example, with the indices that the fast one draws."""
    generator = np.random.default_rng(1)
    values = [(-float(a), float(b)) for a, b in generator.uniform(1, 9, (7, 2))]
    values = [a for a, _ in values] if statistic == "mean" else values
    fast = bootstrap.draws(values, "task", statistic, 50)
    indices = np.random.default_rng(zlib.crc32(b"task")).integers(7, size=(50, 7))
    slow: list[float] = []
    for row in indices.tolist():
        slow.append(_plain([values[index] for index in row], statistic))
    np.testing.assert_allclose(fast, slow)
    assert bootstrap.statistic_of(values, _plain(values, statistic)) == statistic
    low, high = bootstrap.interval(fast)
    assert sorted(slow)[0] <= low < high <= sorted(slow)[-1]


def _plain(values: Any, statistic: str) -> float:
    """The statistic of some values, without arrays."""
    if statistic == "mean":
        return sum(values) / len(values)
    nats = -sum(a for a, _ in values) / sum(b for _, b in values)
    return float(np.exp(nats) if statistic == "perplexity" else nats / np.log(2))


def test_intervals_have_their_coverage() -> None:
    """Of 200 samples of 40 coins about 95 % have their probability inside."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = bootstrap.interval(bootstrap.draws(generator.binomial(1, 0.4, 40).tolist(), "coins", count=500))
        hits += low <= 0.4 <= high
    assert 180 <= hits <= 199


def test_two_policies_are_resampled_alike() -> None:
    one = bootstrap.draws([0, 1, 1, 0, 1], "task")
    np.testing.assert_allclose(one - bootstrap.draws([1, 0, 0, 1, 0], "task"), 2 * one - 1)
    assert not np.allclose(one, bootstrap.draws([0, 1, 1, 0, 1], "other"))


def test_what_cannot_be_resampled_has_no_interval() -> None:
    assert bootstrap.statistic_of([0.0, 1.0], 0.9) == ""
    assert bootstrap.statistic_of([["a", "b"], ["c", "d"]], 0.5) == ""
    assert bootstrap.statistic_of([], 0.5) == ""

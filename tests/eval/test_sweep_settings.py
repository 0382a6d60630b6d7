"""What a sweep tells its tasks and its folder."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval.models.huggingface")
    from kvpolicy_eval.sweep import evaluate

from kvpolicy_eval.sweep import command, config
from kvpolicy_eval.sweep.cells import Store
from tests.eval.sweeping import SMALL, file, quietly, sweep

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


@pytest.fixture(autouse=True)
def _quiet():
    with quietly():
        yield


def done(folder: Path, of: config.Config) -> Path:
    """Mark the first cell as finished; the file of its results."""
    cell, store = of.cells()[0], Store(folder)
    own = {"cell": asdict(cell), "scores": {}, "seconds": 1.0, "peak_bytes": None, "probe": {}, "versions": {}}
    store.finish(cell, {"results": {}, "config": {"kvpolicy": {"tasks": {}}}, "kvpolicy_sweep": own}, {})
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
    assert [line.split(",")[3:7] for line in lines[1:]] == [["made", "128", "none", "0.5"]]


def test_each_model_tells_tasks_its_own_tokenizer() -> None:
    models = [{"name": "a", "pretrained": "x/a"}, {"name": "b", "pretrained": "x/b", "tokenizer": "x/t"}]
    words = {"models": models, "policies": ["full"], "tasks": ["kvpolicy_hot"]}
    ours = evaluate.Evaluator(config.read(words, "x"))
    assert [ours.tasks(name).metadata for name in "ab"] == [
        {"pretrained": "x/a"}, {"pretrained": "x/b", "tokenizer": "x/t"},
    ]  # fmt: skip
    given = evaluate.Evaluator(config.read(words | {"metadata": {"tokenizer": "x/mine"}}, "x"))
    assert given.tasks("a").metadata == {"tokenizer": "x/mine"}


@pytest.mark.parametrize("name", ["papers-ruler", "papers-ruler-16k"])
def test_ruler_is_limited_within_one_length(name: str) -> None:
    """It lays its lengths end to end, so that a limit would leave out all but the first."""
    (length,) = config.load(name).metadata["max_seq_lengths"]
    assert f"{length // 1024}k tokens" in config.load(name).about


def test_tasks_of_another_folder_need_another_folder(tmp_path: Path) -> None:
    before = config.read(SMALL | {"include_path": "one"}, "x")
    command.note(tmp_path, before)
    done(tmp_path, before)
    with pytest.raises(ValueError, match='holds results with include_path "one", and the config says "two"'):
        command.same_settings(tmp_path, config.read(SMALL | {"include_path": "two"}, "x"))
    command.same_settings(tmp_path, before)


def test_settings_of_a_sweep_that_measured_nothing_do_not_bind(tmp_path: Path) -> None:
    """As after a task's name with a slip."""
    command.note(tmp_path, config.read(SMALL | {"limit": 2}, "x"))
    other = config.read(SMALL | {"limit": 1}, "x")
    command.same_settings(tmp_path, other)
    command.note(tmp_path, other)
    done(tmp_path, other)
    with pytest.raises(ValueError, match="holds results with limit 1, and the config says 2"):
        command.same_settings(tmp_path, config.read(SMALL | {"limit": 2}, "x"))


FOREIGN = ["{}", "[]", "null", "7", '{"results": {}}', '{"kvpolicy_sweep": []}', '{"kvpolicy_sweep": {}}', "{", "\xe9"]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_cell_with_a_file_that_no_sweep_wrote_is_not_done(text: str, tmp_path: Path) -> None:
    of = config.read(SMALL, "x")
    place, store = done(tmp_path, of), Store(tmp_path)
    assert store.state(of.cells()[0]) == "done" and store.holds_results()
    for name in ("results.json", "error.json"):
        place.with_name(name).write_bytes(text.encode("latin-1"))
    assert store.state(of.cells()[0]) == "missing" and not store.holds_results()
    for name in ("results.json", "error.json"):
        with pytest.raises(ValueError, match=rf"{name} is no file of a sweep: delete it"):
            list(store.read(name))


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{"])
def test_notes_that_no_sweep_wrote_are_told_in_a_sentence(text: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    done(out, config.read(SMALL, "x"))
    (out / "sweep.json").write_text(text, encoding="utf-8")
    assert sweep(file(tmp_path), out) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == f"kvpolicy-eval: {out}/sweep.json is no file of a sweep: delete it and run the sweep again, " + (
        "or give another folder."
    )


# what is read and refused, beside what test_sweep.py has


@pytest.mark.parametrize("pretrained", [".", "sub/..", "./"])
def test_a_model_in_this_folder_has_the_folders_name(pretrained: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert config.read(SMALL | {"models": [pretrained]}, "x").models == {"mine": {"pretrained": pretrained}}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("about: 5", "about is 5: give text"),
        ("about: 2026-10-01", "about is datetime.date(2026, 10, 1): give text, in quotes"),
        ("output: [a]", "output is ['a']: give text"),
        ("include_path: 7", "include_path is 7: give text"),
        ("metadata: abc", "metadata is 'abc': give keys with their values"),
        ("metadata: [1]", "metadata is [1]: give keys with their values"),
        ("metadata: {1: a}", "metadata is {1: 'a'}: give keys with their values"),
        ("metadata: {since: 2026-10-01}", "metadata has a date or another value that JSON cannot hold"),
        ("models: [{name: a, revision: 2026-10-01}]", "The model a has a date or another value"),
        ("models: [/]", "A model of small is '/', which gives no name"),
        ("models: ['']", "A model of small is '', which gives no name"),
        ("samples: 'no'", "samples is 'no': give true or false"),
        ("about: na\xefve", "small.yaml is not text in UTF-8: save it as that"),
    ],
)
def test_values_of_another_kind_are_refused(words: str, said: str, tmp_path: Path, capsys: Any) -> None:
    place = file(tmp_path)
    place.write_bytes(place.read_bytes() + words.encode("latin-1") + b"\n")
    assert sweep(place, tmp_path / "out", "--plan") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("kvpolicy-eval: ") and said in line

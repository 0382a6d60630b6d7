"""`sweep --plan` and `--models`: what a sweep will need, without running or downloading anything."""

from __future__ import annotations

import re
import socket
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import MistralConfig

import kvpolicy
from kvpolicy_eval.sweep import config, sizes
from kvpolicy_eval.sweep.cells import Cell
from kvpolicy_eval.sweep.estimate import (
    BANDWIDTH,
    CARDS,
    COMPUTE,
    LAYER_SECONDS,
    Card,
    estimate,
    most_memory,
    total_hours,
)
from kvpolicy_eval.sweep.plan import COLUMNS, format_hours, lines
from tests.eval.sweep.conftest import file, sweep

pytestmark = pytest.mark.usefixtures("quiet")

SHIPPED = sorted(
    path.name.removesuffix(".yaml")
    for path in (files("kvpolicy_eval") / "configs").iterdir()
    if path.name.endswith(".yaml")
)
SIZES = yaml.safe_load((files("kvpolicy_eval.sweep") / "sizes.yaml").read_text(encoding="utf-8"))
A100 = CARDS["a100-80gb"]
MISTRAL = {"name": "m", "pretrained": "mistralai/Mistral-7B-v0.3", "dtype": "bfloat16", "max_length": 8192}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def made(**content: Any) -> config.Config:
    return config.read({"models": [MISTRAL], "policies": ["full"], "tasks": ["longbench_samsum"]} | content, "x")


def only(of: config.Config, card: Card = A100) -> Any:
    (found,) = [estimate(of, cell, card) for cell in of.cells()]
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_every_policy_of_a_shipped_sweep_can_be_planned(name: str) -> None:
    """A model whose layers all slide, or a budget that is too small, would fail in every cell of its run."""
    found = config.load(name)
    assert found.name == name and found.output == f"results/{name}" and found.about
    first: dict[tuple[str, str], Cell] = {}
    for cell in found.cells():
        first.setdefault((cell.model, cell.method), cell)
    problems = {estimate(found, cell, A100).problem for cell in first.values()} - {""}
    assert all(":dictionary=csr-llama-3-8b" in problem for problem in problems), problems
    assert all(sizes.task_size(task, found.metadata) for task in found.tasks)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.2", 7.242),
        ("mistralai/Mistral-7B-v0.3", 7.248),
        ("togethercomputer/LLaMA-2-7B-32K", 6.738),
        ("EleutherAI/gpt-neox-20b", 20.555),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8.030),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8.030),
        ("Qwen/Qwen3-8B", 8.191),
    ],
)
def test_known_models_have_their_published_sizes(name: str, billions: float) -> None:
    weights = kvpolicy.weights_per_rank(sizes.model_config(name), dtype=torch.bfloat16).nbytes
    assert weights / 2e9 == pytest.approx(billions, abs=5e-4)
    assert len(SIZES["models"]) == 8


def test_answers_are_as_long_as_the_sweep_says() -> None:
    """A model that reasons writes more than the most tokens of a task."""
    short = only(made(tasks=["gsm8k"]))
    long = only(made(tasks=["gsm8k"], gen_kwargs={"max_gen_toks": 4096}))
    assert (short.size.new, long.size.new) == (256, 4096)
    assert long.hours > 10 * short.hours and long.full_nbytes > short.full_nbytes


def test_the_ratios_of_the_leaderboard_are_what_is_removed() -> None:
    found = config.load("papers-kvpress")
    assert [1 - float(budget) for budget in found.budgets] == [0.25, 0.5, 0.75, 0.875]
    assert found.apply_chat_template and found.models["qwen3-8b"]["enable_thinking"] is False
    evicting = [spec for spec in found.policies if spec != "full"]
    assert all("decode=grow" in spec for spec in evicting), "kvpress evicts no generated tokens"


def test_reasoning_compares_each_method_with_the_prompt_kept_and_with_chance() -> None:
    found = config.load("papers-reasoning")
    kept = {spec for spec in found.policies if "protect=prompt" in spec}
    assert {"random", "random:protect=prompt"} <= set(found.policies)
    for spec in ("h2o", "tova", "window", "keyformer", "rkv:every=16"):
        assert spec in found.policies and f"{spec}:protect=prompt" in kept
    assert all(budget.endswith("B") for budget in found.budgets), "of the same bytes, whatever a token takes"
    for size in (500, 500, 30):
        assert size % int(found.batch_size) == 0, "a smaller batch would have more bytes for each row"


def test_sizes_of_tasks() -> None:
    assert sizes.task_size("longbench_lcc", {}) == sizes.TaskSize(examples=500, tokens=3088, new=64)
    both = sizes.task_size("ruler_vt", {"max_seq_lengths": [4096, 16384]})
    assert both == sizes.TaskSize(examples=1000, tokens=10210, new=30)
    assert sizes.task_size("ruler_vt", {}) is None
    assert sizes.task_size("ruler_vt", {"max_seq_lengths": "4096"}) is None
    assert sizes.task_size("no_such_task", {}) is None
    assert sizes.task_size("kvpolicy_hot_second", {}) == sizes.task_size("kvpolicy_hot", {}) is not None


def test_bytes_are_those_of_the_plan() -> None:
    found = only(made(policies=["squeeze+h2o@0.2"]))
    prompt = 8192 - 128  # SAMSUM's mean prompt is longer
    model = sizes.model_config(str(MISTRAL["pretrained"]))
    plan = kvpolicy.plan(model, "squeeze+h2o@0.2", prompt=prompt, new=128, dtype=torch.bfloat16)
    assert (found.nbytes, found.full_nbytes) == (plan.nbytes, plan.full_nbytes)
    assert found.size == sizes.TaskSize(examples=200, tokens=8064, new=128)
    stock = only(made())
    assert stock.nbytes == stock.full_nbytes == plan.full_nbytes and stock.share == 1


def test_hours_are_counted_operations_and_bytes() -> None:
    weights = 7_248_023_552
    tokens = 8064
    new = 128
    examples = 20
    flops = 2 * (weights - 32768 * 4096) * tokens + 32 * 32 * 128 * 2 * tokens**2  # 4 for a pair, half of them causal
    prompt = flops / (COMPUTE * 312e12)
    found = only(made(limit=examples))
    layers = examples * (prompt + (new - 1) * 32 * LAYER_SECONDS)
    assert found.hours * 3600 == pytest.approx(layers, rel=1e-9)  # the layers' least time is the longest
    slow = Card(name="slow", memory=10**9, flops=312e12, bandwidth=1e11)
    step = (2 * weights + found.full_nbytes) / (BANDWIDTH * 1e11)
    assert only(made(limit=examples), slow).hours * 3600 == pytest.approx(examples * (prompt + (new - 1) * step))
    batched = only(made(limit=examples, batch_size=8))
    steps = 3 * (new - 1) * 32 * LAYER_SECONDS
    assert batched.hours * 3600 == pytest.approx(examples * prompt + steps)


def test_memory_is_that_of_the_longest_prompts() -> None:
    short = only(made(models=[MISTRAL | {"max_length": 4096}], tasks=["xsum"]))
    long = only(made(models=[MISTRAL | {"max_length": 32768}], tasks=["xsum"]))
    token = 32 * 2 * 8 * 128 * 2
    state = (2 * 14336 + 4 * 4096) * 2
    assert long.memory - short.memory == (32768 - 4096) * (token + state)
    assert 2 * 7_248_023_552 < short.memory < CARDS["a100-80gb"].memory
    ranks = only(made(models=[MISTRAL | {"tp": 2}]))
    assert ranks.memory < 0.7 * only(made()).memory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["made_up"]}, "the size of made_up is not known"),
        ({"models": [{"pretrained": "nobody/nothing"}]}, "the config of nobody/nothing is not on this machine"),
        ({"models": [MISTRAL | {"dtype": "wide"}]}, "m: dtype must be a type of torch, got 'wide'; try bfloat16."),
        ({"models": [MISTRAL | {"tp": 64}]}, "m: "),
    ],
)
def test_what_is_not_known_is_said(changes: dict[str, Any], message: str) -> None:
    found = only(made(**changes))
    assert found.problem.startswith(message)
    assert found.hours is None and found.memory is None
    text = list(lines(made(**changes), dict.fromkeys(made(**changes).cells(), "missing"), "a100-80gb"))
    assert text[1].endswith(" ?") and any(line.startswith(f"not known: {message}") for line in text)
    assert any(": 1 cell to run, unknown time on a100-80gb" in line or " x a100-80gb" in line for line in text)


def test_a_model_that_no_policy_manages_is_said(tmp_path: Path) -> None:
    """As Mistral v0.1, all of whose layers slide."""
    MistralConfig(sliding_window=4096).save_pretrained(tmp_path)
    found = only(made(models=[{"name": "m", "pretrained": str(tmp_path)}], policies=["snapkv@0.2"]))
    assert found.problem.startswith("m: At least one layer must have full attention, got 32 sliding-window layers")
    assert found.hours is None and found.nbytes is None


def test_a_missing_calibration_has_the_hours_of_the_full_cache() -> None:
    found = only(made(policies=["csr:dictionary=nowhere"]))
    assert "got 'nowhere'" in found.problem and found.nbytes is None and found.hours == only(made()).hours


def test_the_text_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [MISTRAL, {"name": "embedded", "pretrained": "embedded"}]
    place = file(tmp_path, models=models, policies=["full", "h2o"], budgets=[0.2, 4096], tasks=["xsum"], limit=100)
    assert sweep(place, tmp_path / "out", "--plan", "--models", "m", "--card", "h200-141gb") == 0
    said = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", said[0]) == list(COLUMNS)
    assert [line.split()[:4] for line in said[1:4]] == [
        ["missing", "m", policy, "xsum"] for policy in ("full", "h2o@0.2", "h2o@4096")
    ]
    assert said[1].split()[4:] == ["100", "602", "256", "107", "MiB", "1.000", "0.23"]
    chosen = config.load(str(place)).only(["m"])
    hours = total_hours([estimate(chosen, cell, CARDS["h200-141gb"]) for cell in chosen.cells()])
    assert said[5].startswith(f"m: 3 cells to run, {format_hours(hours)} on h200-141gb; at most ")
    assert said[5].endswith(" GiB with the longest prompts, which fits")
    assert "1 cell with a budget that keeps every token of a mean prompt." in said
    assert "Estimated, not measured" in "\n".join(said)
    assert not (tmp_path / "out").exists()


def test_every_place_of_the_question_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = file(tmp_path, policies=["full", "h2o@0.2"], tasks=["kvpolicy_hot"], modes=["inside", "after", "second"])
    assert sweep(place, tmp_path / "out", "--plan") == 0
    printed = capsys.readouterr().out
    assert "embedded: 6 cells to run" in printed and "not known" not in printed
    found = [line.split()[3].removeprefix("kvpolicy_hot") for line in printed.splitlines()[1:7:2]]
    assert found == ["", "_after", "_second"]


def test_what_is_done_takes_no_hours() -> None:
    found = made(policies=["full", "window"], budgets=[0.2])
    cells = found.cells()
    text = "\n".join(lines(found, {cells[0]: "done", cells[1]: "failed"}, "a100-80gb"))
    one = format_hours(estimate(found, cells[1], A100).hours or 0)
    assert f"m: 1 cell to run, {one} on a100-80gb" in text
    text = "\n".join(lines(found, dict.fromkeys(cells, "done"), "a100-80gb"))
    assert "m: 0 cells to run, 0 h on a100-80gb" in text


def test_a_card_that_is_too_small_is_said() -> None:
    large = MISTRAL | {"pretrained": "EleutherAI/gpt-neox-20b", "dtype": "float32", "max_length": 2048}
    found = made(models=[large])
    assert "which does not fit" in "\n".join(lines(found, dict.fromkeys(found.cells(), "missing"), "a100-80gb"))
    assert most_memory([only(found)]) > 80 * 10**9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "m", "x"], "--models must be among m, got 'x'."),
        (["--policies", "h2o"], "--policies must be among full, got 'h2o'."),
        (["--tasks", "xsum"], "--tasks must be among kvpolicy_fewshot, got 'xsum'."),
        (["--plan", "--card", "tpu"], "--card must be one of a100-80gb, h100-80gb, h200-141gb, got 'tpu'."),
    ],
)
def test_wrong_names_are_one_sentence(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert sweep(file(tmp_path, models=[MISTRAL]), tmp_path / "out", *words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"kvpolicy-eval: {message}"


def test_models_policies_and_tasks_are_chosen_in_the_configs_order() -> None:
    found = config.load("papers-squeeze")
    some = found.only(policies=["h2o@0.2", "full", "squeeze+window"], tasks=["xsum", "longbench_samsum"])
    assert some.models == found.models
    budgets = [f"squeeze+window@{budget}" for budget in found.budgets]
    expected = {("longbench_samsum", policy) for policy in ["full", *budgets, "h2o@0.2"]}
    expected |= {("xsum", policy) for _, policy in expected}
    assert {(cell.task, cell.policy) for cell in some.cells()} == expected
    assert [cell.policy for cell in some.cells()][:2] == ["full", "squeeze+window@0.1"]
    assert found.only().cells() == found.cells()
    assert some.settings() == found.settings(), "so that the cells go into the same folder"
    assert list(found.only(["gpt-neox-20b", "mistral-7b"]).models) == ["mistral-7b", "gpt-neox-20b"]
    assert {cell.model for cell in found.only(["mistral-7b"]).cells()} == {"mistral-7b"}


def test_cells_of_the_config_of_table_2_are_some_of_all_tables() -> None:
    found, whole = (config.load(name) for name in ("papers-squeeze-table2", "papers-squeeze"))
    assert len(found.cells()) == 3 and set(found.cells()) <= set(whole.cells())
    assert found.models["mistral-7b"] == whole.models["mistral-7b"]


@pytest.mark.parametrize(("hours", "text"), [(0.0, "0.01 h"), (0.3, "0.30 h"), (99.96, "100.0 h"), (12345, "12,345 h")])
def test_hours_in_words(hours: float, text: str) -> None:
    assert format_hours(hours) == text

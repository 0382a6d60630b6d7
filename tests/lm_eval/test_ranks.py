"""What several processes may ask for, what they make equal, and how they end; no process group is needed."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

import kvpolicy_lm_eval
from kvpolicy_lm_eval import ranks
from kvpolicy_lm_eval.arguments import Division, read_division
from kvpolicy_lm_eval.model import KVPolicyLM

TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
COMMANDS = (
    "torchrun --standalone --nproc_per_node 4 -m lm_eval .*deepspeed --num_gpus 4 --no_local_rank --module lm_eval"
)


def test_division_is_read():
    assert read_division(2, "default", {"batch_size": 4, "dtype": "bfloat16"}, TWO) == Division(2, "deepspeed")
    assert read_division(2, "hf", {}, TWO) == Division(2, "hf")
    assert read_division(1, "hf", {}, {}) == read_division(None, "causal", {}, TWO) == Division(1)


@pytest.mark.parametrize(
    ("tp", "backend", "others", "environment", "why"),
    [
        (4, "hf", {}, {}, f"tp=4 needs 4 processes, and there are 1: run {COMMANDS}"),
        (4, "hf", {}, TWO, f"tp=4 needs 4 processes, and there are 2: run {COMMANDS}"),
        (4, "hf", {}, {"WORLD_SIZE": "8"}, "there are 8"),
        (4, "hf", {}, {"WORLD_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "no"}, f"accelerate launch .*run {COMMANDS}"),
        (2, "hf", {"batch_size": "auto"}, TWO, "batch_size=auto .*give a number with tp=2"),
        (2, "hf", {"batch_size": "auto:4"}, TWO, "batch_size=auto"),
        (2, "hf", {"peft": "some/adapter"}, TWO, "peft cannot be combined with tp=2"),
        (2, "hf", {"parallelize": True}, TWO, "parallelize cannot"),
        (None, "default", {"tp_plan": "auto"}, TWO, "tp=N,backend=hf"),
        (None, "deepspeed", {}, {}, "backend=deepspeed .*tp=N"),
        (0, "default", {}, {}, "tp is 0"),
        ("two", "default", {}, {}, "tp is 'two'"),
    ],
)
def test_what_does_not_go_together_is_refused(tp: Any, backend: str, others: Any, environment: Any, why: str):
    with pytest.raises(ValueError, match=why):
        read_division(tp, backend, others, environment)


def test_model_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="tp=2 needs 2 processes"):
        KVPolicyLM(pretrained="no/such/model", policy="h2o", tp=2)


def test_lm_eval_whose_ranks_would_all_write_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Old:
        def __init__(self) -> None: ...

    monkeypatch.setattr("kvpolicy_lm_eval.arguments.huggingface.HFLM", Old)
    with pytest.raises(RuntimeError, match=r"0\.4\.13"):
        read_division(2, "hf", {}, TWO)


def test_copies_are_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    ranks.warn_of_copies(2, TWO)
    assert not caplog.records
    ranks.warn_of_copies(1, TWO)
    assert "say tp=2 to divide it" in caplog.text


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand for two ranks: `first` and `all` are what this one hears, and it is the second."""
    hears: dict[str, Any] = {}
    monkeypatch.setattr(ranks, "_from_all", lambda mine: hears.get("all", [mine, mine]))
    monkeypatch.setattr(ranks, "_from_first", lambda mine: hears.get("first", mine))
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    return hears


def test_request_cache_becomes_the_first_ranks(two, tmp_path: Path):
    from sqlitedict import SqliteDict

    two["all"] = ["/a_rank0.db", "/a_rank1.db"]
    two["first"] = [("x", (-1.5, True)), ("y", "text")]
    cache = SqliteDict(str(tmp_path / "a.db"), autocommit=True)
    cache["y"] = "text"
    cache["z"] = "only here"
    ranks.same_answers(cache)
    assert dict(cache.items()) == {"x": (-1.5, True), "y": "text"}
    two["all"] = ["/a.db", "/a.db"]
    with pytest.raises(ValueError, match=r"/a\.db: leave --use_cache out"):
        ranks.same_answers(cache)
    cache.close()


def test_requests_are_compared(two):
    requests = [Instance("loglikelihood", {}, ("context", "answer"), 0)]
    ranks.same_requests("loglikelihood", requests)
    two["all"] = ["one", "other"]
    with pytest.raises(RuntimeError, match="--seed"):
        ranks.same_requests("loglikelihood", requests)


@pytest.fixture
def part(two, monkeypatch: pytest.MonkeyPatch, tiny) -> Any:
    """Load a model that passes for one rank's part."""
    monkeypatch.setattr(ranks, "sharing_of", lambda _model: "two ranks")
    monkeypatch.setattr(ranks, "leave_at_exit", lambda: None)
    monkeypatch.setattr(ranks, "silence", lambda: None)
    return lambda: ranks.load_part(tiny[0], Division(2, "hf"), None, None)  # pyright: ignore[reportArgumentType]


def test_random_numbers_follow_the_first_rank(two, part):
    two["first"] = ranks._random_state()
    expected = random.random(), float(torch.rand(()))
    random.seed(5)
    torch.manual_seed(5)
    part()
    assert (random.random(), float(torch.rand(()))) == expected


@pytest.mark.parametrize(
    ("rank", "local", "after"), [("0", "0", "0"), ("1", "1", "1"), ("8", "0", "8"), ("9", "1", "1")]
)
def test_of_several_nodes_one_process_writes(part, monkeypatch: pytest.MonkeyPatch, rank: str, local: str, after: str):
    """lm-eval writes where LOCAL_RANK is 0."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    part()
    assert os.environ["LOCAL_RANK"] == after


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("print('done')", 0, "done"),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no"),
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("command_line", [True, False])
def test_exit_code_is_kept(last: str, code: int, said: str, command_line: bool):
    lines = [
        "import sys, atexit",
        f"sys.path.insert(0, {str(Path(kvpolicy_lm_eval.__file__).parent.parent)!r})",
        "sys.modules['lm_eval._cli'] = sys" if command_line else "",
        "from kvpolicy_lm_eval.leaving import leave_at_exit",
        "atexit.register(print, 'later')",  # registered before, so that Python would run it after ours
        "leave_at_exit()",
        last,
    ]
    done = subprocess.run([sys.executable, "-S", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert ("later" in done.stdout) is (not command_line and "raise" not in last)


def test_a_part_of_a_model_is_no_model(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "sharing_of", lambda _model: SimpleNamespace(group=None))
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda _group: 2)
    with pytest.raises(ValueError, match="2 ranks hold: say tp=2 too"):
        make("h2o")

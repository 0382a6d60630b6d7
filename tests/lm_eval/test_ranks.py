"""Arguments, synchronization and exit of several ranks, without a process group."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tqdm import tqdm

import kvpolicy_lm_eval
from kvpolicy import KVPolicyError
from kvpolicy_lm_eval import ranks
from kvpolicy_lm_eval.arguments import Sharding, read_sharding
from kvpolicy_lm_eval.held_back import NOTHING_HELD, HeldBack
from kvpolicy_lm_eval.model import KVPolicyLM
from kvpolicy_lm_eval.request_groups import join_tasks
from tests.sampling import each_once, product

TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
COMMANDS = (
    "torchrun --standalone --nproc_per_node 4 -m lm_eval .*deepspeed --num_gpus 4 --no_local_rank --module lm_eval"
)


def test_sharding_is_read():
    assert read_sharding(2, "default", {"batch_size": 4, "dtype": "bfloat16"}, TWO) == Sharding(2, "deepspeed")
    assert read_sharding(2, "hf", {}, TWO) == Sharding(2, "hf")
    assert read_sharding(1, "hf", {}, {}) == read_sharding(None, "causal", {}, TWO) == Sharding(1)


@pytest.mark.parametrize(
    ("tp", "backend", "others", "environment", "why"),
    [
        (4, "hf", {}, {}, f"tp=4 must have 4 processes, got 1; try {COMMANDS}"),
        (4, "hf", {}, TWO, f"tp=4 must have 4 processes, got 2; try {COMMANDS}"),
        (4, "hf", {}, {"WORLD_SIZE": "8"}, "tp=4 must have 4 processes, got 8"),
        (
            4,
            "hf",
            {},
            {"WORLD_SIZE": "4", "ACCELERATE_MIXED_PRECISION": "no"},
            f"accelerate launch, .* without tp for data parallelism, or {COMMANDS}",
        ),
        (2, "hf", {"batch_size": "auto"}, TWO, "batch_size must be a number with tp=2, .* got auto; try batch_size=1"),
        (2, "hf", {"batch_size": "auto:4"}, TWO, "got auto:4; try batch_size=1"),
        (2, "hf", {"peft": "some/adapter"}, TWO, "peft must be omitted with tp=2, got 'some/adapter'"),
        (2, "hf", {"parallelize": True}, TWO, "parallelize must be omitted with tp=2, got True"),
        (None, "default", {"tp_plan": "auto"}, TWO, "tp=N,backend=hf"),
        (None, "deepspeed", {}, {}, "backend=deepspeed must be combined with tp, .*tp=N"),
        (0, "default", {}, {}, "tp must be an integer of at least 1, got 0"),
        ("two", "default", {}, {}, "tp must be an integer of at least 1, got 'two'"),
    ],
)
def test_contradicting_arguments_are_rejected(tp: Any, backend: str, others: Any, environment: Any, why: str):
    with pytest.raises(ValueError, match=why):
        read_sharding(tp, backend, others, environment)


def test_arguments_are_checked_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="tp=2 must have 2 processes"):
        KVPolicyLM(pretrained="no/such/model", policy="h2o", tp=2)


def test_an_lm_eval_whose_ranks_all_write_is_rejected(monkeypatch: pytest.MonkeyPatch):
    class Old:
        def __init__(self) -> None: ...

    monkeypatch.setattr("kvpolicy_lm_eval.arguments.huggingface.HFLM", Old)
    with pytest.raises(RuntimeError, match=r"0\.4\.13"):
        read_sharding(2, "hf", {}, TWO)


def test_copies_are_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    ranks.warn_of_copies(2, TWO)
    assert not caplog.records
    ranks.warn_of_copies(1, TWO)
    assert "use tp=2 to shard it" in caplog.text


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the collectives: this is the second of two ranks, and receives `first` and `all`."""
    received: dict[str, Any] = {}
    monkeypatch.setattr(ranks, "all_gather", lambda value: received.get("all", [value, value]))
    monkeypatch.setattr(ranks, "_broadcast", lambda value: received.get("first", value))
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    return received


def test_request_cache_becomes_the_first_ranks(two, tmp_path: Path):
    from sqlitedict import SqliteDict

    two["all"] = ["/a_rank0.db", "/a_rank1.db"]
    two["first"] = [("x", (-1.5, True)), ("y", "text")]
    cache = SqliteDict(str(tmp_path / "a.db"), autocommit=True)
    cache["y"] = "text"
    cache["z"] = "only here"
    ranks.synchronize_answers(cache)
    assert dict(cache.items()) == {"x": (-1.5, True), "y": "text"}
    two["all"] = ["/a.db", "/a.db"]
    with pytest.raises(ValueError, match=r"must have its own request cache, got /a\.db twice; try without --use_cache"):
        ranks.synchronize_answers(cache)
    cache.close()


def test_requests_are_compared(two):
    requests = [Instance("loglikelihood", {}, ("context", "answer"), 0)]
    ranks.check_same_requests("loglikelihood", requests)
    two["all"] = ["one", "other"]
    with pytest.raises(RuntimeError, match="--seed"):
        ranks.check_same_requests("loglikelihood", requests)


@pytest.fixture
def part(two, monkeypatch: pytest.MonkeyPatch, tiny) -> Any:
    """Load a model that is treated as a shard."""
    monkeypatch.setattr(ranks, "sharing_of", lambda _model: "two ranks")
    monkeypatch.setattr(ranks, "end_process_at_exit", lambda: None)
    monkeypatch.setattr(ranks, "silence", lambda: None)
    return lambda: ranks.load_shard(tiny[0], Sharding(2, "hf"), None, None)  # pyright: ignore[reportArgumentType]


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
    """lm-eval writes the results where LOCAL_RANK is 0; the first rank alone says anything."""
    silenced: list[str] = []
    monkeypatch.setattr(ranks, "silence", lambda: silenced.append(rank))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    part()
    assert os.environ["LOCAL_RANK"] == after and silenced == [rank] * (rank != "0")


def test_a_silent_rank_prints_errors_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(tqdm, "__init__", tqdm.__init__)
    with warnings.catch_warnings():
        try:
            ranks.silence()
            print("printed")
            warnings.warn("a warning", stacklevel=1)
            list(tqdm(range(3)))
            print("an error", file=sys.stderr)
            assert [logging.root.isEnabledFor(level) for level in (logging.WARNING, logging.ERROR)] == [False, True]
        finally:
            logging.disable(logging.NOTSET)
            sys.stdout.close()
    assert capsys.readouterr() == ("", "an error\n")


def test_several_processes_measure_a_batch_size_once():
    groups: Any = {("one", HeldBack(3, beyond=False)): [0], ("other", NOTHING_HELD): [1]}
    with pytest.raises(KVPolicyError, match="batch_size must be a number for tasks whose question is fed later"):
        join_tasks(groups, "auto")
    assert join_tasks(groups, 4) == {("one+other", HeldBack(3, beyond=False)): [0], ("one+other", NOTHING_HELD): [1]}
    assert join_tasks({("one", NOTHING_HELD): [1, 2]}, "auto") == {("one", NOTHING_HELD): [1, 2]}  # pyright: ignore


ENDS = [
    ("print('done')", 0, "done"),
    ("sys.exit()", 0, ""),
    ("sys.exit(3)", 3, ""),
    ("sys.exit('no')", 1, "no"),
    ("raise ValueError('why')", 1, "ValueError: why"),
    ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
]


@product("end,command_line", ENDS, [True, False], sample=[*each_once(ENDS, [True, False]), (ENDS[0], False)])
def test_exit_code_is_kept(end: tuple[str, int, str], command_line: bool):
    last, code, output = end
    lines = [
        "import sys, atexit",
        f"sys.path.insert(0, {str(Path(kvpolicy_lm_eval.__file__).parent.parent)!r})",
        "sys.modules['lm_eval._cli'] = sys" if command_line else "",
        "from kvpolicy_lm_eval.process_exit import end_process_at_exit",
        "atexit.register(print, 'later')",  # registered first, so that Python runs it last
        "end_process_at_exit()",
        last,
    ]
    done = subprocess.run([sys.executable, "-S", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == code
    assert output in done.stdout + done.stderr
    assert ("later" in done.stdout) is (not command_line and "raise" not in last)


def test_a_shard_is_rejected_without_tp(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "sharing_of", lambda _model: SimpleNamespace(group=None))
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda _group: 2)
    with pytest.raises(ValueError, match="must be complete without tp, got a shard of 2 ranks; try tp=2"):
        make("h2o")

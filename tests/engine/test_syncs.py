"""An eager decode step reads nothing back from the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy_eval.bench.operations import READS
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

PROMPT = 24
STEPS = 12


class Reads(TorchDispatchMode):
    """Counts what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in READS
        return func(*args, **(kwargs or {}))


def reads_of_steps(policy: str, *, rows: list[int], places: bool) -> list[int]:
    """What each step after a prompt reads back."""
    model = build("llama")
    ids, mask = make_batch(rows, [PROMPT] + [1] * STEPS)
    counts: list[int] = []
    with kvpolicy.attach(model, policy), torch.no_grad():
        cache = PolicyCache(model, new=STEPS)
        forward(model, ids, mask, 0, PROMPT, cache)
        for column in range(PROMPT, PROMPT + STEPS):
            call: dict[str, Any] = {"attention_mask": mask[:, : column + 1]} if len(rows) > 1 else {}
            if places:
                call["position_ids"] = (mask.cumsum(-1) - 1)[:, column, None]
            with Reads() as reads:
                model(ids[:, column, None], cache=cache, **call)
            counts.append(reads.count)
    return counts


EVICTING = ["window@0.5", "snapkv@0.5", "squeeze+h2o@0.5", "uniform/adakv+h2o@0.5", "uniform/adakv+h2o+compensate@0.5"]
CODING = [
    "snapkv+kivi:group_size=4:residual_length=4@0.5",
    "uniform/adakv+h2o+tokenwise:residual_length=4:block_size=4@0.5",
    "uniform/adakv+h2o+compensate+tokenwise:residual_length=4:block_size=4@0.5",
]


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("policy", EVICTING)
def test_an_eager_step_waits_for_nothing(policy: str, places: bool) -> None:
    """The columns seen are counted on the host, for positions, for masks and for the cache's own checks."""
    assert set(reads_of_steps(policy, rows=[PROMPT], places=places)) == {0}


@pytest.mark.parametrize("policy", CODING)
def test_blocks_are_counted_when_they_are_encoded(policy: str) -> None:
    """At most in every second of these steps, in which some blocks are full."""
    counts = reads_of_steps(policy, rows=[PROMPT], places=False)
    assert counts.count(0) >= STEPS // 2


def test_a_mask_is_read_once_in_a_step() -> None:
    """Whether its newest column has padding: without, a step has fewer operations. Never once per layer."""
    assert set(reads_of_steps("snapkv@0.5", rows=[PROMPT, 15], places=False)) == {1}


def test_all_selections_wait_for_little() -> None:
    assert min(reads_of_steps("kvcrush@0.5", rows=[PROMPT], places=False)) == 0


def seen_by(cache: PolicyCache) -> list[int]:
    """The columns that each layer counts, which are those of the device."""
    counted = [layer.get_seq_length() for layer in cache.policy_layers]
    assert counted == [int(layer.store.tensors.columns) for layer in cache.policy_layers]
    return counted


def test_columns_are_right_after_compiled_steps_and_what_takes_back_or_copies(tmp_path: Path) -> None:
    """A compiled step counts on the device alone, so that the host reads it once after."""
    torch.compiler.reset()
    model = build("llama", layers=2)
    ids, mask = make_batch([PROMPT], [PROMPT] + [1] * STEPS)
    with kvpolicy.attach(model, "full"), torch.no_grad():
        cache = PolicyCache(model, new=STEPS)
        forward(model, ids, mask, 0, PROMPT, cache)
        step: Any = torch.compile(model, backend="eager", fullgraph=True)
        for column in range(PROMPT, PROMPT + 3):
            step(ids[:, column, None].clone(), cache=cache)
            cache.tick()
        assert seen_by(cache) == [PROMPT + 3] * 2
        model(ids[:, 3, None], cache=cache)
        step(ids[:, 4, None].clone(), cache=cache)
        cache.tick()
        model(ids[:, 5, None], cache=cache)
        assert seen_by(cache) == [PROMPT + 6] * 2
        cache.mark(4)
        for column in range(3):
            model(ids[:, column, None], cache=cache)
        cache.rollback(1)
        assert seen_by(cache) == [PROMPT + 7] * 2
        cache.save(tmp_path / "cache.kvp")
        fork = cache.fork([0, 0])
        cache.crop(-12)
        assert seen_by(cache) == [PROMPT - 5] * 2
        assert seen_by(fork) == seen_by(PolicyCache.load(model, tmp_path / "cache.kvp")) == [PROMPT + 7] * 2
        model(ids[:, 0, None].expand(2, -1), cache=fork)
        assert seen_by(fork) == [PROMPT + 8] * 2
        fork.reset()
        assert fork.get_seq_length() == 0

"""An eager decode step has few operations, and none that waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.engine.decode import SharedStep
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy_eval.bench.launches import POLICIES
from kvpolicy_eval.bench.operations import LAYERS, READS, Operations, step_operations
from tests.conformance.models import build
from tests.conformance.play import make_batch
from tests.engine.filled import prompted

LIMITS = {
    "full": 41,
    "window@0.2": 46,
    "streaming@0.2": 50,
    "snapkv@0.2": 49,
    "h2o@0.2": 52,
    "tova@0.2": 50,
    "expected@0.2": 80,
    "keydiff@0.2": 60,
    "squeeze+kvcrush/snapkv@0.2": 52,
    "h2o+merge@0.2": 113,
    "tokenwise:bits=4": 59,
    "kivi:bits=4": 58,
    "snapkv+kivi:bits=4@0.5": 71,
    "snapkv+tokenwise:bits=4@0.5": 72,
    "uniform/adakv+snapkv@0.2": 67,
    "uniform/adakv+h2o@0.2": 70,
    "uniform/adakv+snapkv+tokenwise:bits=4@0.5": 92,
    "full+quest:read=64:dense=0": 78,
    "snapkv+quest:read=64:dense=0@0.5": 136,
    "uniform/adakv+kvzip+tokenwise:bits=4@0.5": 94,
}
"""The most operations per layer of a step that encodes no block; lower them when a step needs fewer."""


def test_every_policy_of_the_table_has_a_limit() -> None:
    assert tuple(LIMITS) == POLICIES


@pytest.mark.filterwarnings("ignore:The budget")
@pytest.mark.parametrize("policy", POLICIES)
def test_operations_of_a_step(policy: str) -> None:
    """And the limit is the least one, so that a saving is noted."""
    counted = step_operations(policy)
    assert -(-counted.operations // LAYERS) == LIMITS[policy]
    assert counted.waits == 0


def test_bytes_are_those_that_an_operation_touches() -> None:
    numbers = torch.ones(4, 4)
    row = torch.tensor([1])
    other = torch.zeros(1, 4)
    with Operations() as operations:
        numbers.index_copy_(0, row, other)  # a row is read and written
        other.expand(4, 4).neg()  # the same row is read, and four are written
    assert operations.counted.nbytes == 2 * 16 + 16 + 64


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
        cache = prompted(model, ids, mask, PROMPT, new=STEPS)
        for column in range(PROMPT, PROMPT + STEPS):
            call: dict[str, Any] = {"attention_mask": mask[:, : column + 1]} if len(rows) > 1 else {}
            if places:
                call["position_ids"] = (mask.cumsum(-1) - 1)[:, column, None]
            with Reads() as reads:
                model(ids[:, column, None], cache=cache, **call)
            counts.append(reads.count)
    return counts


CODING = [
    "snapkv+kivi:group_size=4:residual_length=4@0.5",
    "uniform/adakv+h2o+tokenwise:residual_length=4:block_size=4@0.5",
    "uniform/adakv+h2o+compensate+tokenwise:residual_length=4:block_size=4@0.5",
]


@pytest.mark.parametrize("policy", CODING)
def test_blocks_are_counted_when_they_are_encoded(policy: str) -> None:
    """At most in every second of these steps, in which some blocks are full."""
    counts = reads_of_steps(policy, rows=[PROMPT], places=False)
    assert counts.count(0) >= STEPS // 2


def test_a_mask_is_read_once_in_a_step() -> None:
    """Whether its newest column has padding: without, a step has fewer operations. Never once per layer."""
    assert set(reads_of_steps("snapkv@0.5", rows=[PROMPT, 15], places=False)) == {1}


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
        cache = prompted(model, ids, mask, PROMPT, new=STEPS)
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


NEW = 6
CODES = "tokenwise:bits=4:block_size=4:residual_length=4"
SHORT_WAYS = (
    *("snapkv@0.3", "h2o@24", "h2o+merge@24", "uniform/adakv+h2o@32", "window@16"),
    *(f"snapkv+{CODES}@24", f"h2o+merge+{CODES}@24", f"uniform/adakv+snapkv+{CODES}@32"),
    *("snapkv+kivi:bits=4:group_size=4:residual_length=4@24", f"uniform/adakv+h2o+merge+{CODES}@32"),
)
"""Of slots and of pages, with and without weights of attention and merges, exact and in codes, of which steps make one
block."""


def _ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 24, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def _evict(cache: kvpolicy.PolicyCache) -> list[bool]:
    """Of each layer, whether each of its steps is known to evict; without a codec, all slots are full then."""
    layers = [layer.store.contents for layer in cache.policy_layers]
    assert all(layer.is_full == (layer.evicts and not sum(layer.layout.coded)) for layer in layers)
    return [layer.evicts for layer in layers]


def _never_full(cache: kvpolicy.PolicyCache) -> None:
    for layer in cache.policy_layers:
        layer.store.contents._evicts = False


def _steps(
    policy: str, ids: torch.Tensor, mask: torch.Tensor | None, before: Callable[[kvpolicy.PolicyCache], None]
) -> list[torch.Tensor]:
    model = build("llama", layers=2)
    start = ids.shape[1] - NEW
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=NEW)
        model(ids[:, :start], attention_mask=None if mask is None else mask[:, :start], cache=cache)
        before(cache)
        logits = [
            model(ids[:, n, None], attention_mask=None if mask is None else mask[:, : n + 1], cache=cache).logits
            for n in range(start, ids.shape[1])
        ]
        for layer in cache.policy_layers:
            check_invariants(layer.store)
            assert layer.length.tolist() == ([ids.shape[1]] if mask is None else mask.sum(-1).tolist())
            assert int(layer.store.tensors.columns) == layer.get_seq_length() == ids.shape[1]
        held = [t for layer in cache.policy_layers for t in (layer.positions, layer.keys, layer.values)]
        return logits + held


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("policy", SHORT_WAYS)
def test_the_shorter_way_leads_to_the_same_bits(policy: str, idle: bool) -> None:
    """Also where a row has no token in some steps, and evicts none."""
    ids = _ids(80).expand(1 + idle, -1)
    mask = torch.ones_like(ids) if idle else None
    if mask is not None:
        mask[0, -3:] = 0
    known: list[bool] = []
    short = _steps(policy, ids, mask, lambda cache: known.extend(_evict(cache)))
    assert all(known) and known
    for ours, theirs in zip(short, _steps(policy, ids, mask, _never_full), strict=True):
        assert torch.equal(ours, theirs)


def test_only_rows_that_are_all_full_are() -> None:
    ids = _ids(80).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :70] = 0
    known: list[bool] = []
    _steps("h2o@24", ids, mask, lambda cache: known.extend(_evict(cache)))
    assert known == [False, False]


@pytest.mark.parametrize("policy", ["h2o@24", f"h2o+{CODES}@24", f"uniform/adakv+h2o+{CODES}@24"])
def test_a_prompt_one_token_shorter_than_its_budget_leaves_room(policy: str) -> None:
    known: list[bool] = []
    ids = _ids(23 + NEW)
    short = _steps(policy, ids, None, lambda cache: known.extend(_evict(cache)))
    assert known == [False, False]
    for ours, theirs in zip(short, _steps(policy, ids, None, _never_full), strict=True):
        assert torch.equal(ours, theirs)


def test_removed_tokens_leave_room() -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "snapkv@24"):
        cache = kvpolicy.PolicyCache(model, new=NEW)
        model(_ids(80), cache=cache)
        assert all(_evict(cache))
        cache.mark(2)
        model(_ids(1), cache=cache)
        cache.rollback(0)
        assert all(_evict(cache))
        cache.shift(75, -5)
        assert not any(_evict(cache))


@pytest.mark.parametrize(
    "policy", ["full", "snapkv@16", "h2o@0.5", "squeeze+kvcrush/snapkv@0.5", "uniform/adakv+snapkv@32"]
)
def test_layers_that_share_a_step_hold_what_layers_alone_hold(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows begin at different columns, and one has no token in a step."""
    ids = torch.randint(3, 24, (2, 45), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(45) >= torch.tensor([[0], [7]])).long()
    mask[0, -2] = 0
    together = _steps(policy, ids, mask, lambda cache: None)
    attend = LayerStore.attend_step

    def alone(self: LayerStore, *args: object) -> object:
        return attend(self, *args[:6])  # pyright: ignore

    monkeypatch.setattr(LayerStore, "attend_step", alone)
    monkeypatch.setattr(SharedStep, "end", lambda self: None)
    for ours, theirs in zip(together, _steps(policy, ids, mask, lambda cache: None), strict=True):
        assert torch.equal(ours, theirs)

"""What the layers of an eager step share: each takes the same steps as a layer alone."""

from __future__ import annotations

import pytest
import torch

import kvpolicy
from kvpolicy.engine.decode import SharedStep
from kvpolicy.engine.invariants import check_invariants
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.protocols import StepMemo
from tests.conformance.models import build

NEW = 5
PROMPT = 40


def _steps(policy: str, rows: list[int]) -> list[torch.Tensor]:
    """Logits of steps behind a prompt in which rows begin at different columns, and what the layers hold at the end."""
    model = build("llama", layers=2)
    ids = torch.randint(3, 24, (len(rows), PROMPT + NEW), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(PROMPT + NEW) >= torch.tensor(rows)[:, None]).long()
    mask[0, -2] = 0  # a row without a token in this step
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model, new=NEW)
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache)
        out = [
            model(ids[:, n, None], attention_mask=mask[:, : n + 1], cache=cache).logits
            for n in range(PROMPT, PROMPT + NEW)
        ]
        for layer in cache.policy_layers:
            check_invariants(layer.store)
            assert layer.length.tolist() == mask.sum(-1).tolist()
            assert int(layer.store.tensors.columns) == layer.get_seq_length() == PROMPT + NEW
            out += [layer.positions, layer.keys, layer.values]
    return out


@pytest.mark.parametrize(
    "policy", ["full", "snapkv@16", "h2o@0.5", "squeeze+kvcrush/snapkv@0.5", "uniform/adakv+snapkv@32"]
)
def test_layers_that_share_a_step_hold_what_layers_alone_hold(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [0, 7]
    together = _steps(policy, rows)
    attend = LayerStore.attend_step

    def alone(self: LayerStore, *args: object) -> object:
        return attend(self, *args[:6])  # pyright: ignore

    monkeypatch.setattr(LayerStore, "attend_step", alone)
    monkeypatch.setattr(SharedStep, "end", lambda self: None)
    for ours, theirs in zip(together, _steps(policy, rows), strict=True):
        assert torch.equal(ours, theirs)


def test_a_memo_knows_tensors_by_identity_and_numbers_by_value() -> None:
    memo = StepMemo({})
    one = torch.ones(2)
    other = torch.ones(2)
    assert memo.once(torch.add, one, 1) is memo.once(torch.add, one, 1)
    assert memo.once(torch.add, one, 1) is not memo.once(torch.add, other, 1)
    assert memo.once(torch.add, one, 2).tolist() == [3, 3]
    assert memo.once(torch.add, one, 1, alpha=3).tolist() == [4, 4]


def test_counters_are_advanced_at_the_end_of_a_step() -> None:
    shared = SharedStep(StepMemo({}))
    lengths = [torch.tensor([4, 2]), torch.tensor([4, 2])]
    columns = [torch.tensor(4), torch.tensor(4)]
    valid = torch.tensor([[True], [False]])
    places = [shared.count(*pair, valid) for pair in zip(lengths, columns, strict=True)]
    assert places[0] is places[1] and places[0].flatten().tolist() == [4, 2]
    assert shared.lengths[lengths[0].device].tolist() == [5, 2]
    assert lengths[1].tolist() == [4, 2], "until the step ends"
    shared.end()
    assert [t.tolist() for t in lengths] == [[5, 2]] * 2 and [int(t) for t in columns] == [5, 5]

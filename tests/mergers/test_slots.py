"""Slots that stand for all that is evicted: Compensate has one of each head, and ZSMerge several."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy import ZSMerge
from kvpolicy.mergers.zsmerge import ZSMergeState
from tests.conformance.bench import Bench, draw
from tests.mergers.cases import held


def test_one_slot_is_the_mean_of_all_that_is_gone() -> None:
    """A window of four: the slot of its oldest token, then of the token that takes its place."""
    bench = Bench("window+compensate@4", [4])
    q, k, v = draw(12, 0)
    bench.forward(q, k, v)
    store = bench.layer
    counts = store.tensors.log_counts
    assert counts is not None
    torch.testing.assert_close(counts.exp()[0, 0], torch.tensor([9.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(store.tensors.keys[0, :, 0], k[0, :, :9].mean(1))
    torch.testing.assert_close(store.tensors.values[0, :, 0], v[0, :, :9].mean(1))
    for step in range(3):
        q1, k1, v1 = draw(1, step + 1)
        k = torch.cat([k, k1], 2)
        v = torch.cat([v, v1], 2)
        bench.forward(q1, k1, v1)
        slot = int(store.tensors.positions[0, 0].argmin())
        assert int(store.tensors.positions[0, 0, slot]) == 9 + step
        torch.testing.assert_close(store.tensors.values[0, :, slot], v[0, :, : 10 + step].mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(store.tensors.keys[0, :, slot], k[0, :, : 10 + step].mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(counts.exp().sum(-1), torch.full((1, 2), 13.0 + step))


def test_the_newest_token_stays_itself() -> None:
    bench = Bench("window+compensate@1", [1])
    q, k, v = draw(5, 0)
    bench.forward(q, k, v)
    assert torch.equal(bench.layer.tensors.values[:, :, 0], v[:, :, 4])
    assert torch.equal(bench.layer.tensors.keys[:, :, 0], k[:, :, 4])


def test_groups_of_neighbors() -> None:
    """A window of five: the slots of its two oldest tokens take in half of the rest each."""
    bench = Bench("window+zsmerge:slots=2@5", [5])
    q, k, v = draw(13, 0)
    bench.forward(q, k, v)
    tensors = bench.layer.tensors
    assert tensors.log_counts is not None
    torch.testing.assert_close(tensors.log_counts.exp()[0, 0], torch.tensor([5.0, 5.0, 1.0, 1.0, 1.0]))
    for slot, first in ((0, 0), (1, 4)):
        for found, every in ((tensors.keys, k), (tensors.values, v)):
            group = torch.cat([every[0, :, first : first + 4], every[0, :, 8 + slot][:, None]], 1)
            torch.testing.assert_close(found[0, :, slot], group.mean(1))
    assert torch.equal(tensors.keys[0, :, 2:], k[0, :, 10:])


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_residual_slot_of_largest_product(alpha: float) -> None:
    """Not of the largest cosine, and not a slot that is none."""
    state = ZSMergeState(torch.tensor([[[4, 8]]], dtype=torch.int32))
    keys = torch.tensor([[1.0, 0.0], [3.0, 3.0], [9.0, 0.0]])
    victim = torch.tensor([[1.0, 0.1]])
    slots = held(keys, [3, 7, 9], numbers=[1.0, 5.0**alpha, 1.0])._replace(priority=torch.zeros(1, 1, 3))
    merge = ZSMerge(slots=2, alpha=alpha).merge_token(state, held(victim, [1], numbers=[3.0**alpha]), slots)
    assert merge.slot.item() == 1 and merge.write_mask.item()
    assert merge.keys is not None and merge.counts is not None
    torch.testing.assert_close(merge.keys[0, 0], (5 * keys[1:2] + 3 * victim) / 8)
    torch.testing.assert_close(merge.counts, alpha * torch.tensor([[[math.log(8)]]]))
    assert state.hosts.tolist() == [[[4, 8]]]


def test_a_missing_residual_slot_is_found_again() -> None:
    """The token of lowest priority, of ties the latest, takes the victim in and the place of the old one."""
    state = ZSMergeState(torch.tensor([[[4, 2]]], dtype=torch.int32))
    keys = torch.randn(4, 2)
    slots = held(keys, [3, 7, 9, 11])._replace(
        there=torch.tensor([[[True, True, True, False]]]), priority=torch.tensor([[[5.0, 2.0, 2.0, 0.0]]])
    )
    merge = ZSMerge(slots=2).merge_token(state, held(keys[3:], [1]), slots)
    assert merge.slot.item() == 2 and sorted(state.hosts.flatten().tolist()) == [4, 10]


@pytest.mark.parametrize("policy", ["window+compensate@4", "window+zsmerge:slots=2@5"])
def test_equal_tokens_are_full_attention(policy: str) -> None:
    """If all that is evicted is equal, the slots give what the tokens would have given."""
    q, k, v = draw(12, 0)
    k[:, :, :10] = k[:, :, :1].clone()
    v[:, :, :10] = v[:, :, :1].clone()
    full = Bench("full", [12], new=4)
    slim = Bench(policy, [4 if "compensate" in policy else 5])
    for bench in (full, slim):
        bench.forward(q, k, v)
    # The step evicts a slot itself, whose mean moves on to a token that has the same key.
    query, new_k, new_v = draw(1, 9)
    want, got = (bench.forward(query, new_k, new_v) for bench in (full, slim))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_merged_groups_of_equal_tokens_are_full_attention() -> None:
    """Position p has the key and the value of group p % 6; six of seven slots stand for a group each."""
    generator = torch.Generator().manual_seed(0)
    q, _, _ = draw(24, 0)
    k, v = (torch.randn(1, 2, 6, 8, generator=generator).repeat(1, 1, 4, 1) for _ in range(2))
    full = Bench("full", [24], new=9)
    slim = Bench("window+merge@7", [7])
    for bench in (full, slim):
        bench.forward(q, k, v)
    # Each step evicts a token whose group another slot holds: in the first one, a slot that stands for four tokens.
    for step in range(7):
        query, _, _ = draw(1, step + 1)
        group = slice(step % 6, step % 6 + 1)
        want, got = (bench.forward(query, k[:, :, group], v[:, :, group]) for bench in (full, slim))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        counts = slim.layer.tensors.log_counts
        assert counts is not None
        torch.testing.assert_close(counts.exp().sum(-1), torch.full((1, 2), 25.0 + step))

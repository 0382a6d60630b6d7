"""ZSMerge: groups of a prompt, residual slots of the largest product, and what they count."""

from __future__ import annotations

import math

import pytest
import torch

from kvpolicy import Policy, ZSMerge
from kvpolicy.mergers.zsmerge import ZSMergeState
from kvpolicy.protocols import Tokens
from kvpolicy.text.errors import KVPolicyError
from tests.conformance.bench import Bench, draw
from tests.conformance.models import build
from tests.conformance.play import play
from tests.mergers.test_merge import candidates


def test_groups_of_neighbors() -> None:
    """A window of five: the slots of its two oldest tokens take in half of the rest each."""
    bench = Bench("window+zsmerge:slots=2@5", [5])
    _, k, v = draw(13, 0)
    bench.forward(*draw(13, 0))
    tensors = bench.layer.tensors
    assert tensors.log_counts is not None
    torch.testing.assert_close(tensors.log_counts.exp()[0, 0], torch.tensor([5.0, 5.0, 1.0, 1.0, 1.0]))
    for slot, first in ((0, 0), (1, 4)):
        for held, every in ((tensors.keys, k), (tensors.values, v)):
            group = torch.cat([every[0, :, first : first + 4], every[0, :, 8 + slot][:, None]], 1)
            torch.testing.assert_close(held[0, :, slot], group.mean(1))
    assert torch.equal(tensors.keys[0, :, 2:], k[0, :, 10:])


def test_counts_in_decoding() -> None:
    """Each step evicts a residual slot, whose mean moves on; no token is lost."""
    bench = Bench("window+zsmerge:slots=2@5", [5])
    bench.forward(*draw(13, 0))
    for step in range(7):
        bench.forward(*draw(1, step + 1))
        counts = bench.layer.tensors.log_counts
        assert counts is not None
        torch.testing.assert_close(counts.exp().sum(-1), torch.full((1, 2), 14.0 + step))
        assert int((counts > 0).sum(-1).max()) <= 2


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_residual_slot_of_largest_product(alpha: float) -> None:
    """Not of the largest cosine, and not a slot that is none."""
    merger = ZSMerge(slots=2, alpha=alpha)
    state = ZSMergeState(torch.tensor([[[4, 8]]], dtype=torch.int32))
    keys = torch.tensor([[[[1.0, 0.0], [3.0, 3.0], [9.0, 0.0]]]])
    there = torch.ones(1, 1, 3, dtype=torch.bool)
    counts = alpha * torch.tensor([[[1.0, 5.0, 1.0]]]).log()
    slots = Tokens(keys, keys, torch.tensor([[[3, 7, 9]]]), counts, there, torch.zeros(1, 1, 3))
    victim = torch.tensor([[[[1.0, 0.1]]]])
    token = Tokens(victim, victim, torch.tensor([[[1]]]), alpha * torch.tensor([[[math.log(3)]]]), there[..., :1])
    merge = merger.merge_token(state, token, slots)
    assert merge.slot.item() == 1 and merge.write_mask.item()
    assert merge.keys is not None and merge.counts is not None
    torch.testing.assert_close(merge.keys, (5 * keys[:, :, 1:2] + 3 * victim) / 8)
    torch.testing.assert_close(merge.counts, alpha * torch.tensor([[[math.log(8)]]]))
    assert state.hosts.tolist() == [[[4, 8]]]


def test_a_missing_residual_slot_is_found_again() -> None:
    """The token of lowest priority, of ties the latest, takes the victim in and the place of the old one."""
    merger = ZSMerge(slots=2)
    state = ZSMergeState(torch.tensor([[[4, 2]]], dtype=torch.int32))
    keys = torch.randn(1, 1, 4, 2)
    there = torch.tensor([[[True, True, True, False]]])
    priority = torch.tensor([[[5.0, 2.0, 2.0, 0.0]]])
    slots = Tokens(keys, keys, torch.tensor([[[3, 7, 9, 11]]]), torch.zeros(1, 1, 4), there, priority)
    token = Tokens(keys[:, :, 3:], keys[:, :, 3:], torch.tensor([[[1]]]), torch.zeros(1, 1, 1), there[..., :1])
    merge = merger.merge_token(state, token, slots)
    assert merge.slot.item() == 2 and sorted(state.hosts.flatten().tolist()) == [4, 10]


def test_equal_tokens_are_full_attention() -> None:
    """If all that is evicted is equal, the slots give what the tokens would have given."""
    q, k, v = draw(12, 0)
    k[:, :, :10] = k[:, :, :1].clone()
    v[:, :, :10] = v[:, :, :1].clone()
    full = Bench("full", [12], new=4)
    slim = Bench("window+zsmerge:slots=2@5", [5])
    for bench in (full, slim):
        bench.forward(q, k, v)
    query, new_k, new_v = draw(1, 9)
    want, got = (bench.forward(query, new_k, new_v) for bench in (full, slim))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_alpha_is_in_what_is_added_to_scores() -> None:
    keys = torch.randn(6, 2)
    given = candidates(keys, keys, [0, 5])._replace(length=torch.tensor([6]), priority=torch.arange(6.0)[None, None])
    merger = ZSMerge(slots=1, alpha=0.5)
    result = merger.merge_prompt(merger.alloc(1, 1, "cpu"), given)  # pyright: ignore[reportArgumentType]
    assert result.counts is not None
    torch.testing.assert_close(result.counts[0, 0], torch.tensor([0.5 * math.log(5), 0.0]))
    torch.testing.assert_close(result.values[0, 0, 0], keys[:5].mean(0))


def test_refusals() -> None:
    assert str(Policy.parse("snapkv+zsmerge@0.2")) == "snapkv+zsmerge@0.2"
    with pytest.raises(KVPolicyError, match="slots must be between 1 and 32767"):
        ZSMerge(slots=0)
    with pytest.raises(KVPolicyError, match=r"alpha must be between 0.01 and 1"):
        ZSMerge(alpha=0.0)


@pytest.mark.parametrize("rows", [[26], [26, 15]])
def test_one_residual_slot_is_a_compensation_slot(rows: list[int]) -> None:
    one, other = (play(build("llama"), f"h2o+{name}@9", rows)[2] for name in ("zsmerge:slots=1", "compensate"))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

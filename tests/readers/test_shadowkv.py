"""The basis of keys, their coefficients, and the keys that are rebuilt from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import KVPolicyError, Policy, ShadowKV
from kvpolicy.protocols import ModelInfo
from tests.readers.bench import DIM, GROUP, HEADS, Layer, draw, slow_output
from tests.reference.readers.shadowkv import singular_vectors

EVERY = torch.ones(1, dtype=torch.bool)


def moments(keys: Tensor) -> Tensor:
    """Sums of the outer products of keys [B, H, n, D]."""
    return keys.double().mT @ keys.double()


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 40])
@pytest.mark.parametrize("rank", [1, 3, DIM])
def test_the_basis_is_that_of_the_slow_version(tokens: int, rank: int) -> None:
    """Up to signs, and to what no key has a part in: what is rebuilt is the same."""
    keys = torch.randn(1, 2, tokens, DIM, generator=torch.Generator().manual_seed(tokens + rank))
    reader = ShadowKV(rank=rank, page=1)
    index: Any = reader.alloc(1, 2, tokens, DIM, torch.float32, "cpu")
    reader.fit_basis(index, moments(keys), EVERY)
    assert reader.has_basis(index).tolist() == [True]
    assert torch.allclose(index.vectors.mT @ index.vectors, torch.eye(rank).expand(1, 2, -1, -1), atol=1e-5)
    every = torch.arange(tokens).expand(1, 2, -1)
    reader.project(index, every, keys[:, :, :, None], torch.ones(1, 2, tokens, 1, dtype=torch.bool))
    rebuilt = reader.rebuild_keys(index, every)
    for head in range(2):
        vectors = torch.tensor(singular_vectors(keys[0, head].double().tolist())[:rank], dtype=torch.float64)
        want = keys[0, head].double() @ vectors.mT @ vectors
        assert torch.allclose(rebuilt[0, head].double(), want, atol=1e-4)
        # No other space of this rank is closer to the keys.
        rest = torch.linalg.svdvals(keys[0, head].double())[rank:].square().sum()
        assert torch.allclose((rebuilt[0, head] - keys[0, head]).double().square().sum(), rest, atol=1e-4)


def test_keys_in_few_directions_are_rebuilt_exactly() -> None:
    """Also where all are equal, or zero."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(1, 1, 30, 2, generator=generator) @ torch.randn(1, 1, 2, DIM, generator=generator)
    for keys in (few, torch.ones(1, 1, 30, DIM), torch.zeros(1, 1, 30, DIM)):
        reader = ShadowKV(rank=2, page=5)
        index: Any = reader.alloc(1, 1, 6, DIM, torch.float32, "cpu")
        reader.fit_basis(index, moments(keys), EVERY)
        paged = keys.unflatten(2, (6, 5))
        reader.project(index, torch.arange(6)[None, None], paged, torch.ones(1, 1, 6, 5, dtype=torch.bool))
        slots = torch.tensor([[[29, 0, 7, 7]]])
        assert torch.allclose(reader.rebuild_keys(index, slots), keys[:, :, slots[0, 0]], atol=1e-4)


def test_rows_that_are_not_asked_for_keep_their_basis() -> None:
    reader = ShadowKV(rank=2)
    index: Any = reader.alloc(2, 1, 3, DIM, torch.float32, "cpu")
    keys = torch.randn(2, 1, 8, DIM, generator=torch.Generator().manual_seed(0))
    reader.fit_basis(index, moments(keys), torch.tensor([True, False]))
    assert reader.has_basis(index).tolist() == [True, False]
    before = index.vectors.clone()
    reader.fit_basis(index, moments(keys * torch.arange(1, 1 + DIM)), torch.tensor([False, True]))
    assert torch.equal(index.vectors[0], before[0]) and reader.has_basis(index).tolist() == [True, True]


def test_landmarks_and_coefficients_leave_out_empty_slots() -> None:
    reader = ShadowKV(rank=1, page=2)
    index: Any = reader.alloc(1, 1, 2, 2, torch.float32, "cpu")
    reader.fit_basis(index, torch.diag(torch.tensor([5.0, 1.0])).double()[None, None], EVERY)
    keys = torch.tensor([[[[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [torch.nan, 0.0]]]]])
    occupied = torch.tensor([[[[True, True], [True, False]]]])
    every = torch.arange(2)[None, None]
    reader.refresh(index, every, keys, occupied)
    reader.project(index, every, keys, occupied)
    assert index.landmarks.tolist() == [[[[2.0, 3.0], [5.0, 6.0]]]]
    assert reader.coefficients(index).abs().flatten().tolist() == [1.0, 3.0, 5.0, 0.0]
    assert reader.rebuild_keys(index, torch.tensor([[[1, 3]]])).tolist() == [[[[3.0, 0.0], [0.0, 0.0]]]]


@pytest.mark.parametrize(
    ("recent", "sinks", "read", "base"),
    [(1, 0, 8, "full"), (3, 2, 8, "h2o"), (7, 5, 12, "full"), (2, 1, 4, "h2o"), (30, 30, 8, "full")],
)
def test_the_newest_and_the_first_tokens_have_their_own_keys(recent: int, sinks: int, read: int, base: str) -> None:
    """As many as are read, and no other; also where the last page is shorter, so that a slot is named twice."""
    at = "@0.5" if base == "h2o" else ""
    text = f"{base}+shadowkv:page=2:rank=2:read={read}:recent={recent}:sinks={sinks}:rebuild=50{at}"
    layer = Layer(text, [20 if at else 40], new=9)
    layer.prompt(*draw(40, 3))
    for step in range(9):
        q, k, v = draw(1, 30 + step)
        out = layer.step(q, k, v)
        read_by_head = [layer.positions_read(0, head) for head in range(HEADS)]
        assert all(40 + step in each for each in read_by_head)
        assert torch.allclose(out.double(), slow_output(layer, q, [read_by_head]), atol=1e-5)
        layer.between()


def test_a_low_rank_changes_what_is_read() -> None:
    """And the more, the lower it is; the pages that are read remain the same."""
    errors: list[float] = []
    for rank in (1, 4, 7):
        exact = Layer("full+shadowkv:read=16:rank=8:recent=1:sinks=0:page=4", [60], new=2)
        low = Layer(f"full+shadowkv:read=16:rank={rank}:recent=1:sinks=0:page=4", [60], new=2)
        for layer in (exact, low):
            layer.prompt(*draw(60, 4))
        outs = [layer.step(*draw(1, 5)) for layer in (exact, low)]
        assert low.positions_read(0, 0) == exact.positions_read(0, 0)
        errors.append(float((outs[0] - outs[1]).square().sum()))
    assert errors[0] > errors[1] > errors[2] > 1e-6


def test_generated_tokens_are_in_the_basis_of_the_prompt_until_it_is_found_again() -> None:
    layer = Layer("full+shadowkv:read=8:rank=3:page=2:recent=1:rebuild=5", [24], new=20)
    layer.prompt(*draw(24, 1))
    reads: Any = layer.store.tensors.reads
    before = reads.index.vectors.clone()
    for step in range(1, 11):
        now = draw(1, step)
        layer.step(*now)
        rebuilt = layer.policy.reader.rebuild_keys(reads.index, torch.full((1, HEADS, 1), 23 + step))  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.allclose(rebuilt, now[1] @ before @ before.mT, atol=1e-5)
        layer.between()
        assert torch.equal(reads.index.vectors, before) == bool(step % 5)
        before = reads.index.vectors.clone()


def test_of_equal_heads_the_group_decides() -> None:
    """A page is read if one query head of the group weights its landmark most."""
    layer = Layer("full+shadowkv:read=8:rank=3:page=4:recent=1:sinks=0", [32], new=1)
    k = torch.zeros(1, HEADS, 32, DIM)
    k[:, :, 12:16, 0] = 9.0
    q, _, v = draw(32, 2)
    layer.prompt(q, k, v)
    now = torch.zeros(1, HEADS * GROUP, 1, DIM)
    now[:, 1::GROUP, :, 0] = 3.0
    layer.step(now, torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, DIM))
    # Two pages: those of the newest token and of the first one come before it.
    assert layer.positions_read(0, 0) == {0, 1, 2, 3, 32}
    more = Layer("full+shadowkv:read=12:rank=3:page=4:recent=1:sinks=0", [32], new=1)
    more.prompt(q, k, v)
    more.step(now, torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, HEADS, 1, DIM))
    assert more.positions_read(0, 0) == {0, 1, 2, 3, 12, 13, 14, 15, 32}


@pytest.mark.parametrize(
    "spec", ["shadowkv:rank=0", "shadowkv:page=0", "shadowkv:sinks=-1", "shadowkv:rebuild=0", "shadowkv:recent=0"]
)
def test_numbers_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(KVPolicyError, match=r"ShadowKV\.[a-z]+ must be"):
        Policy.parse(f"full+{spec}")


def test_more_coefficients_than_a_key_has_channels_are_refused() -> None:
    with pytest.raises(KVPolicyError, match=r"ShadowKV\.rank must be at most the head dimension, 8, got 9; try 4"):
        ShadowKV(rank=9).check(ModelInfo(1, 1, DIM))
    ShadowKV(rank=8).check(ModelInfo(1, 1, DIM))
    ShadowKV().check(ModelInfo(1, 1, 1))
    with pytest.raises(KVPolicyError, match=r"at most the channels of all heads, 24, got 25; try 3"):
        ShadowKV(rank=25, joint=True).check(ModelInfo(1, 3, DIM))
    ShadowKV(rank=24, joint=True).check(ModelInfo(1, 3, DIM))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("tokenwise+shadowkv", "The codec must be plain for the reader shadowkv"),
        ("full+reuse/shadowkv", "Reuse.base must be a reader that reads keys as they are stored"),
        ("h2o+merge+shadowkv:host=true@0.5", "The merger must not merge while decoding"),
    ],
)
def test_what_it_is_not_combined_with(policy: str, message: str) -> None:
    with pytest.raises(KVPolicyError, match=message):
        Policy.parse(policy)

"""The counted law: identities, vectors, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import CountedMerge, Policy
from kvpolicy.protocols import Candidates, Merged, Tokens
from kvpolicy.registry import lookup, names
from tests.conformance.bench import Bench, draw
from tests.conformance.models import build
from tests.conformance.play import play

ACTIVE = [name for name in names("merger") if lookup(name)[1]().traits.when != "never"]

KEYS = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.9]])
VALUES = torch.tensor([[10.0, 0.0], [6.0, 2.0], [0.0, 10.0], [0.0, 8.0]])


def candidates(
    keys: Tensor, values: Tensor, kept: list[int], counts: Tensor | None = None, order: list[int] | None = None
) -> Candidates:
    """Tokens [N, D] of one head, of which some are kept; in the given order of columns, with the positions they had."""
    order = list(range(len(keys))) if order is None else order
    positions = torch.tensor(order, dtype=torch.int32)
    place = {position: column for column, position in enumerate(order)}
    targets = torch.tensor([place[position] for position in kept])
    is_kept = torch.zeros(len(keys), dtype=torch.bool)
    is_kept[targets] = True
    counts = torch.zeros(len(keys)) if counts is None else counts
    everything = (keys[order], values[order], positions, is_kept, targets, torch.ones(len(kept), dtype=torch.bool))
    return Candidates(*(t[None, None] for t in everything), counts=counts[order][None, None])


def merged(merger: CountedMerge, given: Candidates) -> Merged:
    return merger.merge_prompt(merger.alloc(1, 1, "cpu"), given)


def test_vector() -> None:
    """Tokens 0, 2 and 3 stay, and 1 goes to 0: cosine .993884; with two tokens, the mean value and log 2."""
    result = merged(CountedMerge(), candidates(KEYS, VALUES, [0, 2, 3]))
    assert result.keys is None and result.counts is not None
    torch.testing.assert_close(result.values[0, 0], torch.tensor([[8.0, 1.0], [0.0, 10.0], [0.0, 8.0]]))
    torch.testing.assert_close(result.counts[0, 0], torch.tensor([math.log(2), 0.0, 0.0]))


@pytest.mark.parametrize(("least", "merges"), [(0.9938, True), (0.9939, False)])
def test_the_gate(least: float, merges: bool) -> None:
    given = candidates(KEYS, VALUES, [0, 2, 3])
    result = merged(CountedMerge(least=least), given)
    assert torch.equal(result.values, given.at_targets(given.values)) is not merges
    assert result.counts is not None and bool(result.counts.any()) is merges


def test_the_nearest_position_and_ties() -> None:
    """Position 1 lies between 0 and 2, and 3 is nearest to 2: the earlier of two is taken."""
    result = merged(CountedMerge(by="position", least=-1), candidates(KEYS, VALUES, [0, 2]))
    assert result.counts is not None
    torch.testing.assert_close(result.counts[0, 0].exp(), torch.tensor([2.0, 2.0]))
    equal = torch.ones(4, 2)
    result = merged(CountedMerge(), candidates(equal, VALUES, [1, 3]))
    assert result.counts is not None
    torch.testing.assert_close(result.counts[0, 0].exp(), torch.tensor([3.0, 1.0]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by", ["keys", "position"])
def test_victims_in_any_order_give_the_same_slots(by: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(40, 6, generator=generator)
    values = torch.randn(40, 6, generator=generator)
    counts = torch.randint(1, 9, (40,), generator=generator).float().log()
    kept = sorted(torch.randperm(40, generator=generator)[:9].tolist())
    merger = CountedMerge(by=by, least=0.1)  # pyright: ignore[reportArgumentType]
    want = merged(merger, candidates(keys, values, kept, counts))
    got = merged(merger, candidates(keys, values, kept, counts, torch.randperm(40, generator=generator).tolist()))
    torch.testing.assert_close(got.values, want.values, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.counts, want.counts, atol=1e-6, rtol=1e-6)


def test_one_by_one_is_all_at_once() -> None:
    """The law is associative: a prompt that is merged in steps of decoding gives the same slots."""
    keys, values = (torch.randn(20, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    merger = CountedMerge(least=-1)
    kept = [1, 4, 7]
    want = merged(merger, candidates(keys, values, kept))
    held = values[kept].clone()
    counts = torch.zeros(3)
    for victim in range(20):
        if victim in kept:
            continue

        def one(*parts: Tensor) -> list[Tensor]:
            return [part[None, None] for part in parts]

        token = Tokens(
            *one(keys[[victim]], values[[victim]], torch.tensor([victim]), torch.zeros(1), torch.tensor([True]))
        )
        slots = Tokens(*one(keys[kept], held, torch.tensor(kept), counts, torch.ones(3, dtype=torch.bool)))
        merge = merger.merge_token((), token, slots)
        assert merge.counts is not None
        held[merge.slot.item()] = merge.values[0, 0, 0]  # pyright: ignore[reportArgumentType]
        counts[merge.slot.item()] = merge.counts[0, 0, 0]  # pyright: ignore[reportArgumentType]
    assert want.counts is not None
    torch.testing.assert_close(held, want.values[0, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(counts, want.counts[0, 0], atol=1e-5, rtol=1e-5)


def test_equal_tokens_merged_are_full_attention() -> None:
    """Tokens in groups with equal keys: merging all of a group gives the attention of all tokens, to 1e-6."""
    generator = torch.Generator().manual_seed(0)
    q, _, _ = draw(24, 0)
    keys = torch.randn(1, 2, 6, 8, generator=generator)
    k = keys.repeat(1, 1, 4, 1)  # position p has the key of group p % 6
    v = torch.randn(1, 2, 6, 8, generator=generator).repeat(1, 1, 4, 1)
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


@pytest.mark.parametrize("name", ACTIVE)
def test_no_victim_is_the_base_bit_for_bit(name: str) -> None:
    base, merging = (play(build("llama"), policy, [26])[2] for policy in ("h2o@64", f"h2o+{name}@64"))
    assert torch.equal(base, merging)


def test_nothing_similar_is_the_base_bit_for_bit() -> None:
    base, merging = (play(build("llama"), policy, [26, 15])[2] for policy in ("snapkv@9", "snapkv+merge:least=1@9"))
    torch.testing.assert_close(base, merging, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("full+merge", r"must be combined with a selector that evicts tokens, got full, .*; try snapkv\."),
        ("snapkv:decode=grow+merge@1.0", "must evict tokens, got the budget 1.0, which keeps them all; try 0.2"),
        ("h2o+merge:least=2", r"CountedMerge.least must be between -1 and 1, got 2.0; try 0.9"),
        ("h2o+merge:by=size", "by"),
        ("h2o+merge+merge", "at most one merger"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        Policy.parse(spec)


def test_specs() -> None:
    assert str(Policy.parse("kivi+merge+h2o+squeeze@0.2")) == "squeeze+h2o+merge+kivi@0.2"
    assert Policy.parse("h2o+drop@0.2") == Policy.parse("h2o@0.2")
    assert Policy.parse("h2o+merge@1.0").merger == CountedMerge()
    assert Policy.parse("snapkv+merge@0.2").budget == 0.2

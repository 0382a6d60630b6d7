"""Compactor: its vector, what takes part in its scores, and prompts of every length in any pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.protocols import View
from kvpolicy.selectors.blocks import BlockAttention
from kvpolicy.selectors.compactor import Compactor, key_leverage, leverage, projection
from kvpolicy.statistics import Candidates, Results, UnrotatedKeys, Vectors
from kvpolicy.testing import check_cache
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from tests.conformance.bench import DIM, Bench, draw, padding
from tests.conformance.fakes import Roll, apply, undo
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.replay import Twin, reference_codec

SMALL = "compactor:sinks=2:recent=2:block=8:sketch=4"


def test_the_vector() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.0, 0.9]])
    got = leverage(keys - keys.mean(0), 0.01)
    assert got.tolist() == pytest.approx([0.303022, 0.196978, 0.371437, 0.331528], abs=1e-6)


def test_keys_are_projected_after_their_mean_was_subtracted() -> None:
    keys = torch.randn(2, 3, 1200, 8, generator=torch.Generator().manual_seed(0)) + 5  # more than a tile
    counts = torch.rand(2, 3, 1200, generator=torch.Generator().manual_seed(1)) < 0.8
    got = key_leverage(keys.masked_fill(~counts[..., None], torch.inf), counts, 4, 0.5, 3)
    for b in range(2):
        for h in range(3):
            own = keys[b, h, counts[b, h]].double()
            want = leverage((own - own.mean(0)) @ projection(8, 4, 3), 0.5)
            torch.testing.assert_close(got[b, h, counts[b, h]], want)
            # The trace of the matrix: all directions but for the part of `regular`.
            assert 3.9 < float(want.sum()) < 4


def test_each_layer_has_its_own_projection_whatever_was_drawn_before() -> None:
    first = projection(64, 48, 1)
    torch.randn(7)
    assert torch.equal(first, projection(64, 48, 1)) and not torch.equal(first, projection(64, 48, 2))
    assert float(first.square().sum(1).mean()) == pytest.approx(1, abs=0.1)


def test_equal_scores_keep_the_earliest() -> None:
    """Keys without a difference have a leverage of rounding errors, and equal products give equal attention."""
    bench = Bench("compactor:sinks=0:recent=1:block=5:sketch=4:blend=1", [4])
    q, k, v = draw(20, 0)
    bench.forward(q, torch.full_like(k, 0.3), torch.zeros_like(v))
    assert bench.turns[0].kept[0] == [[0, 1, 2, 19]] * 2
    assert bool((bench.layer.tensors.state.score != 0).all()), "a score of 0 would be that of a token without one"
    bench.check()


def test_padding_in_the_last_block_takes_no_part() -> None:
    """Alone, in longer rows, and behind other padding, to the same scores."""
    q, k, v = draw(11, 3)
    alone = Bench(SMALL, [11])
    alone.forward(q, k, v)
    for right in (False, True):
        wide = [torch.full((2, t.shape[1], 23, DIM), torch.nan) for t in (q, k, v)]
        valid = padding(23, 23, 11, right=right)
        for t, own in zip(wide, (q, k, v), strict=True):
            t[0] = torch.randn(t.shape[1:], generator=torch.Generator().manual_seed(9))
            t[1, :, valid[1]] = own[0]
        bench = Bench(SMALL, [11, 11])
        q_wide, k_wide, v_wide = (t.nan_to_num(7.0) for t in wide)
        bench.forward(q_wide, k_wide, v_wide, valid)
        at = bench.layer.tensors.positions[1, 0, :11].argsort()
        got, want = (t.layer.tensors.state.score[-1, :, : len(at)] for t in (bench, alone))
        torch.testing.assert_close(got[:, at], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 9])
def test_prompts_that_are_hardly_longer_than_the_sinks(prompt: int) -> None:
    bench = Bench(SMALL, [4, 3])
    for number, size in enumerate([prompt, *[1] * 6, 1 + prompt, 1]):
        bench.forward(*draw(size, number, batch=2))
    assert bench.turns[-1].kept[0][0][:2] == [0, 1] and bench.turns[-1].kept[1][0][0] == 0
    bench.check()


@pytest.mark.parametrize("sinks", [0, 2, 3, 9])
@pytest.mark.parametrize("recent", [1, 2, 4])
def test_the_smallest_budget_holds_what_is_always_kept(sinks: int, recent: int) -> None:
    least = Compactor(sinks=sinks, recent=recent).min_tokens
    assert least == 1 or min(sinks, (least - 1) // 2) + recent > least - 1
    bench = Bench(f"compactor:sinks={sinks}:recent={recent}:block=4:sketch=2", [least, least + 1])
    bench.forward(*draw(20, 1, batch=2), padding(20, 20, 13))
    for number in range(5):
        bench.forward(*draw(1, number + 2, batch=2))
        for row, length in enumerate([21, 14]):
            newest = length + number
            for kept in bench.turns[-1].kept[row]:
                assert kept[-recent:] == [*range(newest - recent, newest)]
                assert kept[: min(sinks, len(kept) // 2)] == [*range(min(sinks, len(kept) // 2))]
    bench.check()


def test_generated_tokens_outrank_those_that_are_scored() -> None:
    """The newest of them stay, and a later prompt scores its own tokens and no others."""
    bench = Bench(SMALL, [10])
    bench.forward(*draw(30, 0))
    before = scores_by_position(bench)
    for number in range(3):
        bench.forward(*draw(1, number + 1))
    bench.forward(*draw(12, 9))
    kept = bench.turns[-1].kept[0][0]
    assert {0, 1, 30, 31, 32} <= {*kept}
    after = scores_by_position(bench)
    assert all(after[p] == before[p] for p in kept if p < 30) and all(after[p] == 0 for p in (30, 31, 32))
    assert all(after[p] != 0 for p in kept if p > 32)
    bench.check()


def scores_by_position(bench: Bench) -> dict[int, float]:
    """The score of each token of the first head."""
    tensors = bench.layer.tensors
    pairs = zip(tensors.positions[0, 0].tolist(), tensors.state.score[0, 0].tolist(), strict=True)
    return {position: score for position, score in pairs if position >= 0}


def test_leverage_counts_as_much_as_is_evicted() -> None:
    """And not at all where everything is kept."""
    positions = torch.arange(12, dtype=torch.int32).expand(3, 2, -1)
    view = View(positions, torch.full((3,), 12), torch.tensor([3, 12, 40]), 0, added=torch.full((3,), 12))
    q, k, v = draw(12, 5, batch=3)
    seen = Results({Vectors: Candidates(k, v, 1.0), UnrotatedKeys: k, BlockAttention: q.square().sum(-1)})

    def score(blend: Any) -> Tensor:
        selector = Compactor(sinks=0, sketch=4, blend=blend)
        state: Any = selector.observe(selector.alloc(3, 2, 12, "cpu"), seen, view)
        return state.score

    attention = score(0)
    both = score(1)
    torch.testing.assert_close(score("auto")[0], attention[0] + 0.75 * (both - attention)[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(score("auto")[1:], attention[1:])


@pytest.mark.parametrize(
    "policy",
    [
        f"{SMALL}:blend=2",
        f"{SMALL}:decode=grow",
        f"{SMALL}+kivi:bits=4:group_size=4:residual_length=4",
        f"kvcrush:split=0.3/{SMALL}",
        f"kvcrush/{SMALL}:decode=grow",
    ],
)
def test_steps_of_some_rows(policy: str) -> None:
    twin = Twin(reference_codec(Policy.parse(policy).codec), lambda layer: (undo, apply))
    bench = Bench(policy, [12, 10], new=60, rope=Roll(), layer_idx=2, twin=twin)
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for number in range(12):
        valid = torch.tensor([[True], [number % 3 != 0]])
        bench.forward(*draw(1, number + 1, batch=2), None if number % 2 else valid)
    bench.forward(*draw(19, 99, batch=2), padding(19, 0, 15))
    bench.forward(*draw(3, 100, batch=2), padding(3, 3, 1, right=True))
    assert bench.check().turns == 27


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("pieces", [[20], [12, 8]])
def test_a_row_is_itself_whatever_its_positions_begin_with(family: str, pieces: list[int]) -> None:
    """Left padding that counts as positions shifts the rotation of keys, which a projection does not undo."""
    model = build(family)
    ids, mask = make_batch([20, 13], [20])
    with kvpolicy.attach(model, f"{SMALL}@9", chunks="hold"):
        cache = PolicyCache(model, prompt=torch.tensor([20, 13]))
        alone = PolicyCache(model)
        start = 0
        for size in pieces:
            with torch.no_grad():  # its position_ids count the padding
                model(ids[:, start : start + size], attention_mask=mask[:, : start + size], cache=cache)
            start += size
        forward(model, ids[1:, 7:], mask[1:, 7:], 0, 13, alone)
    second_is(cache, alone)


def test_a_row_may_end_before_the_last_chunk() -> None:
    """Where the positions of its padding say nothing of those of its tokens."""
    model = build("llama")
    ids, mask = make_batch([20, 20], [20])
    mask[1, 13:] = 0
    with kvpolicy.attach(model, f"{SMALL}@9", chunks="hold"):
        cache = PolicyCache(model, prompt=torch.tensor([20, 13]))
        alone = PolicyCache(model)
        for start, stop in ((0, 13), (13, 20)):
            forward(model, ids, mask, start, stop, cache)
        forward(model, ids[1:, :13], mask[1:, :13], 0, 13, alone)
    second_is(cache, alone)


def second_is(cache: PolicyCache, alone: PolicyCache) -> None:
    """The second row of a cache has the tokens and scores that it has alone."""
    for some, one in zip(cache.policy_layers, alone.policy_layers, strict=True):
        order, only = (t.positions.argsort(-1) for t in (some, one))
        assert torch.equal(some.positions.gather(-1, order)[1:], one.positions.gather(-1, only))
        got, want = (t.store.tensors.state.score.gather(-1, at) for t, at in ((some, order), (one, only)))
        torch.testing.assert_close(got[1:], want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("policy", ["uniform/even", "uniform/even+tokenwise:group_size=4:residual_length=4"])
def test_pages_of_heads(policy: str) -> None:
    """A decode step looks at no key, so that heads may have budgets of their own."""
    model = build("llama")
    allocator, *codec = policy.split("+")
    ids, mask = make_batch([30, 21], [30, 1, 6])
    with kvpolicy.attach(model, "+".join([allocator, SMALL, *codec]) + "@20"):
        cache = PolicyCache(model, new=9)
        assert talk(model, ids, mask, [30, 1, 6], cache).isfinite().all()
        check_cache(cache)
    with pytest.raises(KVPolicyError, match="compares them across"):
        Policy.parse(f"uniform/adakv+{SMALL}@20")


def test_another_cache_needs_the_rotary_embedding() -> None:
    model = build("llama")
    with kvpolicy.attach(model, "h2o@9"), pytest.raises(KVPolicyError, match=r"undo the same rotations.*same selector"):
        PolicyCache(model, "compactor@9")


@pytest.mark.parametrize(
    "wrong",
    [{"sinks": -1}, {"recent": 0}, {"block": 0}, {"sketch": 0}, {"blend": -0.5}, {"blend": 1e9}, {"regular": 0.0}],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(KVPolicyError, match=r"Compactor.* must be .*got.* try"):
        Compactor(**wrong)


def test_a_weight_is_a_number_or_auto() -> None:
    assert Compactor(blend=1).blend == 1.0
    with pytest.raises(KVPolicyTypeError, match=r"Compactor.blend must be a number, got 'half'"):
        Compactor(blend="half")  # pyright: ignore[reportArgumentType]

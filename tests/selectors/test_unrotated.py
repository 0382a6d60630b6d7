"""Selectors that undo rotations: Compactor, its leverage and blocks, and ExpectedAttention, its mean and moments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.kernels.rotary import KeyRotation, Rope
from kvpolicy.protocols import HeadShape, View
from kvpolicy.selectors.compactor import Compactor, key_leverage, leverage, projection
from kvpolicy.selectors.expected import Expectation, ExpectedAttention
from kvpolicy.statistics import Candidates, Moments, ObservedMoments, Results, Vectors
from kvpolicy.statistics.query_moments import sum_moments
from kvpolicy.testing import check_cache
from kvpolicy.text.errors import KVPolicyError
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


@pytest.mark.parametrize("sinks", [0, 2, 3, 9])
@pytest.mark.parametrize("recent", [1, 2, 4])
def test_the_smallest_budget_holds_what_is_always_kept(sinks: int, recent: int) -> None:
    least = Compactor(sinks=sinks, recent=recent).min_tokens
    assert least == 1 or min(sinks, (least - 1) // 2) + recent > least - 1
    bench = Bench(f"compactor:sinks={sinks}:recent={recent}:block=4:sketch=2", [least, least + 1])
    bench.forward(*draw(20, 1, batch=2), padding(20, 20, 13))
    for number in range(5):
        bench.forward(*draw(1, number + 2, batch=2))
    bench.check()


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
@pytest.mark.parametrize(
    ("spec", "pieces"), [(SMALL, [20]), (SMALL, [12, 8]), ("expected:sinks=2:horizon=5", [20])], ids=str
)
def test_a_row_is_itself_whatever_its_positions_begin_with(family: str, spec: str, pieces: list[int]) -> None:
    """Left padding that counts as positions shifts the rotation of queries and keys alike."""
    model = build(family)
    ids, mask = make_batch([20, 13], [20])
    with kvpolicy.attach(model, f"{spec}@9", chunks="hold"):
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


@pytest.mark.parametrize("spec", ["compactor", "expected"])
def test_another_cache_needs_the_rotary_embedding(spec: str) -> None:
    model = build("llama")
    with kvpolicy.attach(model, "h2o@9"), pytest.raises(KVPolicyError, match=r"undo the same rotations.*same selector"):
        PolicyCache(model, f"{spec}@9")


def rope(**more: Any) -> Rope:
    config = LlamaConfig(hidden_size=2 * DIM, num_attention_heads=2, max_position_embeddings=64, **more)
    return Rope(LlamaRotaryEmbedding(config), apply_rotary_pos_emb, None)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("scaled", [{}, {"rope_parameters": YARN}], ids=["default", "yarn"])
def test_the_mean_rotation_is_the_mean_of_rotations(scaled: dict[str, Any]) -> None:
    """Of the model's own tables, attention scaling included, for each row's own positions."""
    table = rope(**scaled)
    vectors = torch.randn(2, 3, 5, DIM, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([7, 30])
    got = table.mean_rotation(vectors, first, 11)
    every = [table.rotate(vectors, (first + ahead)[:, None, None].expand(2, 3, 5)) for ahead in range(11)]
    torch.testing.assert_close(got, torch.stack(every).mean(0), atol=2e-6, rtol=1e-5)
    undone = table.unrotate_rows(table.rotate(vectors, torch.arange(5).expand(2, 3, 5)), torch.arange(5).expand(2, 5))
    torch.testing.assert_close(undone, vectors, atol=1e-6, rtol=1e-5)


def scores(queries: Tensor, keys: Tensor, values: Tensor, table: Rope | None = None, **options: Any) -> Expectation:
    """The state after a prompt of plain queries [1, Hq, P, D]."""
    count = keys.shape[2]
    selector = ExpectedAttention(sinks=0, **options)
    positions = torch.arange(count, dtype=torch.int32)
    view = View(positions.expand(1, keys.shape[1], -1), torch.tensor([count]), torch.tensor([2]), 0)
    state = selector.alloc(1, keys.shape[1], count, "cpu", HeadShape(queries.shape[1] // keys.shape[1], DIM))
    moments = sum_moments(queries, keys.shape[1], torch.arange(queries.shape[2])[None], 0, None)
    tokens = Candidates(keys, values, DIM**-0.5)
    seen = Results({Vectors: tokens, Moments: ObservedMoments(moments, KeyRotation(table))})
    return selector.observe(state, seen, view)  # pyright: ignore[reportReturnType]


def test_it_is_the_mean_over_a_normal_distribution() -> None:
    """Against a million queries drawn with the same mean and covariance, at one position."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(DIM, DIM, generator=generator) / 3
    sample = torch.randn(4000, DIM, generator=generator) @ basis + torch.randn(DIM, generator=generator) / 2
    keys = torch.randn(1, 1, 6, DIM, generator=generator)
    values = torch.ones(1, 1, 6, DIM)
    table = rope()
    got = scores(sample[None, None], keys, values, table, horizon=1)
    mean = sample.mean(0)
    spread = torch.cov(sample.T, correction=0)
    drawn = torch.distributions.MultivariateNormal(mean, spread).sample((1_000_000,))
    turned = table.rotate(drawn[None, None], torch.full((1, 1, 1_000_000), 6))[0, 0]
    want = (turned @ keys[0, 0].T * DIM**-0.5).exp().mean(0)
    share = (got.score[0, 0] - math.log(DIM**0.5)).exp()
    torch.testing.assert_close(share, want / want.sum(), atol=0, rtol=0.02)


def test_small_weights_do_not_tie() -> None:
    """Whose share of the attention is far below what fp32 holds."""
    queries = torch.full((1, 1, 9, DIM), 5.0)
    keys = -torch.arange(6).float()[None, None, :, None].expand(1, 1, 6, DIM) * 3
    score = scores(queries, keys, torch.ones(1, 1, 6, DIM)).score[0, 0]
    assert bool((score.diff() < -10).all()) and float(score[-1]) < -200


def test_a_value_of_zeros_is_worth_nothing_and_no_loss() -> None:
    values = torch.ones(1, 1, 4, DIM)
    values[0, 0, 2] = 0
    got = scores(torch.zeros(1, 2, 4, DIM), torch.randn(1, 1, 4, DIM), values)
    assert got.score[0, 0].argmin() == 2 and bool(got.score.isfinite().all())
    assert got.score[0, 0, [0, 1, 3]].unique().numel() == 1


def test_unscored_tokens_never_fill_more_than_half_a_budget() -> None:
    """So that generated tokens do not push the prompt out before they are compared with it."""
    bench = Bench("expected:sinks=1:every=500", [12])
    bench.forward(*draw(40, 0))
    for number in range(60):
        bench.forward(*draw(1, number + 1))
        state: Any = bench.layer.tensors.state
        assert int((bench.layer.tensors.positions >= state.ranked[:, None, None]).sum(-1).max()) <= 6
    assert bench.layer.tensors.state.queries.tolist() == [99] and bench.check().turns == 61


@pytest.mark.parametrize(
    "policy",
    [
        "expected:sinks=2:decode=grow:moments=prompt",
        "expected:sinks=0:epsilon=0.01:decode=grow:moments=prompt+kivi:group_size=4:residual_length=4",
    ],
)
def test_moments_of_the_newest_prompt_alone(policy: str) -> None:
    """A second prompt of two queries, one of one, and one in which a row has only padding."""
    bench = Bench(policy, [9, 8], new=12)
    bench.forward(*draw(20, 0, batch=2), padding(20, 20, 13))
    for turn, valid in enumerate([padding(9, 2, 9), padding(3, 1, 3), padding(9, 9, 0)]):
        for number in range(4):
            bench.forward(*draw(1, 10 * turn + number + 1, batch=2))
        bench.budgets = [11 + turn, 9]
        bench.forward(*draw(valid.shape[1], 99 + turn, batch=2), valid)
        state: Any = bench.layer.tensors.state
        assert not state.total.numel() and not state.product.numel() and not state.queries.any()
    bench.check()
